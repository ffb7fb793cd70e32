"""Ways in which a crash or a bad disk damages a file."""

import os
from collections.abc import Callable
from pathlib import Path


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": _cut,
    "empty": _empty,
    "byte": _flip_a_byte,
    "missing": Path.unlink,
}
