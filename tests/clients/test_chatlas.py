"""chatlas: ChatOpenAI over responses, ChatOpenAICompletions over chats."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES

chatlas = pytest.importorskip("chatlas", reason="chatlas is not installed: `make test-clients` has it")


@pytest.fixture(params=["ChatOpenAI", "ChatOpenAICompletions"])
def chat(request: pytest.FixtureRequest, base_url: str) -> Any:
    made = getattr(chatlas, request.param)(model="default", base_url=base_url, api_key="none")
    made.set_model_params(max_tokens=24, temperature=0)
    return made


def test_a_conversation_with_a_stream_and_a_tool(chat: Any, whales: Callable[..., str]) -> None:
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word}: krill"

    assert str(chat.chat(WHALES, echo="none")).strip() == whales(24).strip()
    assert len(list(chat.stream("And seals?"))) > 4
    chat.register_tool(look_up)
    assert str(chat.chat("And dogs?", echo="none"))


def test_an_answer_follows_its_schema(chat: Any) -> None:
    chat.set_model_params(max_tokens=80, temperature=0)
    assert isinstance(chat.chat_structured(QUESTION, data_model=Animal), Animal)
