"""smolagents: its model for OpenAI's API, and an agent that calls tools."""

import json
from typing import Any

import pytest

from tests.clients.conftest import PlainPost

WHALES = [{"role": "user", "content": "What do whales eat?"}]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def smolagents() -> Any:
    return pytest.importorskip("smolagents", reason="smolagents is not installed: `make test-clients` has it")


@pytest.fixture
def tool(smolagents: Any) -> Any:
    @smolagents.tool
    def look_up(count: int) -> str:
        """Looks a number up.

        Args:
            count: The number.
        """
        return f"{count} whales eat krill."

    return look_up


def test_an_answer_and_its_stream_equal_the_chat(smolagents: Any, base_url: str, plain_post: PlainPost) -> None:
    model = smolagents.OpenAIModel("default", api_base=base_url, api_key="none", **GREEDY)
    expected = plain_post("chat/completions", {"messages": WHALES, **GREEDY})["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": [{"type": "text", "text": WHALES[0]["content"]}]}]
    assert model.generate(messages).content == expected
    deltas = [delta.content or "" for delta in model.generate_stream(messages)]
    assert "".join(deltas) == expected
    assert len(deltas) > 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tools_until_its_steps_are_used_up(
    smolagents: Any, base_url: str, tool: Any, stream: bool
) -> None:
    """It requires a call in each step, and sends an error back if the arguments have more than its tool knows."""
    model = smolagents.OpenAIModel("default", api_base=base_url, api_key="none", max_tokens=60, temperature=0)
    agent = smolagents.ToolCallingAgent(tools=[tool], model=model, max_steps=2, stream_outputs=stream)
    agent.run("Look the number 3 up.")
    messages = [getattr(step, "model_output_message", None) for step in agent.memory.steps]
    functions = [call.function for message in messages if message for call in message.tool_calls or []]
    assert functions
    assert {function.name for function in functions} <= {"look_up", "final_answer"}
    for function in functions:
        arguments = function.arguments if isinstance(function.arguments, dict) else json.loads(function.arguments)
        assert arguments.keys() & {"count", "answer"}


def test_a_tool_may_take_a_set(smolagents: Any, base_url: str) -> None:
    """With the schema that pydantic makes of one, as servers of MCP do; smolagents makes none of `set[str]` itself."""

    class LookUp(smolagents.Tool):  # type: ignore[misc]
        name = "look_up"
        description = "Looks names up."
        inputs = {  # noqa: RUF012
            "names": {
                "type": "array",
                "items": {"enum": ["blue", "grey", "white"]},
                "uniqueItems": True,
                "description": "The names.",
            }
        }
        output_type = "string"

        def forward(self, names: list[str]) -> str:
            return f"{len(names)} whales eat krill."

    model = smolagents.OpenAIModel("default", api_base=base_url, api_key="none", max_tokens=160, temperature=0)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look the blue and the grey whale up."}]}]
    calls = model.generate(messages, tools_to_call_from=[LookUp()], tool_choice="required").tool_calls
    assert calls
    for call in calls:
        names = json.loads(call.function.arguments)["names"]
        assert len(set(names)) == len(names)
        assert set(names) <= {"blue", "grey", "white"}
