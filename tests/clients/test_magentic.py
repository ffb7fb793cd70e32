"""magentic: prompts as functions that return text, streams and objects."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES

magentic = pytest.importorskip("magentic", reason="magentic is not installed: `make test-clients` has it")


@pytest.fixture
def model(base_url: str) -> Any:
    return magentic.OpenaiChatModel("default", base_url=base_url, api_key="none", max_tokens=80, temperature=0)


def test_a_prompt_returns_text_and_streams_it(model: Any, whales: Callable[..., str]) -> None:
    @magentic.prompt(WHALES, model=model)
    def ask() -> str: ...

    @magentic.prompt(WHALES, model=model)
    def stream() -> magentic.StreamedStr: ...

    assert ask() == whales(80)
    deltas = list(stream())
    assert "".join(deltas) == whales(80)
    assert len(deltas) > 4


def test_a_prompt_returns_an_object(model: Any) -> None:
    """By a tool that it must call."""

    @magentic.prompt(QUESTION, model=model)
    def ask() -> Animal: ...

    assert isinstance(ask(), Animal)
