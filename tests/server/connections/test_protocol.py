"""Slow, silent and half-closed connections, by raw sockets against the real server."""

import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

import httpx
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply, Script, echo, never
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tests.server.helpers.raw_http import (
    ask,
    completion,
    connect,
    parse_answers,
    read_all,
    read_answer,
    seconds_until_closed,
)
from tokasaurus.addresses import socket_of
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.served_model import ServedModel

HEADER_S, BODY_S, WRITE_S, KEEP_S = 1, 2, 3, 3
TIMEOUTS = {
    "header_timeout_seconds": HEADER_S,
    "body_timeout_seconds": BODY_S,
    "write_timeout_seconds": WRITE_S,
    "keep_alive_seconds": KEEP_S,
}
# Checked once a second, on a machine that may be busy.
LATE_S = 8
LINE = orjson.dumps({"custom_id": "1", "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)}) + b"\n"
CHUNKED = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@pytest.fixture(scope="module")
def timed(served_model: ServedModel, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    limits = EngineLimits(num_kv_blocks=64, page_size=16, max_tokens_per_sequence=100_000)
    with tempfile.TemporaryDirectory() as directory:
        flags = {"unix_socket": f"{directory}/socket"} if getattr(request, "param", "TCP") == "Unix" else {}
        with live_server(served_model, FakeEngine(limits=limits), **TIMEOUTS, **flags) as server:
            yield server


Check = Callable[[LiveServer], None]
_waiting: dict[str, Check] = {}


def waits(check: Check) -> Callable[[dict[str, Future[None]]], None]:
    """For tests that mostly wait for a time limit, and need only the engine that echoes: they run at the same time."""
    _waiting[check.__name__] = check

    def test(waited: dict[str, Future[None]]) -> None:
        waited[check.__name__].result()

    return test


@pytest.fixture(scope="module")
def waited(timed: LiveServer, request: pytest.FixtureRequest) -> dict[str, Future[None]]:
    names = {getattr(item, "originalname", "") for item in request.session.items}
    with ThreadPoolExecutor(len(_waiting)) as pool:
        running = {name: pool.submit(check, timed) for name, check in _waiting.items() if name in names}
        wait(running.values())
    return running


on_both = pytest.mark.parametrize("timed", ["TCP", "Unix"], indirect=True)
"""Where the kernel tells less of a Unix socket."""
on_both_in_long_runs = pytest.mark.parametrize(
    "timed", ["TCP", pytest.param("Unix", marks=pytest.mark.long)], indirect=True
)


def drip(connection: socket.socket, content: bytes, every_s: float) -> bytes:
    """Send a byte at a time until the server answers or closes; returns the answer."""
    connection.settimeout(every_s)
    for byte in content:
        connection.sendall(bytes([byte]))
        with suppress(TimeoutError):
            first = connection.recv(65536)
            connection.settimeout(20)
            return first + read_all(connection)
    raise AssertionError("the server accepted everything")


@waits
def test_silent_connection_is_closed_without_an_answer(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        started = time.monotonic()
        assert read_all(connection) == b""
        assert HEADER_S <= time.monotonic() - started < HEADER_S + LATE_S


@waits
def test_dripped_headers_are_408(timed: LiveServer) -> None:
    started = time.monotonic()
    with connect(timed.url) as connection:
        (answer,) = parse_answers(drip(connection, b"GET /health HTTP/1.1\r\nA: " + b"a" * 1000, 0.1))
    assert (answer.status, answer.error_code) == (408, "request_timeout")
    assert HEADER_S <= time.monotonic() - started < HEADER_S + LATE_S


@waits
def test_line_ends_before_a_request_do_not_extend_its_time(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        assert drip(connection, b"\r\n" * 500, 0.1) == b""


@waits
def test_idle_connection_is_closed_after_keep_alive(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(connection).status == 200
            time.sleep(HEADER_S + 1.2)  # longer than the time for headers, shorter than keep_alive_seconds
        started = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - started < LATE_S


@waits
def test_body_that_does_not_arrive_is_408(timed: LiveServer) -> None:
    started = time.monotonic()
    answer = ask(timed.url, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
    assert (answer.status, answer.error_code) == (408, "request_timeout")
    assert BODY_S <= time.monotonic() - started < BODY_S + LATE_S


@waits
def test_body_that_arrives_in_part_is_408(timed: LiveServer) -> None:
    started = time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    answer = ask(timed.url, head + b'{"model": "def')
    assert (answer.status, answer.error_code) == (408, "request_timeout")
    assert BODY_S <= time.monotonic() - started < BODY_S + LATE_S


@waits
def test_dripped_body_is_408_even_after_an_answer_without_it(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        (answer,) = parse_answers(drip(connection, b" " * 900, 0.1))
        assert answer.status == 408
    with connect(timed.url) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert read_answer(connection).status == 404
        assert drip(connection, b" " * 900, 0.1) == b""


@waits
def test_each_64_kib_add_a_second_to_the_time_of_a_body(timed: LiveServer) -> None:
    content = orjson.dumps(minimal_body(COMPLETIONS)) + b" " * (8 * 65_536)
    with connect(timed.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        connection.sendall(content[:-1])
        time.sleep(BODY_S + 2.5)
        connection.sendall(content[-1:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@waits
def test_bulk_body_may_take_any_time(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        connection.sendall(b"POST /v1/bulk" + CHUNKED + chunk(LINE))
        time.sleep(BODY_S + KEEP_S)
        connection.sendall(chunk(LINE.replace(b'"1"', b'"2"')) + b"0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        (answer,) = parse_answers(read_all(connection))
    assert [orjson.loads(line)["response"]["status_code"] for line in answer.body.splitlines()] == [200, 200]


def echo_after(seconds: float) -> Script:
    """The first request waits so long, and those behind it with it."""
    pauses = [seconds]

    def script(request: GenerateRequest, index: int) -> Reply | None:
        time.sleep(pauses.pop() if pauses else 0)
        return echo(request, index)

    return script


def test_generation_may_take_any_time(timed: LiveServer) -> None:
    timed.engine.script = echo_after(KEEP_S + 1)
    with connect(timed.url) as whole, connect(timed.url) as streamed:
        whole.sendall(completion(stream=False))
        streamed.sendall(completion(stream=True))
        answers = [connection.recv(65536) for connection in (whole, streamed)]
    timed.engine.script = echo
    assert [answer.startswith(b"HTTP/1.1 200") for answer in answers] == [True, True]


def many_tokens(_request: GenerateRequest, _index: int) -> Reply:
    """Unfinished, and with its logprobs larger than the buffers of sockets."""
    return Reply([ord("a")] * 60_000, [-0.5] * 60_000, None)


def slow_reader(server: LiveServer) -> socket.socket:
    path = socket_of(server.url)
    connection = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.connect(path or ("127.0.0.1", int(server.url.rpartition(":")[2])))
    return connection


@on_both_in_long_runs
def test_client_that_reads_nothing_loses_its_connection_and_its_work(timed: LiveServer) -> None:
    timed.engine.script, timed.engine.delta_size = many_tokens, 500
    timed.engine.cancelled.clear()
    with slow_reader(timed) as connection:
        connection.sendall(completion(n=4, stream=True, logprobs=0))
        timed.engine.wait_until(lambda engine: len(engine.cancelled) == 1, timeout_s=40)
    timed.engine.script, timed.engine.delta_size = echo, 1
    wait_until_clean(timed)


@on_both_in_long_runs
def test_client_that_reads_slowly_keeps_its_connection(timed: LiveServer) -> None:
    timed.engine.script = lambda request, index: replace(many_tokens(request, index), finish_reason="length")
    with slow_reader(timed) as connection:
        request = completion(n=8, logprobs=0).replace(b"Host: x", b"Host: x\r\nConnection: close")
        connection.sendall(request)
        received = bytearray()
        started = time.monotonic()
        while part := connection.recv(65536):
            received += part
            if time.monotonic() - started < WRITE_S + 4:
                time.sleep(0.3)
    timed.engine.script = echo
    (answer,) = parse_answers(bytes(received))
    assert len(answer.body) > 5_000_000  # more than the buffers, so the server had to wait for the client
    assert [len(choice["text"]) for choice in orjson.loads(answer.body)["choices"]] == [60_000] * 8


# Half-closed connections


@on_both
def test_client_that_is_done_sending_gets_its_whole_answer(timed: LiveServer) -> None:
    timed.engine.script = echo_after(1.5)
    timed.engine.pause_s = 0.3
    with connect(timed.url) as whole, connect(timed.url) as streamed:
        for connection in (whole, streamed):
            connection.sendall(completion(prompt="half", max_tokens=4, stream=connection is streamed))
            connection.shutdown(socket.SHUT_WR)
        (answer,), (stream,) = (parse_answers(read_all(connection)) for connection in (whole, streamed))
    timed.engine.script, timed.engine.pause_s = echo, 0.0
    assert (answer.status, stream.status) == (200, 200)
    assert orjson.loads(answer.body)["choices"][0]["text"] == "half"
    events = [orjson.loads(event[6:]) for event in stream.body.split(b"\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == "half"


@on_both
def test_http_1_0_client_that_is_done_sending_gets_a_quick_answer(timed: LiveServer) -> None:
    with connect(timed.url) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        content = read_all(connection)
    assert content.startswith(b"HTTP/1.1 200")
    assert content.endswith(b'{"status":"ok"}')


@on_both
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_closed_connection_cancels_its_work_at_once(timed: LiveServer, stream: bool, version: bytes) -> None:
    timed.engine.script = never
    timed.engine.cancelled.clear()
    timed.engine.requests.clear()
    with connect(timed.url) as connection:
        connection.sendall(completion(stream=stream).replace(b"HTTP/1.1", b"HTTP/" + version))
        timed.engine.wait_until(lambda engine: len(engine.requests) == 1)
    timed.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    timed.engine.script = echo
    wait_until_clean(timed)


@on_both
@pytest.mark.parametrize("route", ["stream", "bulk"])
def test_closing_after_the_answer_has_begun_cancels_the_rest_at_once(timed: LiveServer, route: str) -> None:
    """The client has read everything it was sent, so only what the server sends next shows that it is gone."""
    timed.engine.script = lambda request, _index: None if request.prompt_ids[0] == ord("z") else Reply([97], None, None)
    timed.engine.cancelled.clear()
    num_before = len(timed.engine.requests)
    with connect(timed.url) as connection:
        if route == "stream":
            connection.sendall(completion(stream=True))
            beginning = b"data: "
        else:
            connection.sendall(b"POST /v1/bulk" + CHUNKED + chunk(LINE.replace(b"hello", b"zzzzz")) + b"0\r\n\r\n")
            beginning = b"x-ndjson"
        received = b""
        while beginning not in received or not received.endswith(b"\r\n"):
            received += connection.recv(65536)
        timed.engine.wait_until(lambda engine: len(engine.requests) > num_before)
    timed.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    timed.engine.script = echo
    wait_until_clean(timed)


def test_input_that_ends_within_a_request_closes_the_connection(timed: LiveServer) -> None:
    for part in (b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"):
        with connect(timed.url) as connection:
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            assert seconds_until_closed(connection) < 5


def test_300_clients_that_give_up_are_all_cancelled(timed: LiveServer) -> None:
    timed.engine.script = never
    timed.engine.cancelled.clear()
    timed.engine.requests.clear()
    connections = [connect(timed.url) for _ in range(300)]
    for connection in connections:
        connection.sendall(completion())
    timed.engine.wait_until(lambda engine: len(engine.requests) == 300)
    for connection in connections:
        connection.close()
    timed.engine.wait_until(lambda engine: len(engine.cancelled) == 300)
    timed.engine.script = echo
    assert httpx.get(f"{timed.url}/health").status_code == 200
    wait_until_clean(timed)
