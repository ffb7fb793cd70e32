"""Requests of clients that disconnect are cancelled; other requests are not."""

import asyncio
import socket
import threading
from urllib.parse import urlsplit

import httpx
import openai
import orjson
import pytest

from tests.end_to_end.helpers.toka_process import wait_for
from tests.server.helpers.fake_engine import echo, never
from tests.server.helpers.live_server import LiveServer, wait_until_clean
from tokasaurus.server.errors import ClientGone
from tokasaurus.server.event_stream import run_while_connected


def test_closed_connection_cancels_every_request_of_its_body(server: LiveServer) -> None:
    server.engine.script = never
    body = orjson.dumps({"model": "default", "prompt": ["a", "b"], "n": 2})
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.engine.wait_until(lambda engine: len(engine.requests) == 2)
        assert server.engine.cancelled == []
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 2)
    assert set(server.engine.cancelled) == {request.request_id for request in server.engine.requests}
    wait_until_clean(server)


def test_client_timeout_cancels_its_request_and_the_server_keeps_serving(server: LiveServer) -> None:
    server.engine.script = never
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=3).completions.create(model="default", prompt="ok")
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    wait_until_clean(server)
    server.engine.script = echo
    assert client.completions.create(model="default", prompt="ok").choices[0].text == "ok"


def test_keep_alive_connection_does_not_count_as_a_disconnect(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        for _ in range(5):
            assert http.post("/v1/completions", json={"model": "default", "prompt": "a"}).status_code == 200
    wait_until_clean(server)
    assert server.engine.cancelled == []


def test_client_that_disconnects_while_sending_its_body_creates_no_request(server: LiveServer) -> None:
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    wait_for(lambda: 'route="/v1/completions",status="499"' in server.http.get("/metrics").text, 30)
    assert server.engine.requests == []


def test_work_finishes_its_cleanup_before_client_gone_is_raised() -> None:
    cleaned_up = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned_up.set()

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        asyncio.run(run_while_connected(receive, work()))
    assert cleaned_up.is_set()


@pytest.mark.parametrize("outcome", ["result", "error"])
def test_result_or_error_of_work_reaches_the_caller(outcome: str) -> None:
    async def work() -> str:
        if outcome == "error":
            raise KeyError(outcome)
        return outcome

    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    if outcome == "error":
        with pytest.raises(KeyError):
            asyncio.run(run_while_connected(receive, work()))
    else:
        assert asyncio.run(run_while_connected(receive, work())) == outcome
