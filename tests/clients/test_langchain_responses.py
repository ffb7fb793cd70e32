"""LangChain's chat model with use_responses_api=True."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"


@pytest.fixture
def chat(base_url: str) -> Any:
    module = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: `make test-clients` has it"
    )
    fields = {"model": "default", "base_url": base_url, "api_key": "none", "max_retries": 0, "temperature": 0}
    return module.ChatOpenAI(use_responses_api=True, max_tokens=80, **fields)


@pytest.fixture
def short_chat(chat: Any) -> Any:
    return chat.model_copy(update={"max_tokens": 12})


def test_an_answer_its_stream_and_a_conversation_equal_the_chat(short_chat: Any, plain_post: PlainPost) -> None:
    chat, greedy = short_chat, {"max_tokens": 12, "temperature": 0}
    question = {"role": "user", "content": WHALES}
    expected = plain_post("chat/completions", {"messages": [question], **greedy})
    answer = chat.invoke(WHALES)
    assert answer.text == expected["choices"][0]["message"]["content"]
    assert answer.usage_metadata["output_tokens"] == expected["usage"]["completion_tokens"]
    chunks = list(chat.stream(WHALES))
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert added.text == answer.text
    assert len(chunks) > 4
    next_question = {"role": "user", "content": "And seals?"}
    messages = [question, {"role": "assistant", "content": answer.text}, next_question]
    expected = plain_post("chat/completions", {"messages": messages, **greedy})
    for sent_back in (answer, added):
        assert chat.invoke([question, sent_back, next_question]).text == expected["choices"][0]["message"]["content"]


@pytest.mark.long
def test_a_tool_is_called_and_its_result_can_be_sent_back(chat: Any, short_chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    question = HumanMessage(QUESTION)
    bound = chat.bind_tools([Animal], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "Animal"
    assert Animal.model_validate(call["args"])
    chunks = list(bound.stream([question]))
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert [streamed["args"] for streamed in added.tool_calls] == [call["args"]]
    result = ToolMessage("It is the largest animal.", tool_call_id=call["id"])
    assert short_chat.bind_tools([Animal], tool_choice="none").invoke([question, answer, result]).text


def test_structured_output_is_parsed_into_the_requested_class(chat: Any) -> None:
    assert isinstance(chat.with_structured_output(Animal, method="json_schema").invoke(QUESTION), Animal)
