"""The number of connections, and the memory that unfinished requests take together."""

import random
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.helpers.limits import join
from tests.server.helpers.fake_engine import FakeEngine, echo, never
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import completion, connect, parse_answers, read_all, read_answer
from tokasaurus.config import ServerConfig
from tokasaurus.server.connections import table as table_module
from tokasaurus.server.connections.table import MAX_HEAD_BYTES_IN_ALL, ConnectionTable
from tokasaurus.server.served_model import ServedModel

MAX_CONNECTIONS = 20
KEY = "s3cret"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def guarded(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(table_module, "connections_by_open_files", lambda: MAX_CONNECTIONS)
    with live_server(served_model, FakeEngine(), api_key=KEY) as server:
        yield server


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        while connection.recv(65536):
            pass
        return False
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize(
    ("sent", "num_answers"),
    [
        (b"", 0),
        (b"GET /", 0),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{", 1),
        (HEALTH + b"GET / HTTP/1.1\r\nX: a", 1),
        (HEALTH + b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{", 2),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{        GET / HTTP/1.1\r\nX: a", 1),
    ],
)
def test_connections_without_a_request_do_not_keep_clients_out(
    guarded: LiveServer, sent: bytes, num_answers: int
) -> None:
    with ExitStack() as stack:
        connections = []
        for number in range(5 * MAX_CONNECTIONS):
            connections.append(stack.enter_context(connect(guarded.url)))
            connections[-1].sendall(sent)
            received = b""
            while received.count(b"HTTP/1.1 ") < num_answers:  # until then it is at work: its place is not known
                part = connections[-1].recv(65536)
                assert part, received
                received += part
            if number % 10 == 9:
                # a new connection, which is accepted after all others, and the kept one of guarded.http, which is
                # closed only when all others work
                for client in (httpx, guarded.http):
                    headers = {"Authorization": f"Bearer {KEY}", "Connection": "keep-alive"}
                    answer = client.get(f"{guarded.url}/v1/models", headers=headers)  # type: ignore[attr-defined]
                    assert answer.status_code == 200
        still_open = [number for number, connection in enumerate(connections) if is_open(connection)]
    # the oldest were closed, for each other and for the two clients
    assert still_open == list(range(4 * MAX_CONNECTIONS + 2, 5 * MAX_CONNECTIONS))


def test_working_connections_are_never_closed_and_the_surplus_is_refused(guarded: LiveServer) -> None:
    guarded.engine.script = never
    guarded.http.close()
    request = completion().replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer %s" % KEY.encode())
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(guarded.url)) for _ in range(MAX_CONNECTIONS)]
        for connection in connections:
            connection.sendall(request)
        guarded.engine.wait_until(lambda engine: len(engine.requests) == MAX_CONNECTIONS)
        for _ in range(3):
            with connect(guarded.url) as surplus:
                (answer,) = parse_answers(read_all(surplus))
                assert (answer.status, answer.error_code) == (429, "too_many_connections")
                assert answer.headers["retry-after"] == "1"
        assert all(is_open(connection) for connection in connections)
        connections[0].close()
        guarded.engine.script = echo
        guarded.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
        answer = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200


def test_limit_of_all_unfinished_headers_closes_the_oldest(served_model: ServedModel) -> None:
    """No request may have so many, but thousands of connections may together."""
    size = 4 << 20
    with live_server(served_model, FakeEngine(), max_header_bytes=2 * size) as server, ExitStack() as stack:
        connections = []
        for _ in range(2 * MAX_HEAD_BYTES_IN_ALL // size):
            connections.append(stack.enter_context(connect(server.url)))
            connections[-1].sendall(b"GET /health HTTP/1.1\r\nA: " + b"a" * (size - 100))
            assert server.http.get("/health").status_code == 200
        connections[-1].sendall(b"\r\nConnection: close\r\n\r\n")
        assert read_all(connections[-1]).startswith(b"HTTP/1.1 200")
        assert not is_open(connections[0])


@pytest.mark.parametrize("begun_by", [b"", HEALTH], ids=["first", "pipelined"])
def test_too_many_unfinished_headers_close_only_connections_that_hold_large_ones(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, begun_by: bytes
) -> None:
    size, limit = 20_000, 200_000
    monkeypatch.setattr(table_module, "MAX_HEAD_BYTES_IN_ALL", limit)
    with live_server(served_model, FakeEngine()) as server, ExitStack() as stack:
        silent, begun, idle = (stack.enter_context(connect(server.url)) for _ in range(3))
        begun.sendall(HEALTH[:20])
        idle.sendall(HEALTH)
        assert read_answer(idle).status == 200
        large = []
        for _ in range(3 * limit // size):
            large.append(stack.enter_context(connect(server.url)))
            large[-1].sendall(begun_by + b"GET /health HTTP/1.1\r\nA: " + b"a" * size)
            if begun_by:
                assert read_answer(large[-1]).status == 200
            assert server.http.get("/health").status_code == 200
        assert sum(is_open(connection) for connection in large) * size < limit
        assert is_open(silent)
        begun.settimeout(20)
        begun.sendall(HEALTH[20:])
        idle.settimeout(20)
        idle.sendall(HEALTH)
        for connection in (begun, idle):
            assert read_answer(connection).status == 200


def test_unfinished_headers_of_working_connections_are_dropped(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their work goes on, and others are served."""
    limit, size = 200_000, 60_000
    monkeypatch.setattr(table_module, "MAX_HEAD_BYTES_IN_ALL", limit)
    with live_server(served_model, FakeEngine()) as server, ExitStack() as stack:
        server.engine.script = never
        working = [stack.enter_context(connect(server.url)) for _ in range(2 * limit // size)]
        for connection in working:
            connection.sendall(completion() + b"GET /health HTTP/1.1\r\nA: " + b"a" * size)
            newcomer = stack.enter_context(connect(server.url))
            newcomer.sendall(HEALTH[:20])
            assert server.http.get("/health").status_code == 200
            newcomer.sendall(HEALTH[20:])
            assert read_answer(newcomer).status == 200
        server.engine.wait_until(lambda engine: len(engine.requests) == len(working))
        assert all(is_open(connection) for connection in working)
        assert not server.engine.cancelled


def test_most_connections_follow_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (40_000, 41_000):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limit=limit: (limit, limit))
        found.append(ConnectionTable(ServerConfig()).max_connections)
    assert found[1] - found[0] == 1000
    assert 30_000 < found[0] < 40_000


class FakeConnection:
    def __init__(self, table: ConnectionTable) -> None:
        self.table = table
        self.is_evicted = False

    def check(self, tick_s: float) -> None:
        pass

    def evict(self) -> None:
        self.is_evicted = True

    def drop_head(self) -> None:
        raise AssertionError("no head is counted")


def test_victims_equal_those_of_a_list_in_order_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "connections_by_open_files", lambda: 8)
    table, random_ = ConnectionTable(ServerConfig()), random.Random(0)
    newcomers: list[FakeConnection] = []
    idle: list[FakeConnection] = []
    busy: list[FakeConnection] = []
    for _ in range(5000):
        action = random_.choice(["open", "open", "request", "answer", "close"])
        everyone = newcomers + idle + busy
        if action == "open":
            connection, victim = FakeConnection(table), None
            if len(everyone) >= 8:
                victim = (newcomers or idle or [None])[0]
            accepted = table.add(connection)
            assert accepted == (len(everyone) < 8 or victim is not None)
            for group in (newcomers, idle):
                if victim in group:
                    group.remove(victim)
            assert victim is None or victim.is_evicted
            newcomers.append(connection)
        elif action == "request" and newcomers + idle:
            connection = random_.choice(newcomers + idle)
            (newcomers if connection in newcomers else idle).remove(connection)
            busy.append(connection)
            table.set_busy(connection)
        elif action == "answer" and busy:
            connection = busy.pop(random_.randrange(len(busy)))
            idle.append(connection)
            table.set_idle(connection)
        elif action == "close" and everyone:
            connection = random_.choice(everyone)
            next(group for group in (newcomers, idle, busy) if connection in group).remove(connection)
            table.remove(connection)
        assert not any(connection.is_evicted for connection in newcomers + idle + busy)
        assert len(table) == len(newcomers + idle + busy)


def test_many_clients_at_once_are_served_within_the_limit(guarded: LiveServer) -> None:
    statuses: list[int] = []

    def ask() -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
            statuses.extend(client.get(f"{guarded.url}/v1/models").status_code for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(MAX_CONNECTIONS // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert statuses == [200] * 20 * len(threads)
