"""The input of a run: a file with one request per line, or a copy of what can be read only once, such as a pipe."""

import hashlib
import os
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from tokasaurus.commands.batch.errors import CommandError, InputRefused
from tokasaurus.files import numbered_lines
from tokasaurus.server.jobs.validation_process import InputReader

MAX_PRINTED_ERRORS = 20
_NO_LIMIT = 1 << 60
_STANDARD_INPUT = ("-", "/dev/stdin")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Tells whether a file has changed."""

    num_bytes: int
    sha256: str


def fingerprint(path: Path, flag: str = "input") -> Fingerprint:
    """flag: the one that names the file. Raises CommandError."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
                num_bytes += len(part)
    except OSError as error:
        raise CommandError(f"{flag}={path}: {error.strerror}") from None
    return Fingerprint(num_bytes, digest.hexdigest())


def is_stream(name: str) -> bool:
    """Whether the input can be read only once: standard input (-), a pipe, a terminal, a socket."""
    if name in _STANDARD_INPUT or name.startswith("/dev/fd/"):
        return True
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def copy_stream(name: str, destination: Path, max_bytes: int | None) -> Fingerprint:
    """Copy an input that can be read only once, up to its end; the copy is on the disk. Raises CommandError.

    max_bytes: None for no limit."""
    num_bytes = 0
    if name in _STANDARD_INPUT and sys.stdin is None:  # the descriptor is another file's meanwhile
        raise CommandError(f"input={name}: standard input is closed")
    try:
        # Opened again by its name, a socket could not be read, and on some systems no pipe either.
        source = 0 if name in _STANDARD_INPUT else os.open(name, os.O_RDONLY)
        with os.fdopen(source, "rb", closefd=source != 0) as stream, destination.open("wb") as copy:
            while part := stream.read(1 << 20):
                num_bytes += len(part)
                if max_bytes is not None and num_bytes > max_bytes:
                    raise CommandError(f"input={name}: has more than {max_bytes} bytes (max_file_bytes)")
                copy.write(part)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        raise CommandError(f"input={name}: {error.strerror}") from None
    return fingerprint(destination)


def find_endpoint(path: Path) -> str:
    """The url of the first line, which all lines must have; blank lines are no lines. Raises CommandError."""
    for number, line in request_lines(path):
        value = _parse(line)
        if value is None:
            raise InputRefused(f"line {number}: must be a JSON object")
        url = value.get("url")
        if not isinstance(url, str):
            raise InputRefused(f"line {number}: url: must be the endpoint, such as /v1/chat/completions")
        return url
    raise InputRefused(f"input={path}: the file has no lines")


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a server accepts."""

    endpoints: Collection[str]
    max_lines: int
    max_line_bytes: int


def check_input(path: Path, endpoint: str, limits: InputLimits | None, name: str | None = None) -> None:
    """Check each line as the server will, but for its body, which only makes a line fail.

    endpoint: by `find_endpoint`. limits: None for a server whose limits are not known, and which may know more fields.
    name: as the user gave it; None if it is the path. Raises InputRefused with a line for each bad line of the input,
    and CommandError."""
    if limits is not None and endpoint not in limits.endpoints:
        raise InputRefused(f"url: the first line has {endpoint!r}: it must be {' or '.join(limits.endpoints)}")
    max_lines, max_line_bytes = (_NO_LIMIT, _NO_LIMIT) if limits is None else (limits.max_lines, limits.max_line_bytes)
    reader = InputReader(endpoint, max_lines, max_line_bytes)
    try:
        with path.open("rb", buffering=1 << 20) as content:
            for _ in reader.lines(content):
                pass
    except OSError as error:
        raise CommandError(f"input={path}: {error.strerror}") from None
    if limits is None and all(error.code == "unknown_parameter" for error in reader.errors):
        return
    if reader.errors:
        errors = [asdict(error) for error in reader.errors]
        raise InputRefused(show_errors(f"input={path if name is None else name} is bad:", errors, reader.num_errors))


def show_errors(heading: str, errors: Sequence[dict[str, Any]], num_errors: int, is_least: bool = False) -> str:
    """The heading, and a line for each bad line of the input, up to MAX_PRINTED_ERRORS.

    errors: with the fields of OpenAI's `errors.data`. num_errors: of the input, or, if is_least, the fewest it has."""
    lines = [heading]
    for error in errors[:MAX_PRINTED_ERRORS]:
        place = "the file" if error.get("line") is None else f"line {error['line']}"
        # other servers' messages may not name the field
        is_named = not error.get("param") or str(error["param"]) in str(error.get("message"))
        param = "" if is_named else f"{error['param']}: "
        lines.append(f"{place}: {param}{error.get('message')}")
    if num_errors > MAX_PRINTED_ERRORS:
        lines.append(f"and {'at least ' if is_least else ''}{num_errors - MAX_PRINTED_ERRORS} more")
    return "\n".join(lines)


def request_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """`numbered_lines` of the file. Raises CommandError."""
    try:
        with path.open("rb") as file:
            yield from numbered_lines(file)
    except OSError as error:
        raise CommandError(f"input={path}: {error.strerror}") from None


def custom_ids(path: Path) -> Iterator[str]:
    """The custom_id of each line of a file that a server has found valid. Raises CommandError."""
    for number, line in request_lines(path):
        value = _parse(line)
        if value is None or not isinstance(value.get("custom_id"), str):
            raise CommandError(f"input={path}: line {number} was changed while the batch ran")
        yield value["custom_id"]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
