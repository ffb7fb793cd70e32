"""Frames exchanged by the server and its grammar processes: a 4-byte big-endian length, then that many bytes."""

from typing import BinaryIO

HEADER_BYTES = 4
UNUSABLE_TOKENIZER = b"unusable tokenizer"


def make_frame(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER_BYTES, "big") + content


def content_length(header: bytes) -> int:
    return int.from_bytes(header, "big")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Blocks until a whole frame has arrived and returns its content; None at the end of the stream."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return stream.read(content_length(header))
