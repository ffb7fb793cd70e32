"""The input of a run: a file with one request per line."""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tokasaurus.batch_command.errors import CommandError, InputRefused


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


def request_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, from 1; content) of each line that is not blank, without the byte-order mark that editors of Windows
    write at the start of a file. Raises CommandError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    yield number, content
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
