"""What can be wrong with a batch's input file. Imports nothing heavy: a child process of its own uses it."""

from dataclasses import asdict, dataclass

import orjson

MAX_SHOWN_ERRORS = 1000
"""A file may have an error in each line; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class InputError:
    """One error. Fields as in OpenAI's `errors.data`."""

    code: str
    message: str
    line: int | None = None
    """The line's number, from 1; None if the error is the whole file's."""
    param: str | None = None


def dump_errors(errors: list[InputError]) -> str:
    """JSON list for the database."""
    return orjson.dumps([asdict(error) for error in errors]).decode()
