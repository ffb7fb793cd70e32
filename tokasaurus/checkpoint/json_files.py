"""JSON objects in files, and their typed fields; errors name the file or the field, and what is allowed.

CheckpointError is the error type of the whole package.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokasaurus.messages.status import UserError, one_line

Fields = Mapping[str, Any]

_MAX_BYTES = 1 << 28
"""More than any configuration, index or tokenizer has; the parsed value may take ten times as much memory."""


class CheckpointError(UserError):
    """A model cannot be found, downloaded, read or run. The message is one line for the user."""

    exit_code = 2
    """The exit code for a wrong flag: the same command would fail again."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CheckpointUnavailable(CheckpointError):
    """Nothing is known to be wrong with the model: the network, a disk or another program does not do its part."""

    exit_code = 1


def unreadable(path: Path, file_format: str, error: Exception) -> CheckpointError:
    """What to raise for a file that cannot be read, unless `raise_shortage` raises."""
    raise_shortage(error)
    return CheckpointError(f"{path} is not a readable {file_format} file: {error}")


def raise_shortage(error: Exception) -> None:
    """Raises `error` if it is a lack of memory or of open files, which is not the file's fault."""
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        raise error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if the file is missing or contains anything else, and
    OSError as `raise_shortage` does."""
    if not path.is_file():  # reading a pipe would not end
        raise CheckpointError(f"{path.parent} has no {path.name}")
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes, which is too large for a JSON file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise_shortage(error)
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return value


def parse_json(content: bytes) -> object:
    """The value of JSON in UTF-8. Raises ValueError."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def positive_int(fields: Fields, name: str, maximum: int, default: int | None = None) -> int:
    """The field's value. An absent or null field takes the default; without a default it is an error."""
    value = _value(fields, name, default)
    if type(value) is not int or not 1 <= value <= maximum:
        raise CheckpointError(f"{name} must be a positive integer, at most {maximum}, not {value!r}")
    return value


def positive_float(fields: Fields, name: str, maximum: float, default: float | None = None) -> float:
    """The field's value; absent and null fields are treated as by positive_int."""
    value = _value(fields, name, default)
    # not NaN, which compares as false
    if type(value) not in (int, float) or not 0 < value <= maximum:
        raise CheckpointError(f"{name} must be a positive number, at most {maximum:g}, not {value!r}")
    return float(value)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    """An absent or null field takes the default."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{name} must be true or false, not {value!r}")
    return default if value is None else value


def json_object(fields: Fields, name: str) -> dict[str, Any]:
    """An absent or null field is empty."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} must be an object, not {value!r}")
    return value or {}


def _value(fields: Fields, name: str, default: float | None) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{name} is missing")
    return value
