"""DSPy: a plain language model, whole and streamed, and a signature."""

import asyncio
import os
from typing import Any, Literal

import pytest

from tests.clients.conftest import PlainPost

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise litellm downloads a list of prices
MESSAGES = [{"role": "user", "content": "What do whales eat?"}]


@pytest.fixture(scope="module")
def dspy() -> Any:
    return pytest.importorskip("dspy", reason="dspy is not installed: `make test-clients` has it")


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_an_answer_equals_the_chat(dspy: Any, base_url: str, plain_post: PlainPost, kind: str) -> None:
    fields = {"model_type": kind, "max_tokens": 12, "temperature": 0, "cache": False, "num_retries": 0}
    model = dspy.LM("openai/default", api_base=base_url, api_key="none", **fields)
    expected = plain_post("chat/completions", {"messages": MESSAGES, "max_tokens": 12, "temperature": 0})
    (answer,) = model(messages=MESSAGES)
    text = answer["text"] if isinstance(answer, dict) else answer
    assert text == expected["choices"][0]["message"]["content"]


class TestSignature:
    @pytest.fixture
    def predict(self, dspy: Any, base_url: str) -> Any:
        fields = {"max_tokens": 60, "temperature": 0, "cache": False, "num_retries": 0}
        model = dspy.LM("openai/default", api_base=base_url, api_key="none", **fields)
        signature = dspy.Signature(
            {"question": (str, dspy.InputField()), "animal": (Literal["dog", "whale"], dspy.OutputField())}
        )
        predict = dspy.Predict(signature)
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            yield predict

    def test_its_fields_are_answered_as_json(self, predict: Any) -> None:
        assert predict(question="Which one swims?").animal in ("dog", "whale")

    def test_it_can_be_streamed(self, dspy: Any, predict: Any) -> None:
        async def run() -> list[Any]:
            return [part async for part in dspy.streamify(predict)(question="Which one swims?")]

        parts = asyncio.run(run())
        assert len(parts) > 1
        assert parts[-1].animal in ("dog", "whale")
