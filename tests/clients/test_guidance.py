"""guidance's models for OpenAI's API and for vLLM, which stream every request."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

guidance = pytest.importorskip("guidance", reason="guidance is not installed: `make test-clients` has it")

WHALES = "What do whales eat?"


@pytest.fixture
def openai(base_url: str) -> Any:
    return guidance.models.OpenAI("default", base_url=base_url, api_key="none", echo=False)


@pytest.fixture
def vllm(base_url: str) -> Any:
    from guidance.models.experimental import VLLMModel

    return VLLMModel("default", base_url=base_url, api_key="none", echo=False)


def ask(model: Any, question: str, answer: Any) -> str:
    with guidance.user():
        model = model + question
    with guidance.assistant():
        model = model + answer
    text: str = model["answer"]
    return text


def test_generated_text_equals_the_chat(openai: Any, vllm: Any, plain_post: PlainPost) -> None:
    """guidance does not send a temperature of 0 to OpenAI, and writes temperatures into vLLM's grammar."""
    fields = {"messages": [{"role": "user", "content": WHALES}], "max_tokens": 12, "temperature": 0}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]
    assert ask(openai, WHALES, guidance.gen("answer", max_tokens=12, temperature=1e-5)) == expected
    greedy = vllm.with_sampling_params({"top_k": 1})
    answer = ask(greedy, WHALES, guidance.gen("answer", max_tokens=12))
    assert answer == expected


def test_json_follows_its_schema(openai: Any, vllm: Any) -> None:
    for model in (openai, vllm):
        Animal.model_validate_json(ask(model, QUESTION, guidance.json("answer", schema=Animal, max_tokens=80)))


def test_text_follows_its_grammar(vllm: Any) -> None:
    """Which guidance sends by the older and by the newer field of vLLM."""
    assert ask(vllm, WHALES, guidance.select(["krill", "fish"], name="answer")) in ("krill", "fish")
    text = ask(vllm, WHALES, guidance.gen("answer", regex="[a-z]{5}"))
    assert len(text) == 5
    assert text.isascii()
    assert text.islower()
