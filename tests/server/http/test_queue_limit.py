"""Limits of the queue: what a server refuses at once, and from whom."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import urlsplit

import openai
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, never
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tokasaurus.server.engine_client.limits import QueueLimits
from tokasaurus.server.served_model import ServedModel


@pytest.fixture
def busy(served_model: ServedModel) -> Iterator[LiveServer]:
    """A server whose engine reports two running sequences and answers no further request. Three sequences may wait."""
    with live_server(served_model, FakeEngine(), queue_limits=QueueLimits(max_queued_requests=3)) as server:
        server.engine.stats = replace(server.engine.stats, num_running=2)
        assert server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 200
        server.engine.script = lambda _request, _index: None
        yield server


def leave_open(server: LiveServer, **fields: object) -> socket.socket:
    """Sends a request and waits until it reaches the engine. It stays open until the socket is closed."""
    num_requests = len(server.engine.requests)
    connection = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
    content = orjson.dumps(minimal_body(COMPLETIONS) | fields)
    connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode())
    connection.sendall(content)
    server.engine.wait_until(lambda engine: len(engine.requests) > num_requests)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_requests_beyond_the_limit_are_refused_until_one_is_cancelled(busy: LiveServer, stream: bool) -> None:
    with ExitStack() as stack:
        running = [stack.enter_context(leave_open(busy)), stack.enter_context(leave_open(busy, stream=stream))]
        waiting = [stack.enter_context(leave_open(busy, n=2)), stack.enter_context(leave_open(busy, stream=stream))]
        num_requests = len(busy.engine.requests)
        client = openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="default", prompt=["a", "b"], stream=stream)
        assert (refused.value.code, refused.value.response.headers["Retry-After"]) == ("queue_full", "1")
        assert "max_queued_requests" in refused.value.message
        for body in ({}, {"stream": stream}):
            response = busy.http.post(CHAT, json=minimal_body(CHAT) | body)
            assert (response.status_code, assert_openai_error(response.content)["param"]) == (429, None)
        assert len(busy.engine.requests) == num_requests
        assert busy.http.get("/v1/models").status_code == 200

        waiting[0].close()
        busy.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
        stack.enter_context(leave_open(busy, prompt=["a", "b"], n=2))  # accepted whole: only one sequence waits
        running[0].close()
        assert busy.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 429


def test_concurrent_requests_are_counted_when_they_are_submitted(served_model: ServedModel) -> None:
    """All 40 requests find the queue empty on arrival, so 35 are refused only after tokenization."""
    with live_server(served_model, FakeEngine(), queue_limits=QueueLimits(max_queued_requests=5)) as server:
        server.engine.script = lambda _request, _index: None
        content = orjson.dumps(minimal_body(COMPLETIONS))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
            for connection in connections:
                connection.sendall(head + content)
            answered = 0
            deadline = time.monotonic() + 60
            for connection in connections:
                connection.setblocking(False)
            while answered < 35 and time.monotonic() < deadline:
                time.sleep(0.02)
                answered = sum(_has_data(connection) for connection in connections)
            assert answered == 35
            server.engine.wait_until(lambda engine: len(engine.requests) == 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("flag", "too_large", "half"),
    [
        ("max_queued_sequences", {"prompt": ["a", "b"], "n": 5}, {"n": 6}),
        ("max_queued_tokens", {"prompt": ["aaa", "bbbbbb"], "n": 3}, {"prompt": "aaaaaa", "n": 9}),
    ],
)
def test_hard_limits_refuse_what_does_not_fit_now_or_ever(
    served_model: ServedModel, flag: str, too_large: dict[str, object], half: dict[str, object], stream: bool
) -> None:
    """The limit is 8. Each letter is a token; a prompt counts once, however many samples it has."""
    limits = QueueLimits(max_queued_sequences=8) if flag == "max_queued_sequences" else QueueLimits(max_queued_tokens=8)
    with live_server(served_model, FakeEngine(), queue_limits=limits) as server:
        server.engine.script = never
        body = minimal_body(COMPLETIONS) | {"stream": stream}
        for _ in range(2):
            refused = server.http.post(COMPLETIONS, json=body | too_large)
            error = assert_openai_error(refused.content)
            assert (refused.status_code, flag in error["message"]) == (400, True)
        with leave_open(server, **half):
            server.engine.requests.clear()
            refused = server.http.post(COMPLETIONS, json=body | half)
            error = assert_openai_error(refused.content)
            assert (refused.status_code, error["code"], flag in error["message"]) == (429, "queue_full", True)
            assert not server.engine.requests
        wait_until_clean(server)
        with leave_open(server, **half):
            pass


def test_client_below_its_share_is_accepted_although_another_filled_the_queue(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), queue_limits=QueueLimits(max_queued_sequences=8)) as server:
        server.engine.script = never
        with leave_open(server, n=8):
            assert server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS) | {"n": 5}).status_code == 429
            with leave_open(server, n=4), leave_open(server, n=2):  # a half, then a third of the limit
                assert server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS) | {"n": 3}).status_code == 429
        wait_until_clean(server)


def _has_data(connection: socket.socket) -> bool:
    try:
        return connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 429"
    except BlockingIOError:
        return False
