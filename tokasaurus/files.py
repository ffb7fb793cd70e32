"""Files that others see whole or not at all, names that survive a power failure, and lines with their numbers."""

import codecs
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


class NewFile:
    """A file that gets its name only when it is whole and on the disk. All methods block, and raise OSError."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """path: its name until `commit`; an older file there is replaced. mode: its permissions, if the umask allows
        them."""
        self._path = path
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb")

    def write(self, part: bytes) -> None:
        self._file.write(part)

    def flush(self) -> None:
        """Others see all that was written."""
        self._file.flush()

    def commit(self, name: Path) -> None:
        """Give it its name, in the place of an older file. If this fails, call `discard`, and write all of it again."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        publish(self._path, name)

    def discard(self) -> None:
        """Nothing remains, unless it is committed."""
        with suppress(OSError):  # of what is still in the buffer, if the disk is full
            self._file.close()
        self._path.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a file that is on the disk its name. Raises OSError."""
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Names in the directory are on the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_text(path: Path, text: str) -> None:
    """Others see the old file or the new one, which need not be on the disk. Creates directories. Raises OSError with
    the file's name."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def numbered_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number, from 1; content) of each line that is not blank, without the byte-order mark that editors of Windows
    write at the start of a file."""
    for number, line in enumerate(lines, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield number, content
