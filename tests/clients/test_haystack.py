"""Haystack's generators for chat and for responses."""

from typing import Any

import pytest

from tests.clients.animal import Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
LIMITS = {"OpenAIChatGenerator": "max_tokens", "OpenAIResponsesChatGenerator": "max_output_tokens"}


@pytest.fixture(scope="module")
def haystack() -> Any:
    return pytest.importorskip("haystack", reason="haystack-ai is not installed: `make test-clients` has it")


@pytest.fixture
def chat_message(haystack: Any) -> Any:
    return haystack.dataclasses.ChatMessage


@pytest.fixture(params=list(LIMITS))
def generator(request: pytest.FixtureRequest, haystack: Any, base_url: str) -> Any:
    from haystack.components.generators import chat

    limits = {LIMITS[request.param]: 80, "temperature": 0}
    fields = {"api_base_url": base_url, "api_key": haystack.utils.Secret.from_token("none"), "max_retries": 0}
    return getattr(chat, request.param)(model="default", generation_kwargs=limits, **fields)


def test_an_answer_and_its_stream_equal_the_chat(generator: Any, chat_message: Any, plain_post: PlainPost) -> None:
    fields = {"messages": [{"role": "user", "content": WHALES}], "max_tokens": 80, "temperature": 0}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]
    question = [chat_message.from_user(WHALES)]
    assert generator.run(question)["replies"][0].text == expected
    deltas: list[str] = []
    reply = generator.run(question, streaming_callback=lambda chunk: deltas.append(chunk.content))["replies"][0]
    assert reply.text == "".join(deltas) == expected
    assert len(deltas) > 4


def test_a_tool_is_called_whole_and_streamed(generator: Any, chat_message: Any) -> None:
    from haystack.tools import Tool

    tool = Tool(name="store", description="Stores it.", parameters=Animal.model_json_schema(), function=str)
    question = [chat_message.from_user("Store the whale.")]
    fields = {"tools": [tool], "generation_kwargs": {"tool_choice": "required", "parallel_tool_calls": False}}
    reply = generator.run(question, **fields)["replies"][0]
    (call,) = reply.tool_calls
    assert call.tool_name == "store"
    Animal.model_validate(call.arguments)
    chunks: list[Any] = []
    streamed = generator.run(question, streaming_callback=chunks.append, **fields)["replies"][0]
    assert [each.arguments for each in streamed.tool_calls] == [call.arguments]
    assert len(chunks) > 4
    history = [*question, reply, chat_message.from_tool("Stored.", origin=call)]
    assert generator.run(history)["replies"][0].text
