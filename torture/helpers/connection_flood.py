"""Client processes without a key that hold as many connections as they can."""

import errno
import multiprocessing
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

NUM_PROCESSES = 4
MAX_OPENED_PER_S = 250
"""By each process; a connection that the server closed is opened again."""
SPARE_FILES = 100

_SPAWN = multiprocessing.get_context("spawn")
_HOST = b"Host: localhost\r\n"
# What the connections send, in turn: nothing, a part of a head, a whole request, a head with a part of its body, and
# a request that is cheap to answer with a large part of the next one's head.
_CONTENTS = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\n" + _HOST + b"X-Part: ",
    b"GET /v1/models HTTP/1.1\r\n" + _HOST + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + _HOST + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
    b"GET /health HTTP/1.1\r\n" + _HOST + b"\r\nGET /health HTTP/1.1\r\n" + _HOST + b"X-Part: " + b"a" * 60_000,
)


@dataclass(frozen=True)
class Flood:
    num_open: list["Synchronized[int]"]
    """By process."""
    num_opened: list["Synchronized[int]"]

    @property
    def total_open(self) -> int:
        return sum(value.value for value in self.num_open)

    @property
    def total_opened(self) -> int:
        return sum(value.value for value in self.num_opened)


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as possible, for it and its later children -> the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def connection_flood(port: int, num_connections: int) -> Iterator[Flood]:
    """Within the context, processes open `num_connections`, fewer if the limit of open files allows no more."""
    each = min(num_connections // NUM_PROCESSES, raise_file_limit() - SPARE_FILES)
    flood = Flood(
        [_SPAWN.Value("i", 0) for _ in range(NUM_PROCESSES)], [_SPAWN.Value("i", 0) for _ in range(NUM_PROCESSES)]
    )
    stop = _SPAWN.Event()
    processes = [
        _SPAWN.Process(target=_hold, args=(port, f"127.0.0.{2 + index}", each, *values, stop))
        for index, values in enumerate(zip(flood.num_open, flood.num_opened, strict=True))
    ]
    for process in processes:
        process.start()
    try:
        yield flood
    finally:
        stop.set()
        for process in processes:
            process.join(timeout=20)
            process.kill()


def _hold(
    port: int, own_address: str, count: int, num_open: "Synchronized[int]", num_opened: "Synchronized[int]", stop: Event
) -> None:
    """own_address: each address has its own range of ports."""
    raise_file_limit()
    poll = select.epoll()
    connections: dict[int, socket.socket] = {}
    connecting: set[int] = set()
    budget, refilled_s = 0.0, time.monotonic()
    while not stop.is_set():
        now_s = time.monotonic()
        budget, refilled_s = min(MAX_OPENED_PER_S / 10, budget + MAX_OPENED_PER_S * (now_s - refilled_s)), now_s
        while budget >= 1 and len(connections) < count:
            budget -= 1
            connection = _begin(own_address, port)
            connections[connection.fileno()] = connection
            connecting.add(connection.fileno())
            poll.register(connection.fileno(), select.EPOLLOUT | select.EPOLLIN)
        for number, event in poll.poll(0.02):
            is_lost = bool(event & (select.EPOLLERR | select.EPOLLHUP))
            if number in connecting and not is_lost:
                connecting.discard(number)
                num_opened.value += 1
                is_lost = not _send(connections[number], _CONTENTS[num_opened.value % len(_CONTENTS)])
                poll.modify(number, select.EPOLLIN)
            if not is_lost and event & select.EPOLLIN:
                is_lost = not _receive(connections[number])
            if is_lost:
                connecting.discard(number)
                poll.unregister(number)
                connections.pop(number).close()
        num_open.value = len(connections) - len(connecting)


def _begin(own_address: str, port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
    connection.bind((own_address, 0))
    assert connection.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
    return connection


def _send(connection: socket.socket, content: bytes) -> bool:
    """Whether the connection is open."""
    try:
        connection.send(content)
        return True
    except OSError:
        return False


def _receive(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(65536))
    except OSError:
        return False
