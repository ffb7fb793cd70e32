"""Small bodies for the generation routes, and checks of error responses."""

import json
import time
from contextlib import suppress
from typing import Any

import httpx
import orjson

from tests.server.helpers.live_server import LiveServer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def minimal_body(route: str) -> dict[str, Any]:
    if route == COMPLETIONS:
        return {"model": "default", "prompt": "hello", "max_tokens": 2}
    if route == RESPONSES:
        return {"model": "default", "input": "hello", "max_output_tokens": 2}
    return {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def assert_openai_error(content: bytes) -> dict[str, Any]:
    body: dict[str, dict[str, Any]] = orjson.loads(content)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    return body["error"]


def check_refused(server: LiveServer, route: str, body: dict[str, Any], param: str) -> None:
    num_requests = len(server.engine.requests)
    response = refused_quickly(server, route, json.dumps(body))  # orjson cannot write integers above 64 bits
    error = assert_openai_error(response.content)
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(server.engine.requests) == num_requests


def refused_quickly(server: LiveServer, route: str, content: str | bytes) -> httpx.Response:
    """Asserts a response for 100 ms of CPU time, of the server and the client together, in one of 15 attempts: a busy
    machine's caches are slower. Content that Python alone takes long to read has four times as long."""
    seconds = []
    for _ in range(15):
        started = time.process_time()
        with suppress(ValueError, RecursionError):
            json.loads(content)
        read = time.process_time()
        response = server.http.post(route, content=content)
        seconds.append(time.process_time() - read)
        if seconds[-1] < max(0.1, 4 * (read - started)):
            return response
    raise AssertionError(f"{min(seconds):.3f} s of CPU time for {response.content[:300]!r}")
