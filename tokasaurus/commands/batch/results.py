"""The output: a file of results in the order of the input, and what the user is told of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tokasaurus.commands.batch.errors import CommandError, InputRefused, NothingToContinue
from tokasaurus.commands.batch.input_file import custom_ids, fingerprint, show_errors
from tokasaurus.commands.batch.progress import BatchView
from tokasaurus.files import NewFile
from tokasaurus.library.counts import Failures
from tokasaurus.text.json_lines import escape_line_ends

# Codes of our server for failures that the input did not cause.
_NOT_THE_INPUTS = ("validation_failed", "input_file_missing")

ReadResults = Callable[[int], Sequence[bytes]]
"""A function of a line's number: the results from that line on, up to a line without one; none if it has none now."""

_Place = tuple[BinaryIO, int, int]
"""(file, start, size) of a result."""


class Outcome:
    """What became of the lines of a result file: how many were cut by length, and why others failed."""

    def __init__(self) -> None:
        self.num_cut = 0
        """Lines where at least one choice ended at max_tokens or at the end of the context."""
        self.failures = Failures()

    def add(self, line: bytes) -> None:
        """line: a result as OpenAI's batches have it."""
        value = _object(orjson.loads(line))
        response = _object(value.get("response"))
        body = _object(response.get("body"))
        error = _object(value.get("error")) or _object(body.get("error"))
        if not error and response.get("status_code", 200) == 200:
            choices = body.get("choices")
            reasons = [_object(choice).get("finish_reason") for choice in choices] if isinstance(choices, list) else []
            self.num_cut += "length" in reasons
            return
        message = " ".join(str(error.get("message") or f"status {response.get('status_code')}").split())
        self.failures.add(str(error.get("code") or error.get("type") or message), message)


class OutputFile(NewFile):
    """A file of results."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_lines = 0
        self.outcome = Outcome()
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Checksum of what was written, in hexadecimal digits."""
        return self._digest.hexdigest()

    def write(self, part: bytes) -> None:
        """part: a result with its line end."""
        super().write(part)
        self._digest.update(part)
        self.outcome.add(part)
        self.num_lines += 1

    def is_intact(self) -> bool:
        """Whether the file has what was written: nobody has changed or removed it."""
        try:
            return fingerprint(self._path).sha256 == self.sha256
        except CommandError:
            return False


class ResultsSoFar:
    """A file of the results that a running batch has, in the order of the input, up to the first line without one. It
    grows by whole lines, for whoever wants to read them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: OutputFile | None = None
        self._has_failed = False

    def update(self, read: ReadResults, num_done: int, note: Callable[[str], None]) -> None:
        """Write what is new; does nothing more once the disk was full. num_done: lines that have a result."""
        try:
            while not self._has_failed and self._num_lines < num_done and self._write_some(read, note):
                pass
        except OSError as error:
            self._has_failed = True
            note(f"{self._path}: {error.strerror}; the results so far are not written")

    def complete(self, results: Callable[[], Iterable[bytes]]) -> OutputFile:
        """The file with all results, to be committed. results: gives all, in order. Raises OSError and CommandError."""
        for _ in range(2):  # again from the first line, if it could not be written or somebody has changed it
            if self._has_failed:
                self.remove()
            for line in islice(results(), self._num_lines, None):
                self._open().write(line)
            file = self._open()
            file.flush()
            if file.is_intact():
                return file
            self._has_failed = True
        raise CommandError(f"{self._path}: another program writes into it")

    def remove(self) -> None:
        if self._file is not None:
            self._file.discard()
        self._file, self._has_failed = None, False
        with suppress(OSError):  # of a former run
            self._path.unlink(missing_ok=True)

    @property
    def _num_lines(self) -> int:
        return 0 if self._file is None else self._file.num_lines

    def _open(self) -> OutputFile:
        """It replaces what an earlier run has left: the server has all of it. Raises OSError."""
        if self._file is None:
            self._file = OutputFile(self._path)
        return self._file

    def _write_some(self, read: ReadResults, note: Callable[[str], None]) -> bool:
        """Write the next results; false if there are none. Raises OSError."""
        lines = read(self._num_lines)
        if not lines:
            return False
        is_first = self._file is None
        file = self._open()
        if is_first:
            note(f"results so far, in the order of the input: {self._path}")
        for line in lines:
            file.write(line)
        file.flush()
        for reason in file.outcome.failures.new_reasons():
            note(f"a line failed: {reason}")
        return True


def merged(input_path: Path, files: Sequence[BinaryIO], is_complete: bool) -> Iterator[bytes]:
    """The result of each line of the input, in its order. Files in the same order are read with little memory.

    files: together they have a result of each line. is_complete: each line must have one. Raises CommandError if one
    has none or two, and OSError."""
    readers = (_read_places(file) for file in files)
    heads = {reader: head for reader in readers if (head := next(reader, None)) is not None}
    """The next result of each file."""
    ahead: dict[str, _Place] = {}
    """Results of later lines of the input."""
    for custom_id in custom_ids(input_path):
        while custom_id not in ahead and heads:
            for reader in [reader for reader in heads if heads[reader][0] == custom_id] or [*heads]:
                found, place = heads.pop(reader)
                if found in ahead:
                    raise CommandError(f"the server has two results of the line with the custom_id {found!r}")
                ahead[found] = place
                if (head := next(reader, None)) is not None:
                    heads[reader] = head
        if custom_id in ahead:
            file, start, size = ahead.pop(custom_id)
            file.seek(start)
            yield escape_line_ends(file.read(size)) + b"\n"
        elif is_complete:
            raise CommandError(f"the server has no result of the line with the custom_id {custom_id!r}")
    if left := [*ahead, *(found for found, _ in heads.values())]:
        raise CommandError(f"the server has a result of {left[0]!r} that is of no line of the input, or a second one")


def _read_places(file: BinaryIO) -> Iterator[tuple[str, _Place]]:
    """(custom_id, place) of each result. Raises CommandError and OSError."""
    start = 0
    while True:
        file.seek(start)
        line = file.readline()
        if not line:
            return
        if line.strip():
            custom_id = find_custom_id(line)
            if custom_id is None:
                raise CommandError("a line of the server's results has no custom_id")
            yield custom_id, (file, start, len(line.rstrip(b"\r\n")))
        start += len(line)


def find_custom_id(line: bytes) -> str | None:
    """None if the line is no result."""
    try:
        custom_id = orjson.loads(line)["custom_id"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def why_failed(batch: BatchView) -> NothingToContinue:
    """The error of a failed batch without results: InputRefused if its input is bad."""
    if not batch.errors:
        return NothingToContinue(f"{batch.id} failed, and the server does not say why; run the same command again")
    if all(error.get("code") in _NOT_THE_INPUTS for error in batch.errors):
        reasons = "; ".join(str(error.get("message")) for error in batch.errors)
        return NothingToContinue(f"{batch.id} failed, not by its input: {reasons}; run the same command again")
    errors = [error for error in batch.errors if error.get("code") != "more_errors"]
    heading = f"{batch.id} failed, since its input is bad:"
    return InputRefused(show_errors(heading, errors, len(errors), is_least=len(errors) < len(batch.errors)))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
