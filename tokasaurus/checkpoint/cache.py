"""The cache directory for downloaded and converted files, and the atomic creation of directories in it."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tokasaurus.checkpoint.errors import CheckpointError

CONVERSION_VERSION = 1
"""Part of the cache key of models converted from GGUF (gguf_conversion.py): increase it when the result changes."""


def cache_directory() -> Path:
    """$TOKA_CACHE, else $XDG_CACHE_HOME/tokasaurus, else ~/.cache/tokasaurus. It need not exist."""
    if own := os.environ.get("TOKA_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "tokasaurus"
    return Path.home() / ".cache" / "tokasaurus"


def build_once(destination: Path, build: Callable[[Path], None]) -> Path:
    """Return the directory `destination`, which `build` fills if it does not exist yet.

    `build` is given an empty directory next to it, which is renamed once it is complete. A second process waits for the
    first; the remains of a killed process are removed by the next one. Raises CheckpointError if the directory cannot
    be written.
    """
    if destination.is_dir():
        return destination
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with (destination.parent / f".{destination.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the holder dies
            if not destination.is_dir():
                _build_and_rename(destination, build)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {destination}: {error}; set $TOKA_CACHE to use another directory"
        ) from error
    return destination


def _build_and_rename(destination: Path, build: Callable[[Path], None]) -> None:
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        build(unfinished)
        unfinished.rename(destination)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
