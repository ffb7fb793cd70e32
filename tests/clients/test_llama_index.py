"""LlamaIndex's OpenAILike: chats, completions, streams and tools."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
GREEDY = {"max_tokens": 80, "temperature": 0}


@pytest.fixture
def module() -> Any:
    return pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")


@pytest.fixture
def chat(module: Any, base_url: str) -> Any:
    fields = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "context_window": 4096}
    return module.OpenAILike(model="default", api_base=base_url, api_key="none", **fields, **GREEDY)


def test_a_chat_and_its_stream_equal_plain_http(chat: Any, plain_post: PlainPost) -> None:
    from llama_index.core.llms import ChatMessage

    fields = {"messages": [{"role": "user", "content": WHALES}], **GREEDY}
    expected = plain_post("chat/completions", fields)["choices"][0]["message"]["content"]
    question = [ChatMessage(role="user", content=WHALES)]
    assert chat.chat(question).message.content == expected
    deltas = [answer.delta or "" for answer in chat.stream_chat(question)]
    assert "".join(deltas) == expected
    assert len(deltas) > 4


def test_a_completion_equals_plain_http(module: Any, base_url: str, plain_post: PlainPost) -> None:
    model = module.OpenAILike(model="default", api_base=base_url, api_key="none", max_retries=0, **GREEDY)
    expected = plain_post("completions", {"prompt": "The whale is", **GREEDY})["choices"][0]["text"]
    assert model.complete("The whale is").text == expected
    assert "".join(answer.delta or "" for answer in model.stream_complete("The whale is")) == expected


def test_a_tool_is_called(chat: Any) -> None:
    from llama_index.core.tools import FunctionTool

    def look_up(legs: int) -> str:
        """Looks animals up by the number of their legs."""
        return f"an animal with {legs} legs"

    tool = FunctionTool.from_defaults(look_up)
    answer = chat.chat_with_tools([tool], user_msg="What has 8 legs?", tool_required=True)
    call = chat.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "look_up"
    assert isinstance(call.tool_kwargs["legs"], int)


def test_structured_output_is_parsed_into_the_requested_class(chat: Any) -> None:
    from llama_index.core.llms import ChatMessage

    answer = chat.as_structured_llm(Animal).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(answer.raw, Animal)
