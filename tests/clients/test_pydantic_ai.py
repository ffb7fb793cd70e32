"""Pydantic AI by a model's name alone: `openai:` is /v1/responses, `openai-chat:` is chat."""

import asyncio
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"


@pytest.fixture(scope="module")
def pydantic_ai() -> Any:
    return pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: `make test-clients` has it")


@pytest.fixture(params=["openai:default", "openai-chat:default"])
def model(request: pytest.FixtureRequest, base_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    name: str = request.param
    return name


def test_an_answer_and_its_stream_equal_the_chat(pydantic_ai: Any, model: str, plain_post: PlainPost) -> None:
    messages = [{"role": "user", "content": WHALES}]
    expected = plain_post("chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0})
    agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 24, "temperature": 0})
    result = agent.run_sync(WHALES)
    assert result.output == expected["choices"][0]["message"]["content"]
    usage = result.usage
    assert (usage.input_tokens, usage.output_tokens) == (expected["usage"]["prompt_tokens"], 24)

    async def stream() -> list[str]:
        async with agent.run_stream(WHALES) as streamed:
            return [delta async for delta in streamed.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(stream())
    assert "".join(deltas) == result.output
    assert len(deltas) > 1


def test_a_conversation_goes_on(pydantic_ai: Any, model: str, plain_post: PlainPost) -> None:
    agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 12, "temperature": 0})
    first = agent.run_sync(WHALES)
    second = agent.run_sync("And seals?", message_history=first.all_messages())
    messages = [
        {"role": "user", "content": WHALES},
        {"role": "assistant", "content": first.output},
        {"role": "user", "content": "And seals?"},
    ]
    expected = plain_post("chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0})
    assert second.output == expected["choices"][0]["message"]["content"]


def test_a_tool_is_called_with_arguments_of_its_schema(pydantic_ai: Any, model: str) -> None:
    """The tool ends the run, so that the model must call it."""
    settings = {"max_tokens": 80, "temperature": 0}
    agent = pydantic_ai.Agent(model, output_type=Animal, model_settings=settings, retries=0)
    result = agent.run_sync(QUESTION)
    assert isinstance(result.output, Animal)

    async def stream() -> Any:
        async with agent.run_stream(QUESTION) as streamed:
            return await streamed.get_output()

    assert asyncio.run(stream()) == result.output
    second = agent.run_sync("And the spider, as JSON?", message_history=result.all_messages())
    assert isinstance(second.output, Animal)
