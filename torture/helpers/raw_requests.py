"""Requests by raw sockets, of any size and never whole in memory."""

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterable, Iterator

PIECE = b"x" * (1 << 20)


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """receive_buffer: bytes that the kernel keeps for a client that does not read."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


def head(method: str, path: str, key: str | None, *lines: str) -> bytes:
    """A request's line and headers; the connection closes after the answer."""
    words = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *lines]
    if key is not None:
        words.append(f"Authorization: Bearer {key}")
    return ("\r\n".join(words) + "\r\n\r\n").encode()


def json_request(path: str, key: str | None, **fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return head("POST", path, key, "Content-Type: application/json", f"Content-Length: {len(body)}") + body


def filling(num_bytes: int) -> Iterator[bytes]:
    """That many letters, in pieces."""
    for _ in range(num_bytes // len(PIECE)):
        yield PIECE
    yield PIECE[: num_bytes % len(PIECE)]


def as_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces in the form of Transfer-Encoding: chunked."""
    for piece in pieces:
        if piece:
            yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def exchange(port: int, pieces: Iterable[bytes], timeout_s: float = 120) -> bytes:
    """Sends all pieces, whatever the server says meanwhile -> what it said until it closed the connection.

    Raises TimeoutError.
    """
    answer = bytearray()
    deadline_s = time.monotonic() + timeout_s
    with connect(port) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.setblocking(False)
        rest = iter(pieces)
        unsent: memoryview | None = memoryview(next(rest))
        is_open = True
        while is_open or unsent is not None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not closed after {timeout_s:.0f} s")
            readers = [connection] if is_open else []
            readable, writable, _ = select.select(readers, [connection] if unsent is not None else [], [], 1)
            if readable:
                received = connection.recv(1 << 16)
                answer += received
                is_open = bool(received)
            if writable and unsent is not None:
                unsent = unsent[connection.send(unsent) :]
                if not unsent:
                    following = next(rest, None)
                    unsent = None if following is None else memoryview(following)
    return bytes(answer)


def status_of(answer: bytes) -> int:
    """The status of the answer; those below 200 are skipped. 0 if there is none."""
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
