"""The results of a batch, which come in two files, as one file in the order of the input; and those so far."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from tokasaurus.batch_command.api import BatchApi, BatchView
from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.input_file import custom_ids
from tokasaurus.batch_command.outcome import Outcome
from tokasaurus.server.jobs.store.data_dir import sync_directory
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


class ResultsSoFar:
    """A file of the results that a running batch has, in the order of the input, up to the first line without one. It
    grows by whole lines, for whoever wants to read them; the run itself never reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_lines = 0
        self._has_ended = False

    def update(self, api: BatchApi, batch: BatchView, note: Callable[[str], None]) -> None:
        """Write what is new. Does nothing for a server that does not say its results, or if the disk is full."""
        while not self._has_ended and batch.num_done > self._num_lines:
            content = api.results_from(batch.id, self._num_lines)
            if not content:
                return
            try:
                # the first part replaces what an earlier run has left: the ledger has all of it
                with self.path.open("ab" if self._num_lines else "wb") as file:
                    file.write(content)
            except OSError as error:
                self._has_ended = True
                note(f"{self.path}: {error.strerror}; the results so far are not written")
                return
            if self._num_lines == 0:
                note(f"results so far, in the order of the input: {self.path}")
            self._num_lines += content.count(b"\n")

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


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
