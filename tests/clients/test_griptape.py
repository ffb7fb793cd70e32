"""Griptape's agents over chats."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import WHALES

pytest.importorskip("griptape", reason="griptape is not installed: `make test-clients` has it")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_answers_and_goes_on(stream: bool, base_url: str, whales: Callable[..., str]) -> None:
    from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
    from griptape.structures import Agent

    fields: dict[str, Any] = {"model": "default", "base_url": base_url, "api_key": "none"}
    driver = OpenAiChatPromptDriver(**fields, max_tokens=24, temperature=0, stream=stream)
    agent = Agent(prompt_driver=driver)
    assert agent.run(WHALES).output.value == whales(24)
    assert agent.run("And seals?").output.value
