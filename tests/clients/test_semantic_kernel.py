"""Semantic Kernel: its service for chats, functions that it calls, and an agent."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import WHALES

pytest.importorskip("semantic_kernel", reason="semantic-kernel is not installed: `make test-clients` has it")


@pytest.fixture
def service(base_url: str) -> Any:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id="default", async_client=client)


@pytest.fixture
def history() -> Any:
    from semantic_kernel.contents import ChatHistory

    history = ChatHistory()
    history.add_user_message(WHALES)
    return history


def settings(**more: Any) -> Any:
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings

    return OpenAIChatPromptExecutionSettings(temperature=0, **more)


def test_an_answer_and_its_stream_equal_the_chat(service: Any, history: Any, whales: Callable[..., str]) -> None:
    async def run() -> tuple[str, list[str]]:
        whole = await service.get_chat_message_content(history, settings(max_tokens=24))
        stream = service.get_streaming_chat_message_content(history, settings(max_tokens=24))
        return whole.content, [str(chunk) async for chunk in stream]

    whole, chunks = asyncio.run(run())
    assert whole == "".join(chunks) == whales(24)
    assert len(chunks) > 4


@pytest.mark.parametrize("max_tokens", [60, 23])
def test_it_calls_a_function_and_goes_on(max_tokens: int, service: Any, history: Any) -> None:
    """With 23 tokens the calls are cut within their arguments, and what it makes of them is sent back."""
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.functions import kernel_function

    called: list[str] = []

    class Animals:
        @kernel_function(description="Looks a word up.")
        def look_up(self, word: str) -> str:
            called.append(word)
            return f"{word}: krill"

    kernel = Kernel()
    kernel.add_plugin(Animals(), "animals")
    choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    options = settings(max_tokens=max_tokens, function_choice_behavior=choice)
    answer = asyncio.run(service.get_chat_message_content(history, options, kernel=kernel))
    assert bool(called) == (max_tokens == 60)
    assert answer.content


def test_an_agent_answers(service: Any) -> None:
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.functions import KernelArguments

    agent = ChatCompletionAgent(service=service, name="Biologist", arguments=KernelArguments(settings(max_tokens=24)))
    assert str(asyncio.run(agent.get_response(WHALES)))
