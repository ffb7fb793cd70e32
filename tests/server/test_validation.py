"""Bodies that are wrong, and what the client is told: never a 500, always the field."""

import json
import time
from typing import Any

import httpx
import orjson
import pytest

from tests.fake_engine import LIMITS
from tests.server.conftest import LiveServer
from tests.server.small_tokenizer import VOCAB_SIZE
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MISSING = object()
CONTEXT = LIMITS.max_tokens_per_sequence


def minimal_body(route: str) -> dict[str, Any]:
    if route == COMPLETIONS:
        return {"model": "default", "prompt": "hello", "max_tokens": 2}
    return {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def assert_openai_error(content: bytes) -> dict[str, Any]:
    body = orjson.loads(content)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    return body["error"]


BOTH_ROUTES_REFUSE: list[tuple[str, object]] = [
    ("n", 0),
    ("n", -1),
    ("n", 1.0),
    ("n", True),
    ("n", "1"),
    ("n", 65_537),
    ("n", 2**70),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.5),
    ("max_tokens", False),
    ("max_tokens", CONTEXT),
    ("max_tokens", 2**62),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [None]),
    ("stop", 7),
    ("stop", ["a"] * 17),
    ("stop", {"a": "b"}),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", "1"),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", False),
    ("cache_salt", ["x"]),
    ("cache_salt", {"x": "y"}),
    ("cache_salt", "s" * 1025),
    ("cache_salt", "é" * 513),  # of two bytes each
    ("model", MISSING),
    ("model", None),
    ("model", 3),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", True),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("logit_bias", []),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": -100.5}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {str(2**80): 1}),
    ("logit_bias", {str(number): 0 for number in range(1025)}),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [2**80]),
    ("stop_token_ids", [1] * 17),
    ("min_tokens", -1),
    ("min_tokens", 3),  # max_tokens is 2
    ("min_tokens", 1.0),
    ("min_tokens", 2**80),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", 1.0),
    ("prompt_logprobs", True),
    ("prompt_logprobs", "1"),
    ("response_format", "json_object"),
    ("response_format", {}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "structural_tag"}),
    ("response_format", {"type": ["json_object"]}),
    ("response_format", {"type": "json_object", "schema": {}}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "description": 1}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "{mode}": 1}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x-guidance": {}}}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"json": {}, "regex": "a"}),
    ("structured_outputs", {"json": []}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json_object": 1}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"regex": "a\\"}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"choice": "yes"}),
    ("structured_outputs", {"grammar": " "}),
    ("structured_outputs", {"regex": "a", "structural_tag": "x"}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": " "}),
    ("structured_outputs", {"json": {}, "disable_additional_properties": True}),
    ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}),
    ("structured_outputs", {"regex": "a", "backend": "xgrammar"}),
    ("guided_json", 5),
    ("guided_json", {"a": json.loads("[" * 400 + "]" * 400)}),
    ("guided_regex", ["a"]),
    ("guided_choice", "a"),
    ("guided_grammar", {}),
    ("guided_decoding_backend", "outlines"),
    ("guided_whitespace_pattern", " "),
    ("structural_tag", "x"),
    ("store", True),
    ("service_tier", "flex"),
    ("user", 5),
    ("metadata", "x"),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), BOTH_ROUTES_REFUSE)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_wrong_value_is_a_400_naming_the_field(
    shared_server: LiveServer, route: str, field: str, value: object
) -> None:
    body = minimal_body(route) | {field: value}
    if value is MISSING:
        del body[field]
    check_refused(shared_server, route, body, field)


ONE_ROUTE_REFUSES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": MISSING}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.0]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[[1]]]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2**31]]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**63 + 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**80]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 40_000, "n": 2}, "n"),
    (COMPLETIONS, {"echo": 1}, "echo"),
    (COMPLETIONS, {"echo": "true"}, "echo"),
    (COMPLETIONS, {"echo": True, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"echo": True, "max_tokens": False}, "max_tokens"),
    (COMPLETIONS, {"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": ["a"] * 60_000, "guided_regex": "a" * 3000}, "guided_regex"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1.0}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens"),
    (COMPLETIONS, {"messages": []}, "messages"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    (CHAT, {"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"messages": MISSING}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "mood": "x"}]}, "messages[0].mood"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "Ann"}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"stream": True, "logprobs_in_fingerprint": True}, "logprobs_in_fingerprint"),
    (CHAT, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"echo": False}, "echo"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": MISSING, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"prompt": "hello"}, "prompt"),
    (CHAT, {"messages": [5] * 200_000}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a", **dict.fromkeys(map(str, range(50_000)))}]}, "messages[0].0"),
    (CHAT, {"metadata": dict.fromkeys(map(str, range(50_000)), 1)}, "metadata"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"add_generation_prompt": 1}, "add_generation_prompt"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (COMPLETIONS, {"add_generation_prompt": True}, "add_generation_prompt"),
]


@pytest.mark.parametrize(("route", "change", "param"), ONE_ROUTE_REFUSES)
def test_wrong_body_is_a_400_naming_the_field(
    shared_server: LiveServer, route: str, change: dict[str, Any], param: str
) -> None:
    body = {name: value for name, value in (minimal_body(route) | change).items() if value is not MISSING}
    check_refused(shared_server, route, body, param)


def check_refused(server: LiveServer, route: str, body: dict[str, Any], param: str) -> None:
    num_requests = len(server.engine.requests)
    response = refused_quickly(server, route, json.dumps(body))  # orjson writes no integer beyond 64 bits
    error = assert_openai_error(response.content)
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(server.engine.requests) == num_requests


def refused_quickly(server: LiveServer, route: str, content: str | bytes) -> httpx.Response:
    """Within 50 ms, or the best of a few, since the machine may be busy."""
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        response = server.http.post(route, content=content)
        seconds.append(time.perf_counter() - started)
        if seconds[-1] < 0.05:
            return response
    raise AssertionError(f"{min(seconds):.3f} s for {response.content[:300]!r}")


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
