"""The data directory: its lock, what can go wrong with it, and the contents of files."""

import fcntl
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tokasaurus.files import NewFile, sync_directory

_TEMPORARY = ".part"
_PRIVATE = 0o600


class StoreError(Exception):
    """The data directory cannot be read or written. The message is one line for the user."""


class StorageFull(StoreError):
    """The file system has no space left. What was to be written is not stored; nothing else is lost."""


class DataDirInUse(StoreError):
    """Another server uses the data directory."""


class ContentMissing(StoreError):
    """A file that is listed has no content: somebody deleted it from the data directory."""


class NewContent:
    """Content of a file of the data directory. It has NewFile's methods."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = NewFile(path.with_name(path.name + _TEMPORARY), _PRIVATE)
        self.num_bytes = 0

    def write(self, part: bytes) -> None:
        self._file.write(part)
        self.num_bytes += len(part)

    def commit(self) -> None:
        self._file.commit(self._path)

    def discard(self) -> None:
        self._file.discard()


class DataDir:
    """Layout: `lock`, `database.sqlite` (with SQLite's -wal and -shm), and `files/ID` for the content of each file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "database.sqlite"
        self._contents = root / "files"
        self._lock: BinaryIO | None = None

    def open(self, owner: str) -> None:
        """Create it if needed, and lock it for this process. owner: tells others how to reach this process.

        Raises DataDirInUse if another process has it, StoreError if it cannot be created or locked."""
        try:
            _make_directory(self._contents)
            lock = os.fdopen(open_privately(self.root / "lock", os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except OSError as error:
            raise StoreError(f"cannot use {self.root}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DataDirInUse(f"{self.root} is in use by another server ({self.read_owner()})") from None
        except OSError as error:
            lock.close()
            raise StoreError(f"cannot lock {self.root}: {error.strerror}") from None
        with suppress(OSError):  # a full disk must not prevent the start: the owner is only read for messages
            lock.truncate(0)
            lock.write(owner.encode())
        self._lock = lock

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def read_owner(self) -> str:
        """What the process that locked it last said of itself."""
        with suppress(OSError):
            return (self.root / "lock").read_text(errors="replace")
        return ""

    def close(self) -> None:
        """Unlock it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def content_path(self, file_id: str) -> Path:
        return self._contents / file_id

    def open_content(self, file_id: str) -> BinaryIO:
        """Raises ContentMissing if it is not there, StoreError if it cannot be read now."""
        path = self.content_path(file_id)
        try:
            return path.open("rb")
        except FileNotFoundError as error:
            raise ContentMissing(f"the content of {file_id} cannot be read: {path}: {error.strerror}") from None
        except OSError as error:
            raise StoreError(f"the content of {file_id} cannot be read now: {path}: {error.strerror}") from None

    def new_content(self, file_id: str) -> "NewContent":
        """A content to write, and then to commit or discard. Raises OSError."""
        return NewContent(self.content_path(file_id))

    def remove_content(self, file_id: str) -> None:
        """Raises OSError; a file that is not there is removed already."""
        self.content_path(file_id).unlink(missing_ok=True)

    def remove_unlisted(self, listed: Collection[str]) -> int:
        """Remove contents that no record lists, as a crash leaves them; returns how many. Nobody may be writing.

        Raises OSError."""
        unlisted = [path for path in self._contents.iterdir() if path.name not in listed and not path.is_dir()]
        for path in unlisted:
            path.unlink(missing_ok=True)
        return len(unlisted)

    def has_database(self) -> bool:
        """Whether a server has stored something in it."""
        try:
            return self.database.exists()
        except OSError:  # not permitted to look
            return False

    def has_contents(self) -> bool:
        """Whether there are whole contents. Raises OSError."""
        return any(path.suffix != _TEMPORARY and not path.is_dir() for path in self._contents.iterdir())


def open_privately(path: Path, flags: int) -> int:
    """The file descriptor. Others may not read the file if this creates it. Raises OSError."""
    return os.open(path, flags, _PRIVATE)


def _make_directory(path: Path) -> None:
    """Create it, with its parents, so that it is on the disk; others may not read what clients send. Raises OSError."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)
