"""Hugging Face's InferenceClient with a base URL and no model."""

import json
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

MESSAGES = [{"role": "user", "content": "What do whales eat?"}]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture
def client(base_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface-hub is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # else it refuses every address
    return hub.InferenceClient(base_url=base_url, api_key="none")


def test_a_chat_and_its_stream_equal_plain_http(client: Any, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, **GREEDY})
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.usage.completion_tokens == expected["usage"]["completion_tokens"]
    chunks = list(client.chat_completion(MESSAGES, **GREEDY, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert len(chunks) > 4


@pytest.mark.long
def test_a_tool_is_called_whole_and_streamed(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "Animal", "parameters": Animal.model_json_schema()}}
    forced: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "Animal"}}}
    fields = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, "temperature": 0, **forced}
    (call,) = client.chat_completion(**fields).choices[0].message.tool_calls
    assert call.function.name == "Animal"
    arguments = call.function.arguments
    Animal.model_validate(arguments if isinstance(arguments, dict) else json.loads(arguments))
    chunks = list(client.chat_completion(**fields, stream=True))
    fragments = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert "".join(fragment.function.arguments or "" for fragment in fragments) == arguments


def test_an_answer_follows_its_schema(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "Animal", "schema": Animal.model_json_schema()}}
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat_completion(messages, response_format=schema, max_tokens=80, temperature=0)
    Animal.model_validate_json(answer.choices[0].message.content)
