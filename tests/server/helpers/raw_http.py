"""HTTP by raw sockets: what clients and attackers send that no library would."""

import contextlib
import re
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from tests.server.helpers.bodies_and_errors import COMPLETIONS, assert_openai_error, minimal_body
from tokasaurus.addresses import socket_of

FRESH_ID = re.compile("req_[0-9a-f]{32}")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error_code(self) -> str:
        """The error's code, after checks of the form that every error has."""
        error = assert_openai_error(self.body)
        assert self.headers["content-type"] == "application/json"
        assert FRESH_ID.fullmatch(self.headers["x-request-id"])
        assert error["type"] == ("invalid_request_error" if self.status != 429 else "rate_limit_error")
        return str(error["code"])


def connect(url: str, timeout_s: float = 20) -> socket.socket:
    path = socket_of(url)
    if path is not None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(path)
        return connection
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port or 80), timeout_s)


def completion(**fields: object) -> bytes:
    """A request for a completion, as bytes."""
    body = orjson.dumps(minimal_body(COMPLETIONS) | fields)
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (COMPLETIONS.encode(), len(body), body)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection, or resets it after an answer."""
    content = bytearray()
    while True:
        try:
            chunk = connection.recv(65536)
        except ConnectionResetError:
            return bytes(content)
        if not chunk:
            return bytes(content)
        content += chunk


def read_answer(connection: socket.socket) -> Answer:
    """One whole answer with a content-length, however many pieces it arrives in; the connection stays open."""
    content = bytearray()
    while (end := content.find(b"\r\n\r\n")) < 0:
        content += _receive(connection)
    length = re.search(rb"content-length: (\d+)", content[:end], re.IGNORECASE)
    assert length is not None, bytes(content)
    while len(content) < end + 4 + int(length[1]):
        content += _receive(connection)
    (answer,) = parse_answers(bytes(content))
    return answer


def _receive(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    assert part, "the server closed the connection within an answer"
    return part


def parse_answers(content: bytes) -> list[Answer]:
    """Answers with a content-length, or with chunks; those with a status below 200 are left out."""
    answers = []
    while content:
        head, _, content = content.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status = int(status_line.split()[1])
        if status < 200:
            continue
        body = b""
        if "content-length" in headers:
            length = int(headers["content-length"])
            body, content = content[:length], content[length:]
            assert len(body) == length
        elif status != 204:
            while True:
                size, _, content = content.partition(b"\r\n")
                chunk, content = content[: int(size, 16)], content[int(size, 16) :]
                assert content.startswith(b"\r\n")
                content = content[2:]
                body += chunk
                if not chunk:
                    break
        answers.append(Answer(status, headers, body))
    return answers


def ask(url: str, content: bytes) -> Answer:
    """The single answer to `content`, after which the server must close the connection."""
    with connect(url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the end
            connection.sendall(content)
        (answer,) = parse_answers(read_all(connection))
        return answer


def seconds_until_closed(connection: socket.socket) -> float:
    started = time.monotonic()
    read_all(connection)
    return time.monotonic() - started
