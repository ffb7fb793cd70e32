"""crewAI: its language model, and a crew of one agent with a tool."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES

pytest.importorskip("crewai", reason="crewai is not installed: `make test-clients` has it")

# Else it sends what it does to its makers. Not set where it is not installed: other tests send traces.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
import crewai


@pytest.fixture
def model(base_url: str) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return crewai.LLM(model="openai/default", base_url=base_url, api_key="none", temperature=0, **options)

    return make


@pytest.mark.parametrize("api", ["completions", "responses"])
def test_an_answer_and_its_stream_equal_the_chat(
    api: str, model: Callable[..., Any], whales: Callable[..., str]
) -> None:
    assert model(api=api, max_tokens=24).call(WHALES) == whales(24)
    assert model(api=api, max_tokens=24, stream=True).call(WHALES) == whales(24)


def test_an_answer_follows_its_schema(model: Callable[..., Any]) -> None:
    answer = model(max_tokens=80, response_format=Animal).call(QUESTION)
    assert isinstance(answer, Animal) or Animal.model_validate_json(answer)


def test_a_crew_offers_its_tool_and_answers(model: Callable[..., Any]) -> None:
    from crewai.tools import tool

    @tool("look_up")
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: krill"

    agent = crewai.Agent(role="Biologist", goal="Answer", backstory="", tools=[look_up], llm=model(max_tokens=40))
    task = crewai.Task(description=WHALES, expected_output="A sentence", agent=agent)
    assert crewai.Crew(agents=[agent], tasks=[task]).kickoff().raw
