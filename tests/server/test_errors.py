"""Errors have OpenAI's shape for unknown routes, unknown models and prompts that exceed the context length."""

from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body, refused_quickly
from tests.server.helpers.fake_engine import LIMITS
from tests.server.helpers.live_server import LiveServer

CONTEXT = LIMITS.max_tokens_per_sequence


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/", 405, None),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/health/more", 404, "unknown_url"),
        ("GET", COMPLETIONS, 405, None),
        ("DELETE", CHAT, 405, None),
        ("POST", "/health", 405, None),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/%F0%9F%98%80%00", 404, "model_not_found"),
    ],
)
def test_errors_of_every_route_have_openai_shape(
    shared_server: LiveServer, method: str, path: str, status: int, code: str | None
) -> None:
    response = shared_server.http.request(method, path)
    assert response.status_code == status
    assert assert_openai_error(response.content)["code"] == code


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-1", "DELETE, GET"),
        ("/v1/batches", "GET, POST"),
        ("/v1/responses/resp_1", "DELETE, GET"),
        (CHAT, "POST"),
        ("/health", "GET"),
    ],
)
@pytest.mark.parametrize(("method", "status"), [("PATCH", 405), ("OPTIONS", 204)])
def test_allow_names_the_methods_of_all_routes_of_a_path(
    shared_server: LiveServer, method: str, status: int, path: str, allowed: str
) -> None:
    answer = shared_server.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (status, allowed)


def test_a_path_of_another_server_has_no_methods(shared_server: LiveServer) -> None:
    answer = shared_server.http.post("/v1/responses/compact", json={"input": "a"})
    assert (answer.status_code, "allow" in answer.headers) == (404, False)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_unknown_model_returns_404(shared_server: LiveServer, route: str) -> None:
    response = shared_server.http.post(route, json=minimal_body(route) | {"model": "gpt-4o"})
    error = assert_openai_error(response.content)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("route", "change"),
    [
        (COMPLETIONS, {"prompt": "a" * 600}),
        (COMPLETIONS, {"prompt": "hello " * 500_000}),
        (COMPLETIONS, {"prompt": "\u65e5" * 500_000}),
        (COMPLETIONS, {"prompt": " " * 2_000_000}),
        (COMPLETIONS, {"prompt": [1] * 500_000}),
        (CHAT, {"messages": [{"role": "user", "content": "hello " * 500_000}]}),
        (COMPLETIONS, {"prompt": [1] * CONTEXT, "max_tokens": None}),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT - 1), "max_tokens": 2}),
        (COMPLETIONS, {"prompt": [[1], [1] * CONTEXT]}),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1), "max_tokens": 0, "echo": True}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}),
        (CHAT, {"max_tokens": 500}),
    ],
)
def test_request_beyond_the_context_length_is_refused_quickly(
    shared_server: LiveServer, route: str, change: dict[str, Any]
) -> None:
    response = refused_quickly(shared_server, route, orjson.dumps(minimal_body(route) | change))
    error = assert_openai_error(response.content)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
