"""LangChain's chat model for Anthropic's API."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import WHALES, PlainPost


@pytest.fixture(scope="module")
def make_chat(base_url: str) -> Callable[[int], Any]:
    """Limit of tokens -> a greedy chat model."""
    module = pytest.importorskip(
        "langchain_anthropic", reason="langchain-anthropic is not installed: `make test-clients` has it"
    )
    url = base_url.removesuffix("/v1")

    def make(max_tokens: int) -> Any:
        fields = {"max_tokens": max_tokens, "temperature": 0, "max_retries": 0}
        return module.ChatAnthropic(model="default", base_url=url, api_key="none", **fields)

    return make


def test_an_answer_its_stream_and_its_usage_equal_the_chat(
    make_chat: Callable[[int], Any], plain_post: PlainPost
) -> None:
    from langchain_core.messages import HumanMessage

    chat = make_chat(12)
    body = {"messages": [{"role": "user", "content": WHALES}], "max_tokens": 12, "temperature": 0}
    expected = plain_post("chat/completions", body)
    answer = chat.invoke(WHALES)
    assert answer.text == expected["choices"][0]["message"]["content"]
    assert answer.response_metadata["stop_reason"] == "max_tokens"
    assert answer.usage_metadata["total_tokens"] == expected["usage"]["total_tokens"]
    chunks = list(chat.stream(WHALES))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert len([chunk for chunk in chunks if chunk.text]) > 4
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 12
    assert chat.get_num_tokens_from_messages([HumanMessage(WHALES)]) == expected["usage"]["prompt_tokens"]


def test_a_conversation_goes_on(make_chat: Callable[[int], Any], plain_post: PlainPost) -> None:
    chat = make_chat(12)
    first = chat.invoke([("system", "Be short."), ("user", WHALES)])
    second = chat.invoke([("system", "Be short."), ("user", WHALES), first, ("user", "And seals?")])
    conversation = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": WHALES},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And seals?"},
    ]
    expected = plain_post("chat/completions", {"messages": conversation, "max_tokens": 12, "temperature": 0})
    assert second.text == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_follows_its_schema(make_chat: Callable[[int], Any], method: str) -> None:
    answer = make_chat(80).with_structured_output(Animal, method=method).invoke(QUESTION)
    assert isinstance(answer, Animal)


def test_a_tool_is_called_and_its_result_is_sent_back(make_chat: Callable[[int], Any]) -> None:
    from langchain_core.tools import tool

    @tool
    def look_up(count: int) -> str:
        """Looks a number up."""
        return f"{count} whales eat krill."

    chat = make_chat(80)
    question = ("user", "Look the number 3 up.")
    call = chat.bind_tools([look_up], tool_choice="any").invoke([question])
    assert {each["name"] for each in call.tool_calls} == {"look_up"}
    results = [look_up.invoke(each) for each in call.tool_calls]
    assert chat.bind_tools([look_up], tool_choice={"type": "none"}).invoke([question, call, *results]).text
