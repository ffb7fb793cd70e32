"""Integers beyond 64 bits, which orjson alone would read as floats, are shown again as they were sent."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.tool_answers import say, tool_server
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.served_model import ServedModel

LONG = [2**64, -(10**40)]
MESSAGES, ROLLOUTS, TEXT = "/v1/messages", "/inference/v1/generate", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    **{route: minimal_body(route) for route in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)},
    ROLLOUTS: {"token_ids": [1]},
    TEXT: {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tool_server("hermes", served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


"""Written in prompts: tools, and the arguments of calls."""


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": 10**29 + 1, "maximum": -(10**29) - 2}}}
CALL = {"name": "f", "arguments": json.dumps({"n": 10**29 + 3, "more": [{"m": -(10**29) - 4}]})}
FUNCTION = {"name": "f", "description": str(10**29 + 5), "parameters": SCHEMA}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "1", "content": "b"},
]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HISTORY, "tools": [{"type": "function", "function": FUNCTION}]},
    RESPONSES: {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "1", **CALL},
            {"type": "function_call_output", "call_id": "1", "output": "b"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    MESSAGES: {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": json.loads(CALL["arguments"])}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
        ],
        "tools": [{"name": "f", "description": FUNCTION["description"], "input_schema": SCHEMA}],
    },
}
WANTED = [str(sign * (10**29 + number)) for number, sign in ((5, 1), (1, 1), (2, -1), (3, 1), (4, -1))]


def long_integers(server: LiveServer) -> list[str]:
    """Those in the newest prompt, whose tokens are bytes."""
    ids = [token_id for token_id in server.engine.requests[-1].prompt_ids.tolist() if token_id < 256]
    return re.findall(r"-?\d{20,}", bytes(ids).decode())


@pytest.mark.parametrize("is_bulk", [False, True])
@pytest.mark.parametrize("route", CONVERSATIONS)
def test_tools_and_arguments_of_calls_are_exact_in_prompts(server: LiveServer, route: str, is_bulk: bool) -> None:
    server.engine.script = say("a")
    if is_bulk:
        line = json.dumps({"custom_id": "1", "url": route, "body": CONVERSATIONS[route]})
        (result,) = [json.loads(each) for each in server.http.post("/v1/bulk", content=line).text.splitlines()]
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
    else:
        response = server.http.post(route, json=CONVERSATIONS[route])
        assert response.status_code == 200, response.text
    assert long_integers(server) == WANTED


def test_tools_are_exact_in_responses(server: LiveServer) -> None:
    server.engine.script = say("a")
    response = server.http.post(RESPONSES, json=CONVERSATIONS[RESPONSES])
    assert json.loads(response.text)["tools"][0]["parameters"] == SCHEMA


def test_arguments_of_the_models_calls_are_exact(server: LiveServer) -> None:
    call = {"name": "f", "arguments": {"n": 10**30, "m": [-(10**30)]}}
    server.engine.script = say(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    (block,) = json.loads(server.http.post(MESSAGES, json=CONVERSATIONS[MESSAGES]).text)["content"]
    assert block["input"] == call["arguments"]
    answer = json.loads(server.http.post(CHAT, json=CONVERSATIONS[CHAT]).text)
    (called,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == call["arguments"]


@pytest.mark.parametrize("keyword", ["default", "const", "enum", "maximum", "multipleOf", "minLength", "maxItems"])
def test_a_schema_with_a_long_integer_is_followed_or_refused_by_name(server: LiveServer, keyword: str) -> None:
    schema = {"type": "object", "properties": {"n": {keyword: [10**30] if keyword == "enum" else 10**30}}}
    for schema_given in (schema, json.dumps(schema)):
        response = server.http.post(CHAT, json=minimal_body(CHAT) | {"guided_json": schema_given})
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 200 or "guided_json" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def trainers_server(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(replace(served_model, rl=True), FakeEngine(), rl=True) as live:
        yield live


def changes(route: str) -> Iterator[dict[str, Any]]:
    """A long integer in each field that the endpoint knows, in the forms that fields have."""
    names = ENDPOINTS[route].body_model.model_fields if route in ENDPOINTS else [*BODIES[route], "sampling_params"]
    for name in sorted(names):
        for value in LONG:
            yield {name: value}
            yield {name: [value]}
            yield {name: {"type": "object", "1": value}}
            yield {name: {"1": value, "max_new_tokens": value, "max_tokens": value}}


@pytest.mark.parametrize("route", BODIES)
def test_a_long_integer_in_any_field_is_refused_or_served(trainers_server: LiveServer, route: str) -> None:
    for change in changes(route):
        response = trainers_server.http.post(route, json=BODIES[route] | change)
        assert response.status_code in (200, 400), (change, response.text)


def test_variables_of_a_template_of_the_request_are_exact(shared_server: LiveServer) -> None:
    body = {"chat_template": "{{ n }} {{ m[0] | tojson }}", "chat_template_kwargs": {"n": 10**30, "m": [-(10**30) - 1]}}
    response = shared_server.http.post(CHAT, json=minimal_body(CHAT) | body)
    assert response.status_code == 200, response.text
    assert long_integers(shared_server) == [str(10**30), str(-(10**30) - 1)]
