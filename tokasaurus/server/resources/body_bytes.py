"""How many bytes of bodies the server holds that are being received or parsed, in all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokasaurus.server.errors import TooManyBodies


class BodyBytes:
    """Bytes of all bodies that are not parsed yet, up to `max_bytes`. Used by the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def of_one_body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts further bytes of a body, until the context ends. It raises TooManyBodies."""
        num_own_bytes = 0

        def add(num_bytes: int) -> None:
            nonlocal num_own_bytes
            if self._num_bytes + num_bytes > self._max_bytes:
                limit = f"{self._max_bytes} bytes (max_body_bytes_in_all)"
                raise TooManyBodies(f"the bodies that the server is receiving may have at most {limit} together")
            self._num_bytes += num_bytes
            num_own_bytes += num_bytes

        try:
            yield add
        finally:
            self._num_bytes -= num_own_bytes
