"""Agno's agents: OpenAILike and OpenAIChat over chats, OpenAIResponses over responses."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import WHALES

pytest.importorskip("agno", reason="agno is not installed: `make test-clients` has it")

NAMED: dict[str, dict[str, Any]] = {
    "OpenAILike": {"type": "function", "function": {"name": "look_up"}},
    "OpenAIChat": {"type": "function", "function": {"name": "look_up"}},
    "OpenAIResponses": {"type": "function", "name": "look_up"},
}


@pytest.fixture(params=list(NAMED))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def agent(kind: str, base_url: str) -> Callable[..., Any]:
    from agno.agent import Agent
    from agno.models import openai
    from agno.models.openai.like import OpenAILike

    model: Any = OpenAILike if kind == "OpenAILike" else getattr(openai, kind)
    limit = "max_output_tokens" if kind == "OpenAIResponses" else "max_tokens"

    def make(max_tokens: int, **options: Any) -> Any:
        fields = {"id": "default", "base_url": base_url, "api_key": "none", "temperature": 0, limit: max_tokens}
        return Agent(model=model(**fields, max_retries=0), telemetry=False, **options)

    return make


def test_an_answer_and_its_stream_equal_the_chat(agent: Callable[..., Any], whales: Callable[..., str]) -> None:
    assert agent(24).run(WHALES).content == whales(24)
    events = [event for event in agent(24).run(WHALES, stream=True) if event.event == "RunContent"]
    assert "".join(event.content or "" for event in events) == whales(24)
    assert len(events) > 4


def test_an_agent_calls_its_tool(kind: str, agent: Callable[..., Any]) -> None:
    from agno.tools import tool

    called: list[str] = []

    @tool(stop_after_tool_call=True)  # it would call again and again
    def look_up(word: str) -> str:
        """Looks a word up."""
        called.append(word)
        return f"{word}: krill"

    agent(60, tools=[look_up], tool_choice=NAMED[kind]).run(WHALES)
    assert called
