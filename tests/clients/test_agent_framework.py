"""Microsoft's Agent Framework: its default client for OpenAI, over /v1/responses, and the one for chats."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
OPTIONS = {"max_tokens": 60, "temperature": 0}
# Without it, the second request of a run names the first answer in place of sending it, and the server keeps none.
CLIENTS: dict[str, dict[str, Any]] = {"OpenAIChatClient": {"store": False}, "OpenAIChatCompletionClient": {}}


@pytest.fixture(scope="module")
def framework() -> Any:
    return pytest.importorskip("agent_framework", reason="agent-framework is not installed: `make test-clients` has it")


@pytest.fixture(params=list(CLIENTS))
def agent_of(request: pytest.FixtureRequest, framework: Any, base_url: str) -> Callable[..., Any]:
    """Makes an agent of the given tools."""
    from agent_framework import openai

    client = getattr(openai, request.param)(model="default", base_url=base_url, api_key="none")
    options = {**OPTIONS, **CLIENTS[request.param]}
    return lambda *tools: framework.Agent(client=client, tools=tools, default_options=options)


async def stream(agent: Any, **options: Any) -> tuple[int, Any]:
    """The number of updates, and the response that they make."""
    streamed = agent.run(WHALES, stream=True, **options)
    updates = [update async for update in streamed]
    return len(updates), await streamed.get_final_response()


def test_an_answer_and_its_stream_equal_the_chat(agent_of: Callable[..., Any], plain_post: PlainPost) -> None:
    fields = {"messages": [{"role": "user", "content": WHALES}], **OPTIONS}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]

    async def run() -> tuple[str, int, str]:
        whole = await agent_of().run(WHALES)
        num_updates, response = await stream(agent_of())
        return whole.text, num_updates, response.text

    whole, num_updates, streamed = asyncio.run(run())
    assert whole == streamed == expected
    assert num_updates > 4


def test_an_agent_calls_its_tool_whole_and_streamed(agent_of: Callable[..., Any]) -> None:
    called: list[str] = []

    def look_up(word: Literal["whale", "seal"]) -> str:
        """Looks a word up."""
        called.append(word)
        return "Whales eat krill."

    required = {"options": {"tool_choice": {"mode": "required", "required_function_name": "look_up"}}}

    async def run() -> list[Any]:
        whole = await agent_of(look_up).run(WHALES, **required)
        _, streamed = await stream(agent_of(look_up), **required)
        return [whole, streamed]

    for response in asyncio.run(run()):
        kinds = [content.type for message in response.messages for content in message.contents]
        assert kinds[:2] == ["function_call", "function_result"]
        assert response.text
    assert len(called) >= 2
    assert set(called) <= {"whale", "seal"}
