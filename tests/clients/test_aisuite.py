"""aisuite's provider for OpenAI's API."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

MESSAGES = [{"role": "user", "content": "What do whales eat?"}]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture
def client(base_url: str) -> Any:
    module = pytest.importorskip("aisuite", reason="aisuite is not installed: `make test-clients` has it")
    return module.Client({"openai": {"base_url": base_url, "api_key": "none"}})


def test_a_chat_and_its_stream_equal_plain_http(client: Any, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, **GREEDY})["choices"][0]["message"]["content"]
    create = client.chat.completions.create
    assert create(model="openai:default", messages=MESSAGES, **GREEDY).choices[0].message.content == expected
    chunks = list(create(model="openai:default", messages=MESSAGES, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert len(chunks) > 4


def test_a_tool_is_called(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "Animal", "parameters": Animal.model_json_schema()}}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 80, "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="openai:default", messages=messages, **fields)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "Animal"
    Animal.model_validate_json(call.function.arguments)
