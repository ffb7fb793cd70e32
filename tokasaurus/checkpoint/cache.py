"""The cache directory for downloaded, converted, compiled and measured files, and directories in it that heal."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 4
"""Part of the cache key of models converted from GGUF (gguf/conversion.py): increase it when the result changes."""

CHECKSUMS = "checksums.json"
"""Name of the file that maps each other file's name to its size and checksum."""

WHOLE_BYTES = 128 << 20
"""Files up to this size are read whole, which takes a tenth of a second; larger ones only at `_NUM_SAMPLES` places."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 128 << 10
_READ_BYTES = 1 << 20


def cache_directory() -> Path:
    """$TOKA_CACHE, else $XDG_CACHE_HOME/tokasaurus, else ~/.cache/tokasaurus. It need not exist.

    Without a home directory, as in a container whose user has no entry in /etc/passwd: a directory for temporary files
    that is only this user's. Raises CheckpointUnavailable if that belongs to somebody else.
    """
    if own := os.environ.get("TOKA_CACHE"):
        return expand_home("TOKA_CACHE", own).absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expand_home("XDG_CACHE_HOME", shared).absolute() / "tokasaurus"
    try:
        return Path.home() / ".cache" / "tokasaurus"
    except RuntimeError:
        return _private_directory(Path(tempfile.gettempdir()) / f"tokasaurus-{os.getuid()}")


def cache_key(*parts: object) -> str:
    """A name for what depends on all these parts, by their text."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]


def expand_home(name: str, path: str) -> Path:
    """The path with ~ expanded. Raises CheckpointError, which says `name`, if there is no such home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{name}={path}: there is no such home directory") from None


def _private_directory(path: Path) -> Path:
    """Creates it if needed. Raises CheckpointUnavailable unless only this user can write it: programs are loaded
    from it."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            logger.warning(
                "there is no home directory: files are kept in %s (TOKA_CACHE names another directory)", path
            )
        found = path.lstat()
    except OSError as error:
        raise CheckpointUnavailable(
            f"there is no home directory, and {path}: {error.strerror}; set $TOKA_CACHE"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CheckpointUnavailable(f"there is no home directory, and {path} is not this user's alone; set $TOKA_CACHE")
    return path


def build_once(destination: Path, build: Callable[[Path], None]) -> Path:
    """Return the directory `destination`, which `build` fills unless it exists and its checksums are right.

    `build` is given an empty directory next to it. Once it is complete, it gets checksums, is flushed to the disk and
    renamed. A second process waits for the first; the remains of a killed process are removed by the next one. A
    damaged directory is logged and built again; files of it that another process has open stay readable. Raises
    CheckpointUnavailable if the directory cannot be written.
    """
    if is_intact(destination):
        return destination
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with (destination.parent / f".{destination.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the holder dies
            if not is_intact(destination):
                log_damage(destination)
                _build_and_rename(destination, build)
    except OSError as error:
        raise CheckpointUnavailable(
            f"cannot write {destination}: {error}; set $TOKA_CACHE to use another directory"
        ) from error
    return destination


def is_intact(directory: Path) -> bool:
    """Whether `build_once` made this directory, and its files are as they were then."""
    return find_damage(directory) is None


def log_damage(directory: Path) -> None:
    """Log one line if the directory exists but is not intact."""
    if directory.exists() and (damaged := find_damage(directory)) is not None:
        what = "damaged or missing" if damaged.name != CHECKSUMS else "damaged, missing or of an older version"
        logger.warning("%s is %s; making %s again", damaged, what, directory.name)


def _build_and_rename(destination: Path, build: Callable[[Path], None]) -> None:
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    damaged = destination.with_name(f".{destination.name}.damaged")
    _remove(unfinished)
    unfinished.mkdir()
    try:
        build(unfinished)
        write_checksums(unfinished)
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush_to_disk(path)
        _remove(damaged)
        if destination.exists():
            destination.rename(damaged)
        unfinished.rename(destination)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _flush_to_disk(destination.parent)
    _remove(damaged)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    """Without this, a power failure soon after a rename can leave a file with its name and size but no content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot flush a directory
            raise
    finally:
        os.close(descriptor)


def write_checksums(directory: Path) -> None:
    """Store the checksums of all files in `directory` and below."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = {path.relative_to(directory).as_posix(): checksum(path) for path in paths}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def find_damage(directory: Path) -> Path | None:
    """A file of `directory` that is missing or differs from its checksum; None if all are whole.

    A file above WHOLE_BYTES counts as whole if its size, its two ends and the samples between them are right: this
    finds a file that was cut off or not written to the end, but not one changed byte between the samples. Such a file
    has gigabytes of weights, which the start must not read twice.
    """
    path = directory / CHECKSUMS
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
        for name, expected in sums.items():
            path = directory / str(name)
            if checksum(path) != expected:
                return path
    except (OSError, ValueError, AttributeError):  # AttributeError: JSON, but not an object
        return path
    return None


def is_intact_file(path: Path) -> bool:
    """Whether the checksum of this one file, in the checksums beside it, is right."""
    try:
        sums = json.loads((path.parent / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums[path.name] == checksum(path))
    except (OSError, ValueError, LookupError, TypeError):  # no checksums, or not an object with this name
        return False


def checksum(path: Path) -> str:
    """Size and SHA-256, as text; of a file above WHOLE_BYTES, the SHA-256 of evenly spaced samples."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > WHOLE_BYTES:
            for index in range(_NUM_SAMPLES):
                file.seek(index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        else:
            file.seek(0)
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return f"{size} {digest.hexdigest()}"
