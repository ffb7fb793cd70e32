"""Google's Agent Development Kit by way of litellm."""

import asyncio
import os
from typing import Any

import pytest

from tests.clients.conftest import WHALES

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a list of prices
pytest.importorskip("google.adk", reason="google-adk is not installed: `make test-clients` has it")


@pytest.fixture(params=["openai/default", "hosted_vllm/default"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    from google.adk.models.lite_llm import LiteLlm

    return LiteLlm(model=request.param, api_base=base_url, api_key="none", max_tokens=24, temperature=0)


def ask_twice(agent: Any) -> list[list[Any]]:
    """The events of a question and, streamed, of a second one."""
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    async def run() -> list[list[Any]]:
        runner = InMemoryRunner(agent=agent, app_name="toka")
        session = await runner.session_service.create_session(app_name="toka", user_id="me")
        found = []
        for question, mode in ((WHALES, StreamingMode.NONE), ("And seals?", StreamingMode.SSE)):
            message = types.Content(role="user", parts=[types.Part(text=question)])
            options = {"new_message": message, "run_config": RunConfig(streaming_mode=mode)}
            events = runner.run_async(user_id="me", session_id=session.id, **options)
            found.append([event async for event in events])
        return found

    return asyncio.run(run())


def test_a_conversation_goes_on(model: Any) -> None:
    from google.adk.agents import Agent

    (whole,), streamed = ask_twice(Agent(name="biologist", model=model))
    assert whole.content.parts[0].text
    *deltas, last = streamed
    assert "".join(event.content.parts[0].text for event in deltas) == last.content.parts[0].text
    assert len(deltas) > 4


def test_a_tool_can_be_offered(model: Any) -> None:
    from google.adk.agents import Agent

    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: krill"

    for events in ask_twice(Agent(name="biologist", model=model, tools=[look_up])):
        assert events[-1].content.parts
