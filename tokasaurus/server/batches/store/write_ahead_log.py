"""SQLite's write-ahead log after the last server was killed: whether all of it could be read.

SQLite reads the transactions at the log's start, up to the first that is not whole, and says nothing of what follows.
Source of the format: https://sqlite.org/fileformat2.html#walformat.
"""

import struct
from pathlib import Path

_HEADER = struct.Struct(">8I")
_FRAME_HEADER_BYTES = 24
_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN = 0x377F0682, 0x377F0683


def path_of_log(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def has_unread_frames(log: Path, num_frames: int) -> bool:
    """Whether the log has more than the `num_frames` frames that SQLite has accepted: a transaction that was not
    written to its end, or that is damaged. Older frames, which were copied to the database before, do not count.

    Raises OSError."""
    with log.open("rb") as content:
        header = content.read(_HEADER.size)
        if not _is_sound(header):
            return len(header) > 0
        _, _, page_size, _, salt_1, salt_2, _, _ = _HEADER.unpack(header)
        salt = struct.pack(">2I", salt_1, salt_2)
        frame_bytes = _FRAME_HEADER_BYTES + page_size
        content.seek(_HEADER.size + num_frames * frame_bytes)
        while frame := content.read(frame_bytes):
            if frame[8:16] == salt:
                return True
    return False


def _is_sound(header: bytes) -> bool:
    """Whether the log's header has its checksum."""
    if len(header) < _HEADER.size:
        return False
    magic, *_, sum_1, sum_2 = _HEADER.unpack(header)
    if magic not in (_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN):
        return False
    words = struct.unpack("<6I" if magic == _MAGIC_LITTLE_ENDIAN else ">6I", header[:24])
    first = second = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) % (1 << 32)
        second = (second + odd + first) % (1 << 32)
    return (first, second) == (sum_1, sum_2)
