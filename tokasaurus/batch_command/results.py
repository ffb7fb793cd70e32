"""The results of a batch, which come in two files, as one file in the order of the input."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.input_file import custom_ids
from tokasaurus.batch_command.outcome import Outcome
from tokasaurus.server.batches.store.data_dir import sync_directory
from tokasaurus.text.json_lines import escape_line_ends

_Place = tuple[int, int, int]
"""(index of the file, start, size) of a line."""


class OutputFile:
    """A file that gets its name only when it is whole and on the disk: without `commit`, the context leaves nothing."""

    def __init__(self, path: Path, batch_id: str) -> None:
        """batch_id: makes the temporary name one that only this run uses, so that it can remove what a killed run of
        the same batch has left. Raises OSError."""
        unique = hashlib.sha256(batch_id.encode()).hexdigest()[:16]
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{unique}.part")
        self._temporary.unlink(missing_ok=True)
        self._file = self._temporary.open("xb")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of what is still in the buffer, if the disk is full
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, part: bytes) -> None:
        """Raises OSError."""
        self._file.write(part)

    def commit(self) -> None:
        """Give it its name, in the place of an older file. Raises OSError."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)


def merge_results(
    input_path: Path, results: Sequence[BinaryIO], output: OutputFile, outcome: Outcome, is_complete: bool
) -> str:
    """Write the result of each line of the input; returns the output's SHA-256 in hexadecimal digits.

    outcome: each result is added to it. is_complete: each line must have a result. Raises CommandError if one has none
    or two, and OSError."""
    places = _find_places(results)
    digest = hashlib.sha256()
    for custom_id in custom_ids(input_path):
        place = places.pop(custom_id, None)
        if place is None and not is_complete:
            continue
        if place is None:
            raise CommandError(f"the server has no result of the line with the custom_id {custom_id!r}")
        index, start, size = place
        results[index].seek(start)
        line = escape_line_ends(results[index].read(size)) + b"\n"
        digest.update(line)
        output.write(line)
        outcome.add(line)
    if places:
        raise CommandError(f"the server has a result of {next(iter(places))!r}, which is no custom_id of the input")
    return digest.hexdigest()


def _find_places(results: Sequence[BinaryIO]) -> dict[str, _Place]:
    """The place of each line, by custom_id. Raises CommandError."""
    places: dict[str, _Place] = {}
    for index, file in enumerate(results):
        file.seek(0)
        start = 0
        for line in file:
            if line.strip():
                custom_id = _custom_id(line)
                if custom_id in places:
                    raise CommandError(f"the server has two results of the line with the custom_id {custom_id!r}")
                places[custom_id] = index, start, len(line.rstrip(b"\r\n"))
            start += len(line)
    return places


def _custom_id(line: bytes) -> str:
    try:
        custom_id = orjson.loads(line)["custom_id"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        custom_id = None
    if not isinstance(custom_id, str):
        raise CommandError("a line of the server's results has no custom_id")
    return custom_id
