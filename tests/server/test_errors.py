"""Bodies that are no objects or cannot fit, routes and models that are not there, and the OpenAPI page of errors."""

from typing import Any

import orjson
import pytest

from tests.server.conftest import LiveServer
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body, refused_quickly
from tests.server.helpers.fake_engine import LIMITS
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest

CONTEXT = LIMITS.max_tokens_per_sequence


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"model": "default", "prompt": "a", "temperature": NaN}',
        b'{"model": "default", "prompt": "a", "temperature": Infinity}',
        b'{"model": "default", "prompt": "a", "temperature": 1e999}',
        b'{"model": "default", "prompt": "a", "top_p": -1e999}',
        b'{"model": "default", "prompt": "\\ud800"}',
        b'{"model": "default", "prompt": "\xff"}',
        b'{"model": "default", "\\ud800": "a"}',
        b'{"model": "default", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "default", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "default", "prompt": "a", "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
        b'{"model": "default", "prompt": "a", "' + b"x" * 100_000 + b'": 1}',
        b'{"model": "default", "prompt": "a", "stop": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "default", "prompt": "a"' + b"".join(b',"x%d":1' % number for number in range(100_000)) + b"}",
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_is_no_json_object_of_known_fields_is_a_400(shared_server: LiveServer, route: str, content: bytes) -> None:
    response = refused_quickly(shared_server, route, content)
    error = assert_openai_error(response.content)
    assert response.status_code == 400
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, None),
        ("POST", "/", 404, None),
        ("GET", "/health/", 404, None),
        ("GET", COMPLETIONS, 405, None),
        ("DELETE", CHAT, 405, None),
        ("POST", "/health", 405, None),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/%F0%9F%98%80%00", 404, "model_not_found"),
    ],
)
def test_errors_of_every_route_are_openai_shaped(
    shared_server: LiveServer, method: str, path: str, status: int, code: str | None
) -> None:
    response = shared_server.http.request(method, path)
    assert response.status_code == status
    assert assert_openai_error(response.content)["code"] == code


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_wrong_model_is_a_404(shared_server: LiveServer, route: str) -> None:
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
def test_what_cannot_fit_is_context_length_exceeded(
    shared_server: LiveServer, route: str, change: dict[str, Any]
) -> None:
    response = refused_quickly(shared_server, route, orjson.dumps(minimal_body(route) | change))
    error = assert_openai_error(response.content)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error


def test_openapi_page_shows_bodies_and_errors(shared_server: LiveServer) -> None:
    page = shared_server.http.get("/openapi.json").json()
    for route, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)):
        operation = page["paths"][route]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = page["components"]["schemas"][reference.rpartition("/")[2]]
        assert set(schema["properties"]) == set(model.model_fields)
        assert {"type": "string", "minLength": 1, "maxLength": 1024} in schema["properties"]["cache_salt"]["anyOf"]
        assert "cache_salt" not in schema["required"]
        assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
        for name in ("n", "temperature", "stream", "cache_salt", "stop"):
            assert {"type": "null"} in schema["properties"][name]["anyOf"]
    assert "401" not in page["paths"]["/health"]["get"]["responses"]
