"""any-llm: one function for the APIs of several providers."""

from typing import Any

import pytest

from tests.clients.conftest import WHALES, PlainPost

MESSAGES = [{"role": "user", "content": WHALES}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["whale", "seal"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def any_llm() -> Any:
    return pytest.importorskip("any_llm", reason="any-llm is not installed: `make test-clients` has it")


@pytest.fixture(params=["openai", "vllm", "anthropic"])
def fields(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    url = base_url.removesuffix("/v1") if request.param == "anthropic" else base_url
    return {"model": f"{request.param}:default", "api_base": url, "api_key": "none", "max_tokens": 12, "temperature": 0}


def test_an_answer_and_its_stream_equal_the_chat(any_llm: Any, fields: dict[str, Any], plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, "max_tokens": 12, "temperature": 0})
    answer = any_llm.completion(messages=MESSAGES, **fields)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    chunks = list(any_llm.completion(messages=MESSAGES, stream=True, **fields))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == answer.choices[0].message.content
    assert len([delta for delta in deltas if delta]) > 4


def test_a_tool_is_called_and_its_result_is_sent_back(any_llm: Any, fields: dict[str, Any]) -> None:
    fields |= {"max_tokens": 80, "tools": [TOOL]}
    message = any_llm.completion(messages=MESSAGES, tool_choice="required", **fields).choices[0].message
    assert {call.function.name for call in message.tool_calls} == {"look_up"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Krill."} for call in message.tool_calls]
    history = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    second = any_llm.completion(messages=history, **fields)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


def test_responses_equal_the_chat(any_llm: Any, base_url: str, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, "max_tokens": 16, "temperature": 0})
    fields = {"api_base": base_url, "api_key": "none", "max_output_tokens": 16, "temperature": 0}
    answer = any_llm.responses("openai:default", WHALES, **fields)
    assert answer.output_text == expected["choices"][0]["message"]["content"]
