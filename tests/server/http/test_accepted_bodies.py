"""Valid bodies are accepted. Random bodies are answered or refused by field, never with a 500."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.live_server import LiveServer
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest

NEUTRAL: dict[str, list[object]] = {
    "n": [1, 1.0, None],
    "temperature": [0, 1, 0.5, 2, None],
    "top_p": [1, 0.5, None],
    "stop": [None, [], "x", ["x", "y"]],
    "seed": [None, 0, 5.0, -1, 2**64 - 1, -(2**63)],
    "ignore_eos": [None, False, True],
    "cache_salt": [None, "x", " ", "tenant \U0001f99c", "s" * 1024, "é" * 512],
    "priority": [None, 0, 3.0, -7, 2**63 - 1, -(2**63)],
    "stream": [False, True, None],
    "stream_options": [None],
    "top_k": [None, -1, 0, 1, 20.0, 2**60],
    "min_p": [None, 0, 0.5, 1],
    "presence_penalty": [0, 0.0, None, -2, 2],
    "frequency_penalty": [0, 0.0, None, -2, 1.5],
    "repetition_penalty": [None, 1, 1e-300, 1e300],
    "logit_bias": [None, {}, {"0": -100, "5": 100, "17": 0.5}],
    "stop_token_ids": [None, [], [0, 5], [5.0]],
    "max_tokens": [2.0, None],
    "min_tokens": [None, 0, 2, 2.0],
    "logprobs_in_fingerprint": [None, False, True],
    "return_token_ids": [None, False, True],
    "return_tokens_as_token_ids": [None, False, True],
    "logprobs_mode": [None, "raw", "sampled"],
    "prompt_logprobs": [None, 0, 20, 1.0],
    "response_format": [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_object", "value": {"type": "object"}},
        {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "json_schema", "value": {"type": "object"}},
        {"type": "json", "value": '{"type": "object"}'},
        {"type": "regex", "value": "a+"},
    ],
    "structured_outputs": [None, {"choice": ["a"], "json": None, "json_object": False}],
    "guided_json": [None, {}, "{}"],
    "guided_regex": [None, "a"],
    "guided_choice": [None, ["a"]],
    "guided_grammar": [None, 'start: "a"'],
}
NEUTRAL_COMPLETIONS: dict[str, list[object]] = {
    "echo": [True, False, None],
    "logprobs": [None, 0, 1, 20, 2.0, True, False],
    "prompt": [[5.0, 6], [[5, 6.0]]],
}
NEUTRAL_CHAT: dict[str, list[object]] = {
    "messages": [
        [{"role": role, "content": "a", "name": name}]
        for role in ("system", "developer", "user", "assistant")
        for name in (None, "Ann", "a" * 64)
    ],
    "tools": [None, []],
    "tool_choice": ["none", None],
    "logprobs": [True, False, None],
    "top_logprobs": [None, 0],
    "max_completion_tokens": [2, 2.0, None],
    "parallel_tool_calls": [True, None],
    "add_generation_prompt": [True, False, None],
    "continue_final_message": [True, False, None],
    "chat_template_kwargs": [None, {}, {"enable_thinking": False}],
    "enable_thinking": [None, False, True],
    "reasoning_effort": [None, "none", "minimal", "low", "medium", "high", "xhigh"],
    "include_reasoning": [None, False, True],
    "separate_reasoning": [None, False, True],
    "apply_chat_template_overrides": [None, {}, {"add_generation_prompt": False}],
}


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (route, field, value)
        for route, fields in ((COMPLETIONS, NEUTRAL | NEUTRAL_COMPLETIONS), (CHAT, NEUTRAL | NEUTRAL_CHAT))
        for field, values in fields.items()
        for value in values
    ],
)
def test_supported_values_are_accepted(shared_server: LiveServer, route: str, field: str, value: object) -> None:
    response = shared_server.http.post(route, json=minimal_body(route) | {field: value})
    assert response.status_code == 200, response.text


def test_an_answers_message_can_be_sent_back_unchanged(shared_server: LiveServer) -> None:
    first = minimal_body(CHAT)
    answer = shared_server.http.post(CHAT, json=first).json()["choices"][0]["message"]
    messages = [*first["messages"], answer, {"role": "developer", "content": [{"type": "text", "text": "be kind"}]}]
    response = shared_server.http.post(CHAT, json=first | {"messages": messages})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("message", "call", "function"),
    [
        ({"parsed": {"kind": "whale"}}, {"index": 0}, {"parsed_arguments": {"kind": "whale"}}),  # OpenAI's client
        ({"provider_specific_fields": {"refusal": None}, "function_call": None}, {}, {}),  # litellm
    ],
)
def test_fields_that_clients_add_to_returned_messages_change_nothing(
    shared_server: LiveServer, message: dict[str, Any], call: dict[str, Any], function: dict[str, Any]
) -> None:
    def make_body(message: dict[str, Any], call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
        called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **function}, **call}
        answer = {"role": "assistant", "content": "hello", "tool_calls": [called], **message}
        first = minimal_body(CHAT)
        return first | {"messages": [*first["messages"], answer, {"role": "tool", "tool_call_id": "1", "content": "x"}]}

    plain = shared_server.http.post(CHAT, json=make_body({}, {}, {})).json()
    added = shared_server.http.post(CHAT, json=make_body(message, call, function)).json()
    assert added["choices"] == plain["choices"]
    assert added["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.sampled_from(["type", "text", "role", "content", "x"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3)


@given(route=st.sampled_from([COMPLETIONS, CHAT]), change=CHANGES)
@examples(300, suppress_health_check=[HealthCheck.too_slow])
def test_random_values_are_accepted_or_refused_naming_the_field(
    shared_server: LiveServer, route: str, change: dict[str, Any]
) -> None:
    response = shared_server.http.post(route, json=minimal_body(route) | change)
    if response.status_code != 200:
        error = assert_openai_error(response.content)
        assert response.status_code == (404 if error["param"] == "model" and isinstance(change["model"], str) else 400)
        assert re.split(r"[\[.]", error["param"])[0] in minimal_body(route) | change, error
