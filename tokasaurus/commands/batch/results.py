"""The output: a file of results in the order of the input, and what the user is told of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from tokasaurus.commands.batch.errors import CommandError, InputRefused, NothingToContinue
from tokasaurus.commands.batch.input_file import fingerprint, show_errors
from tokasaurus.commands.batch.progress import BatchView
from tokasaurus.files import NewFile
from tokasaurus.library.counts import Failures

# Codes of our server for failures that the input did not cause.
_NOT_THE_INPUTS = ("validation_failed", "input_file_missing")

ReadResults = Callable[[int], Sequence[bytes]]
"""A function of a line's number: the results from that line on, up to a line without one; none if it has none now."""


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


@contextmanager
def temporary_output(name: Path, batch_id: str) -> Iterator[OutputFile]:
    """A file that goes with the context unless it is committed. Raises OSError.

    batch_id: makes the temporary name one that only this run uses, so that it replaces what a killed run of the same
    batch has left."""
    unique = hashlib.sha256(batch_id.encode()).hexdigest()[:16]
    output = OutputFile(name.with_name(f"{name.name}.{unique}.part"))
    try:
        yield output
    finally:
        output.discard()


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

    def complete(self, read: ReadResults, num_lines: int) -> OutputFile:
        """The file with the results of all lines, to be committed. Raises OSError, and CommandError if a line has no
        result."""
        for _ in range(2):  # again from the first line, if it could not be written or somebody has changed it
            if self._has_failed:
                self.remove()
            while self._num_lines < num_lines and self._write_some(read):
                pass
            if self._file is None or self._num_lines < num_lines:
                raise CommandError(f"line {self._num_lines + 1} has no result")
            if self._file.is_intact():
                return self._file
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

    def _write_some(self, read: ReadResults, note: Callable[[str], None] = lambda _: None) -> bool:
        """Write the next results; false if there are none. Raises OSError."""
        lines = read(self._num_lines)
        if not lines:
            return False
        if self._file is None:  # the first part replaces what an earlier run has left: the ledger has all of it
            self._file = OutputFile(self._path)
            note(f"results so far, in the order of the input: {self._path}")
        for line in lines:
            self._file.write(line)
        self._file.flush()
        for reason in self._file.outcome.failures.new_reasons():
            note(f"a line failed: {reason}")
        return True


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
