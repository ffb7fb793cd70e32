"""LangChain's chat and completion models for OpenAI's API."""

from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost


@pytest.fixture(scope="module")
def langchain_openai() -> Any:
    """The module, which takes seconds to import."""
    return pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: `make test-clients` has it"
    )


GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture
def chat(langchain_openai: Any, base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(model="default", base_url=base_url, api_key="none", max_retries=0, **GREEDY)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_invoke_equals_plain_http_with_its_usage(chat: Any, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": messages("What do whales eat?"), **GREEDY})
    answer = chat.invoke("What do whales eat?")
    assert answer.content == expected["choices"][0]["message"]["content"]
    assert answer.response_metadata["finish_reason"] == "length"
    usage = expected["usage"]
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (
        *(usage["prompt_tokens"], usage["completion_tokens"]),
    )


@pytest.mark.long
def test_an_answer_can_be_sent_back_in_a_conversation(chat: Any, plain_post: PlainPost) -> None:
    question, answer = messages("Name a whale."), chat.invoke("Name a whale.")
    second = chat.invoke([*question, answer, *messages("And another?")])
    conversation = [*question, {"role": "assistant", "content": answer.content}, *messages("And another?")]
    expected = plain_post("chat/completions", {"messages": conversation, **GREEDY})
    assert second.content == expected["choices"][0]["message"]["content"]


@pytest.mark.long
def test_joined_stream_chunks_equal_the_answer_and_its_usage(chat: Any) -> None:
    expected = chat.invoke("What do whales eat?")
    chunks = list(chat.stream("What do whales eat?", stream_usage=True))
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert added.content == expected.content
    assert added.usage_metadata["total_tokens"] == expected.usage_metadata["total_tokens"]
    assert len([chunk for chunk in chunks if chunk.content]) > 4


@pytest.mark.long
def test_a_batch_answers_each_question_as_if_asked_alone(chat: Any) -> None:
    questions = [f"What is {number} + 1?" for number in range(6)]
    assert [answer.content for answer in chat.batch(questions)] == [chat.invoke(text).content for text in questions]


@pytest.mark.long
def test_the_completions_model_equals_plain_http(langchain_openai: Any, base_url: str, plain_post: PlainPost) -> None:
    model = langchain_openai.OpenAI(model="default", base_url=base_url, api_key="none", max_retries=0, **GREEDY)
    prompts = ["The whale is", "Once upon"]
    expected = plain_post("completions", {"prompt": prompts, **GREEDY})
    generated = model.generate(prompts)
    assert [generation.text for (generation,) in generated.generations] == [
        choice["text"] for choice in expected["choices"]
    ]
    assert "".join(model.stream("The whale is")) == expected["choices"][0]["text"]


def test_a_too_long_request_raises_context_overflow_error(langchain_openai: Any, base_url: str) -> None:
    from langchain_core.exceptions import ContextOverflowError

    model = langchain_openai.ChatOpenAI(
        model="default", base_url=base_url, api_key="none", max_retries=0, max_tokens=100_000
    )
    with pytest.raises(ContextOverflowError):
        model.invoke("Hi")


@pytest.mark.parametrize("method", ["json_schema", pytest.param("function_calling", marks=pytest.mark.long)])
def test_structured_output_is_parsed_into_the_requested_class(
    langchain_openai: Any, base_url: str, method: str
) -> None:
    model = langchain_openai.ChatOpenAI(
        model="default", base_url=base_url, api_key="none", max_retries=0, temperature=0, max_tokens=80
    )
    assert isinstance(model.with_structured_output(Animal, method=method).invoke(QUESTION), Animal)


@pytest.mark.long
def test_a_tool_is_called_and_its_result_can_be_sent_back(langchain_openai: Any, base_url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain_openai.ChatOpenAI(
        model="default", base_url=base_url, api_key="none", max_retries=0, temperature=0, max_tokens=80
    )
    question = HumanMessage(QUESTION)
    answer = model.bind_tools([Animal], tool_choice="any", parallel_tool_calls=False).invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "Animal"
    assert Animal.model_validate(call["args"])
    result = ToolMessage("It is the largest animal.", tool_call_id=call["id"])
    assert model.bind_tools([Animal], tool_choice="none").invoke([question, answer, result]).content
