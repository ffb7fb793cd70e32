"""Bodies that become bodies of another endpoint: a table of fields gives their values and their names in errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Generic, TypeVar

from tokasaurus.server.errors import InvalidRequest

Source = TypeVar("Source", contravariant=True)


class FieldTable(Generic[Source]):
    """The fields of the body that is made, each with the path of a field of the source; or with the name that errors
    have for it, and a function of the source that returns the value."""

    def __init__(self, **fields: str | tuple[str, Callable[[Source], object]]) -> None:
        found = {
            name: (field, attrgetter(field)) if isinstance(field, str) else field for name, field in fields.items()
        }
        self._names = {name: path for name, (path, _) in found.items()}
        self._values = {name: value for name, (_, value) in found.items()}

    def values(self, source: Source) -> dict[str, Any]:
        """The fields of the body that is made of `source`."""
        return {name: value(source) for name, value in self._values.items()}

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors name the source's fields."""
        try:
            yield
        except InvalidRequest as error:
            name = self._names.get(error.param or "")
            if name is not None:
                error.message = error.message.replace(str(error.param), name, 1)
                error.param = name
            raise
