"""The file of the flag record=: one line of JSON a second, for `toka top` and the live page to show again."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.messages.status import UserError

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""A file that would become larger is renamed, with .1 at its end, in place of an earlier one of that name."""
_START = b'{"format":'
_TAIL_BYTES = 1 << 20
"""Longest line that a server could not finish when it was killed."""


class Recording:
    """Appends lines to a file. An older recording is continued; any other file is left alone.

    A line is in the file whole or not at all, also on a full disk: then lines are dropped, with one warning.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        """Raises UserError."""
        self._path = expand_home("record", path)
        self._max_bytes = max_bytes
        self._is_failing = False
        try:
            self._file = _open(self._path)
            self._size = self._drop_unfinished_line()
        except OSError as error:
            raise UserError(f"record={path}: {error.strerror}") from None

    def _drop_unfinished_line(self) -> int:
        """The file's size, after the end of its last whole line."""
        size = os.fstat(self._file).st_size
        tail_start = max(0, size - _TAIL_BYTES)
        whole = os.pread(self._file, _TAIL_BYTES, tail_start).rfind(b"\n") + 1
        if size and not whole and tail_start == 0:
            size = 0
        elif whole:
            size = tail_start + whole
        os.ftruncate(self._file, size)
        return size

    def add(self, line: bytes) -> None:
        """line: JSON, without a line end. Blocks; never raises."""
        content = line + b"\n"
        try:
            if self._size and self._size + len(content) > self._max_bytes:
                self._begin_another()
            self._write(content)
        except OSError as error:
            if not self._is_failing:
                logger.warning("record=%s: %s; samples are lost until it can be written", self._path, error.strerror)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("record=%s: samples are written again", self._path)
            self._is_failing = False

    def _write(self, content: bytes) -> None:
        """Raises OSError, after which nothing of the content is in the file."""
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._file, content[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(content)

    def _begin_another(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        file = _open(self._path)
        os.close(self._file)
        self._file, self._size = file, 0

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def opened_recording(path: str | None) -> Iterator[Recording | None]:
    """None without a path. Raises UserError."""
    if path is None:
        yield None
        return
    with closing(Recording(path)) as recording:
        yield recording


def _open(path: Path) -> int:
    """Raises UserError and OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UserError(f"record={path}: is not a regular file")
        start = os.pread(file, len(_START), 0)
        if start and start != _START[: len(start)]:
            raise UserError(f"record={path}: exists and is no recording; name another file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"record={path}: another server records to it") from None
    except BaseException:
        os.close(file)
        raise
    return file
