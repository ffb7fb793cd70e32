"""AutoGen's client for OpenAI's API, and agents of autogen-agentchat, which cannot require a call."""

import asyncio
import json
from typing import Any

import pytest

from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
GREEDY = {"max_tokens": 40, "temperature": 0}
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


@pytest.fixture
def client(base_url: str) -> Any:
    module = pytest.importorskip("autogen_ext.models.openai", reason="autogen-ext[openai] is not installed")
    return module.OpenAIChatCompletionClient(
        model="default", base_url=base_url, api_key="none", model_info=INFO, max_retries=0, **GREEDY
    )


def test_an_answer_and_its_stream_equal_the_chat(client: Any, plain_post: PlainPost) -> None:
    from autogen_core.models import UserMessage

    fields = {"messages": [{"role": "user", "content": WHALES}], **GREEDY}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]
    question = [UserMessage(content=WHALES, source="user")]

    async def run() -> tuple[str, list[Any]]:
        whole = await client.create(question)
        return whole.content, [part async for part in client.create_stream(question)]

    whole, parts = asyncio.run(run())
    assert whole == expected
    assert parts[-1].content == expected
    assert len(parts) > 4


def test_a_tool_is_called_whole_and_streamed(client: Any) -> None:
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool

    async def look_up(legs: int) -> str:
        return f"an animal with {legs} legs"

    tool = FunctionTool(look_up, "Looks animals up by the number of their legs.", strict=True)
    question = [UserMessage(content="What has 8 legs?", source="user")]

    async def run() -> tuple[Any, Any]:
        fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required"}
        whole = await client.create(question, **fields)
        parts = [part async for part in client.create_stream(question, **fields)]
        return whole.content[0], parts[-1].content[0]

    whole, streamed = asyncio.run(run())
    assert whole.name == streamed.name == "look_up"
    assert whole.arguments == streamed.arguments
    assert isinstance(json.loads(whole.arguments)["legs"], int)


def test_agents_talk_to_each_other(client: Any, plain_post: PlainPost) -> None:
    """The second reads what the first has written as a message of a user with a name."""
    pytest.importorskip("autogen_agentchat", reason="autogen-agentchat is not installed")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat

    prompt = "You are a biologist."
    fields = {
        "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": WHALES}],
        **GREEDY,
    }
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]

    async def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word} eat krill."

    async def run() -> list[Any]:
        agents = [
            AssistantAgent("first", model_client=client, system_message=prompt),
            AssistantAgent("second", model_client=client, system_message=prompt, model_client_stream=True),
            AssistantAgent("third", model_client=client, system_message=prompt, tools=[look_up]),
        ]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(4))
        return list((await team.run(task=WHALES)).messages)

    messages = asyncio.run(run())
    assert [message.source for message in messages][:3] == ["user", "first", "second"]
    assert messages[1].content == expected
    assert all(message.content for message in messages)
