"""Child process of the server that reads a batch's input file and says where its lines are, or what is wrong.

Run as `python -m tokasaurus.server.jobs.validation_process PATH ENDPOINT MAX_LINES MAX_LINE_BYTES`. Writes lines of
JSON to stdout: lists of [custom_id, start, size], then {"errors": [...], "num_errors": N}.
Imports nothing heavy.
"""

import codecs
import difflib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MAX_CUSTOM_ID_CHARS = 512
"""Longest name that a client may give to a line."""
MAX_SHOWN_ERRORS = 1000
"""A file may have an error in each line; the rest are only counted."""
LINES_PER_PART = 500
_MAX_UNKNOWN = 10
"""Unknown fields of a line that are named."""
_METHOD = "POST"
_FIELDS = ("custom_id", "method", "url", "body")


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


class _BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code, self.message, self.param = code, message, param


class InputReader:
    """Reads the lines of one file."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._line_of: dict[str, int] = {}
        """Number of the line with each custom_id."""
        self._num_lines = 0
        """Lines so far that are not blank."""
        self.errors: list[InputError] = []
        """The first MAX_SHOWN_ERRORS."""
        self.num_errors = 0

    def lines(self, content: BinaryIO) -> Iterator[tuple[str, int, int]]:
        """(custom_id, start, size) of each line that is not blank and has no error."""
        start = _skip_byte_order_mark(content)
        number = 0
        while line := content.readline(self._max_line_bytes + 2):
            number += 1
            is_blank = not line.strip()
            self._num_lines += not is_blank
            # so many blank lines are no accident, and reading them takes as long as other lines
            if max(self._num_lines, number - self._num_lines) > self._max_lines:
                message = f"the file may have at most {self._max_lines} lines (max_batch_lines)"
                self._add("too_many_lines", message, None, None)
                return
            size = len(line.rstrip(b"\r\n"))
            is_whole = line.endswith(b"\n") or len(line) < self._max_line_bytes + 2
            try:
                if not is_whole or size > self._max_line_bytes:
                    start += _skip_line(content, line)
                    raise _BadLine("line_too_long", f"the line may have at most {self._max_line_bytes} bytes")
                if not is_blank:
                    value = _load(line)
                    problems = list(self._problems(value, number))
                    if not problems:
                        yield value["custom_id"], start, size
                    for problem in problems:
                        self._add(problem.code, problem.message, number, problem.param)
            except _BadLine as error:
                self._add(error.code, error.message, number, error.param)
            start += len(line)
        if self._num_lines == 0 and not self.errors:
            self._add("empty_file", "the file has no lines", None, None)

    def _problems(self, value: dict[str, Any], number: int) -> Iterator[_BadLine]:
        """All that is wrong with this line."""
        meant = set()
        for unknown in sorted(value.keys() - set(_FIELDS))[:_MAX_UNKNOWN]:
            name = unknown[:MAX_CUSTOM_ID_CHARS]
            is_shown = len(self.errors) < MAX_SHOWN_ERRORS  # else the time is saved
            close = difflib.get_close_matches(name[:100], _FIELDS, n=1) if is_shown else []
            meant.update(close)
            advice = f": did you mean {close[0]!r}?" if close else ""
            yield _BadLine("unknown_parameter", f"unknown field {name!r}{advice}", name)
        for name in _FIELDS:
            if name in value:
                yield from self._problem_of(name, value[name], number)
            elif name not in meant:
                yield _BadLine("missing_required_parameter", f"{name} is required", name)

    def _problem_of(self, name: str, value: object, number: int) -> Iterator[_BadLine]:
        """None or one."""
        if name == "method" and value != _METHOD:
            yield _BadLine("invalid_method", f"method must be {_METHOD}", name)
        if name == "url" and value != self._endpoint:
            yield _BadLine("mismatched_endpoint", f"url must be the batch's endpoint, {self._endpoint}", name)
        if name == "body" and not isinstance(value, dict):
            yield _BadLine("invalid_body", "body must be a JSON object", name)
        if name != "custom_id":
            return
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID_CHARS:
            message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            yield _BadLine("invalid_custom_id", message, name)
        elif value in self._line_of:
            yield _BadLine("duplicate_custom_id", f"custom_id is also that of line {self._line_of[value]}", name)
        else:
            self._line_of[value] = number

    def _add(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.num_errors += 1
        if len(self.errors) < MAX_SHOWN_ERRORS:
            self.errors.append(InputError(code, message, line, param))


def _load(line: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _BadLine(
            "invalid_json_line", f"the line is not valid JSON: {error.msg} (character {error.pos})"
        ) from None
    if not isinstance(value, dict):
        raise _BadLine("invalid_json_line", "the line must be a JSON object")
    return value


def _skip_byte_order_mark(content: BinaryIO) -> int:
    """Editors of Windows write one at the start of a file. Returns the bytes it takes."""
    if content.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        return len(codecs.BOM_UTF8)
    content.seek(0)
    return 0


def _skip_line(content: BinaryIO, begun: bytes) -> int:
    """Read to the end of a line whose beginning `begun` has been read; returns how many bytes that took."""
    num_bytes = 0
    while not begun.endswith(b"\n") and (begun := content.readline(1 << 20)):
        num_bytes += len(begun)
    return num_bytes


def main(path: str, endpoint: str, max_lines: str, max_line_bytes: str) -> None:
    reader = InputReader(endpoint, int(max_lines), int(max_line_bytes))
    out = sys.stdout.buffer
    part: list[tuple[str, int, int]] = []
    with Path(path).open("rb", buffering=1 << 20) as content:
        for line in reader.lines(content):
            if reader.num_errors:  # the places are not needed any more
                continue
            part.append(line)
            if len(part) == LINES_PER_PART:
                out.write(orjson.dumps(part, option=orjson.OPT_APPEND_NEWLINE))
                out.flush()
                part.clear()
    if part:
        out.write(orjson.dumps(part, option=orjson.OPT_APPEND_NEWLINE))
    end = {"errors": reader.errors, "num_errors": reader.num_errors}
    out.write(orjson.dumps(end, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback when the server is killed
    main(*sys.argv[1:])
