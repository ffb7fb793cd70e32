"""Outlines' model for OpenAI's API: text, streams and structured output."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
GREEDY = {"max_tokens": 80, "temperature": 0}


@pytest.fixture
def model(base_url: str) -> Any:
    outlines = pytest.importorskip("outlines", reason="outlines is not installed: `make test-clients` has it")
    import openai

    return outlines.from_openai(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), "default")


def test_an_answer_and_its_stream_equal_the_chat(model: Any, plain_post: PlainPost) -> None:
    fields = {"messages": [{"role": "user", "content": WHALES}], **GREEDY}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]
    assert model(WHALES, **GREEDY) == expected
    deltas = list(model.stream(WHALES, **GREEDY))
    assert "".join(deltas) == expected
    assert len(deltas) > 4


def test_an_answer_follows_its_class(model: Any) -> None:
    answer = model(QUESTION, Animal, **GREEDY)
    Animal.model_validate_json(answer)
    assert "".join(model.stream(QUESTION, Animal, **GREEDY)) == answer
