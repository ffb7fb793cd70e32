"""Mirascope's models by a name alone: `openai/`, over responses, and its variant for completions."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES

pytest.importorskip("mirascope.llm", reason="mirascope is not installed: `make test-clients` has it")


@pytest.fixture(params=["openai/default", "openai/default:responses", "openai/default:completions"])
def model(request: pytest.FixtureRequest, base_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mirascope import llm

    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    llm.register_provider("openai", base_url=base_url, api_key="none")
    return llm.Model(request.param, max_tokens=60, temperature=0)


def test_an_answer_its_stream_and_a_conversation(model: Any, whales: Any) -> None:
    """Over completions it leaves the temperature out, since it does not know the model."""
    answer = model.call(WHALES)
    deltas = list(model.stream(WHALES).text_stream())
    assert len(deltas) > 4
    for text in (answer.text(), "".join(deltas)):
        assert text.removesuffix("\n") == whales(60) or "completions" in model.model_id
    assert answer.text()
    assert answer.resume("And seals?").text()


def test_an_answer_follows_its_schema(model: Any) -> None:
    assert isinstance(model.call(QUESTION, format=Animal).parse(), Animal)


def test_tools_reach_the_prompt(model: Any) -> None:
    from mirascope import llm

    @llm.tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: krill"

    plain, offered = model.call(WHALES), model.call(WHALES, tools=[look_up])
    assert offered.tool_calls or offered.text()
    assert offered.usage.input_tokens > plain.usage.input_tokens + 20, "the template shows the tool to the model"
