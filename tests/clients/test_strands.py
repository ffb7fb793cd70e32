"""Strands Agents: its models for chats and for responses."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES

strands = pytest.importorskip("strands", reason="strands-agents is not installed: `make test-clients` has it")


@pytest.fixture(params=["max_tokens", "max_output_tokens"], ids=["chat", "responses"])
def agent(request: pytest.FixtureRequest, base_url: str) -> Callable[..., Any]:
    """Makes an agent of a limit of tokens and of tools."""
    from strands.models.openai import OpenAIModel
    from strands.models.openai_responses import OpenAIResponsesModel

    kind: Any = OpenAIModel if request.param == "max_tokens" else OpenAIResponsesModel
    client = {"base_url": base_url, "api_key": "none", "max_retries": 0}

    def make(max_tokens: int, *tools: Any) -> Any:
        params = {request.param: max_tokens, "temperature": 0}
        model = kind(client_args=client, model_id="default", params=params)
        return strands.Agent(model=model, tools=[*tools], callback_handler=None)

    return make


def test_an_answer_equals_the_chat_and_a_cut_one_goes_on(agent: Callable[..., Any], whales: Callable[..., str]) -> None:
    """It streams always, and raises its own error where the text was cut, after which it can be asked again."""
    from strands.types.exceptions import MaxTokensReachedException

    asked = agent(24)
    for _ in range(2):
        with pytest.raises(MaxTokensReachedException):
            asked(WHALES)
    first = next(message for message in asked.messages if message["role"] == "assistant")
    assert "".join(part["text"] for part in first["content"]) == whales(24)


def test_an_agent_is_offered_a_tool(agent: Callable[..., Any]) -> None:
    @strands.tool
    def look_up(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.
        """
        return f"{word}: krill"

    assert str(agent(400, look_up)("Say hello."))


def test_an_answer_follows_its_schema(agent: Callable[..., Any]) -> None:
    """By a tool that it must call."""
    result = agent(400)(QUESTION, structured_output_model=Animal)
    assert isinstance(result.structured_output, Animal)
