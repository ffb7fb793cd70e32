"""Agents of LangGraph: LangChain's create_agent, and deepagents."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import WHALES

pytest.importorskip("langgraph", reason="langgraph is not installed: `make test-clients` has it")


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, base_url: str) -> Callable[..., Any]:
    from langchain_openai import ChatOpenAI

    def make(**options: Any) -> Any:
        fields: dict[str, Any] = {"model": "default", "base_url": base_url, "api_key": "none", "temperature": 0}
        return ChatOpenAI(**fields, use_responses_api=request.param, max_retries=0, **options)

    return make


@pytest.fixture
def look_up() -> Any:
    from langchain_core.tools import tool

    @tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: krill"

    return look_up


def test_an_agent_without_tools_equals_the_chat(chat: Callable[..., Any], whales: Callable[..., str]) -> None:
    from langchain.agents import create_agent

    agent = create_agent(chat(max_tokens=24))
    question = {"messages": [("user", WHALES)]}
    assert agent.invoke(question)["messages"][-1].text == whales(24)
    chunks = [chunk for chunk, _ in agent.stream(question, stream_mode="messages")]
    assert "".join(chunk.text for chunk in chunks) == whales(24)
    assert len(chunks) > 4


@pytest.mark.parametrize("max_tokens", [200, 20])
def test_an_agent_goes_on_after_its_call(max_tokens: int, chat: Callable[..., Any], look_up: Any) -> None:
    """With 20 tokens the call is cut within its arguments, and sent back as it came."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def call_first(request: Any, handler: Callable[[Any], Any]) -> Any:
        """The model must call in the first step and answer in the second."""
        is_first = len(request.messages) == 1
        return handler(request.override(tool_choice="any" if is_first else "none"))

    agent = create_agent(chat(max_tokens=max_tokens), tools=[look_up], middleware=[call_first])
    messages = agent.invoke({"messages": [("user", WHALES)]})["messages"]
    first = messages[1]
    assert first.tool_calls or first.invalid_tool_calls
    assert bool(first.invalid_tool_calls) == (max_tokens == 20)
    second = agent.invoke({"messages": [*messages, ("user", "And seals?")]})["messages"]
    assert second[-1].text


def test_a_deep_agent_answers(base_url: str, look_up: Any) -> None:
    from deepagents import create_deep_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="default", base_url=base_url, api_key="none", temperature=0, max_completion_tokens=24)
    agent = create_deep_agent(model=model, tools=[look_up])
    assert agent.invoke({"messages": [("user", WHALES)]})["messages"][-1].text
