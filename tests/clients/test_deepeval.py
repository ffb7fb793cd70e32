"""DeepEval's model for a server of one's own."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import WHALES

os.environ["DEEPEVAL_TELEMETRY_OPT_OUT"] = "YES"
pytest.importorskip("deepeval", reason="deepeval is not installed: `make test-clients` has it")


@pytest.fixture
def model(base_url: str) -> Any:
    from deepeval.models import LocalModel

    limits = {"max_tokens": 80}
    return LocalModel(model="default", base_url=base_url, api_key="none", temperature=0, generation_kwargs=limits)


def test_an_answer_equals_the_chat(model: Any, whales: Callable[..., str]) -> None:
    text, _cost = model.generate(WHALES)
    assert text == whales(80)
