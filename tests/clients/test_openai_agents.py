"""OpenAI's agents, whose default is /v1/responses: a tool, whole and streamed."""

import asyncio
from typing import Any, Literal

import pytest


@pytest.fixture(scope="module")
def agents() -> Any:
    module = pytest.importorskip("agents", reason="openai-agents is not installed: `make test-clients` has it")
    module.set_tracing_disabled(True)
    return module


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def agent(agents: Any, base_url: str, called: list[str]) -> Any:
    from openai import AsyncOpenAI

    @agents.function_tool
    def look_up(word: Literal["whale", "seal"]) -> str:
        """Looks a word up."""
        called.append(word)
        return "Whales eat krill."

    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return agents.Agent(
        name="Biologist",
        instructions="Be short.",
        model=agents.OpenAIResponsesModel(model="default", openai_client=client),
        model_settings=agents.ModelSettings(
            temperature=0, max_tokens=500, tool_choice="required", parallel_tool_calls=False
        ),
        tools=[look_up],
    )


def test_an_agent_calls_its_tool_and_answers(agents: Any, agent: Any, called: list[str]) -> None:
    result = agents.Runner.run_sync(agent, "What do whales eat?")
    assert called
    assert result.final_output
    assert [type(item).__name__ for item in result.new_items][:2] == ["ToolCallItem", "ToolCallOutputItem"]
    second = agents.Runner.run_sync(agent, [*result.to_input_list(), {"role": "user", "content": "And seals?"}])
    assert second.final_output


def test_a_streamed_agent_calls_its_tool_and_answers(agents: Any, agent: Any, called: list[str]) -> None:
    async def run() -> tuple[str, str]:
        streamed = agents.Runner.run_streamed(agent, "What do whales eat?")
        raw = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
        deltas = [data.delta for data in raw if data.type == "response.output_text.delta"]
        return "".join(deltas), streamed.final_output

    text, final = asyncio.run(run())
    assert called
    assert text
    assert text.endswith(final)
