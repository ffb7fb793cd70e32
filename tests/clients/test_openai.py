"""OpenAI's own client, of either major version, against a real server."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What do whales eat?"}]
PROMPT = "The whale is an animal that"


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def test_answers_equal_plain_http(client: openai.OpenAI, plain_post: PlainPost) -> None:
    fields = {"max_tokens": 12, "n": 2, "seed": 3, "temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5}
    chat = client.chat.completions.create(model="default", messages=MESSAGES, user="me", **fields)
    expected = plain_post("chat/completions", {"messages": MESSAGES, **fields})
    assert [choice.message.content for choice in chat.choices] == [
        choice["message"]["content"] for choice in expected["choices"]
    ]
    assert len({choice.message.content for choice in chat.choices}) == 2
    completion = client.completions.create(model="default", prompt=[PROMPT, "Once upon"], **fields)
    expected = plain_post("completions", {"prompt": [PROMPT, "Once upon"], **fields})
    assert [choice.text for choice in completion.choices] == [choice["text"] for choice in expected["choices"]]
    assert len(completion.choices) == 4
    assert completion.usage is not None
    assert completion.usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_concurrent_async_answers_equal_sequential_answers(client: openai.OpenAI, base_url: str) -> None:
    bodies = [{"prompt": f"{PROMPT} number {number}", "max_tokens": 6, "temperature": 0} for number in range(10)]
    sequential = [client.completions.create(model="default", **body).choices[0].text for body in bodies]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as many:
            answers = await asyncio.gather(*(many.completions.create(model="default", **body) for body in bodies))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == sequential


def test_streamed_deltas_join_to_the_unstreamed_answer(client: openai.OpenAI, base_url: str) -> None:
    fields: dict[str, Any] = {"model": "default", "max_tokens": 16, "temperature": 0}
    unstreamed = client.chat.completions.create(messages=MESSAGES, **fields)
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **fields))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == unstreamed.choices[0].message.content
    assert len([delta for delta in deltas if delta]) > 4
    assert chunks[-1].choices[0].finish_reason == unstreamed.choices[0].finish_reason == "length"

    async def stream() -> tuple[str, Any]:
        text, usage = "", None
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as many:
            options = {"include_usage": True}
            async for chunk in await many.completions.create(
                prompt=PROMPT, stream=True, stream_options=options, **fields
            ):
                text += "".join(choice.text for choice in chunk.choices)
                usage = chunk.usage
        return text, usage

    expected = client.completions.create(prompt=PROMPT, **fields)
    text, usage = asyncio.run(stream())
    assert text == expected.choices[0].text
    assert expected.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, 16)


def test_chat_and_completion_logprobs_have_the_same_tokens_and_values(client: openai.OpenAI) -> None:
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat do whales eat?<|im_end|>\n"
    fields: dict[str, Any] = {"model": "default", "max_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **fields)
    completion = client.completions.create(prompt=f"{text}<|im_start|>assistant\n", logprobs=3, **fields)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    content, flat = chat.choices[0].logprobs.content, completion.choices[0].logprobs
    assert flat is not None
    assert flat.top_logprobs is not None
    assert [entry.token for entry in content] == flat.tokens
    assert [entry.logprob for entry in content] == pytest.approx(flat.token_logprobs, abs=1e-4)
    for entry, top in zip(content, flat.top_logprobs, strict=True):
        assert {other.token: other.logprob for other in entry.top_logprobs} == pytest.approx(top, abs=1e-4)
        assert max(top.values()) == pytest.approx(entry.logprob, abs=1e-4), "greedy"


def test_errors_raise_the_clients_exception_classes(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "default", "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**fields, temperature=9)
    assert (wrong.value.param, wrong.value.type, wrong.value.status_code) == (
        *("temperature", "invalid_request_error", 400),
    )
    with pytest.raises(openai.BadRequestError) as unknown_field:
        client.chat.completions.create(**fields, extra_body={"nonsense": 1})
    assert unknown_field.value.param == "nonsense"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**fields, max_tokens=100_000)
    assert (long.value.param, long.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**fields | {"model": "gpt-4o"})
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="x")
    with pytest.raises(openai.BadRequestError, match="task=embed"):
        client.embeddings.create(model="default", input="x")


def test_the_listed_model_answers(client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert client.models.retrieve(listed.id) == listed
    answer = client.completions.create(model=listed.id, prompt=PROMPT, max_tokens=1)
    assert answer.model == listed.id


def test_an_answer_to_a_schema_is_parsed_into_its_class(client: openai.OpenAI, plain_post: PlainPost) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.parse(model="default", response_format=Animal, **fields)
    animal = answer.choices[0].message.parsed
    assert isinstance(animal, Animal)
    schema = {"name": "Animal", "schema": Animal.model_json_schema(), "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    expected = plain_post("chat/completions", {**fields, "response_format": response_format})
    assert Animal.model_validate_json(expected["choices"][0]["message"]["content"]) == animal
    with client.chat.completions.stream(model="default", response_format=Animal, **fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == animal


def test_arguments_of_a_forced_tool_call_are_parsed_into_its_class(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [openai.pydantic_function_tool(Animal)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    answer = client.chat.completions.parse(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "Animal"
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(**fields) as stream:
        message = stream.get_final_completion().choices[0].message
    (streamed,) = message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    tool_messages = [message, {"role": "tool", "tool_call_id": streamed.id, "content": "Yes."}]
    last = client.chat.completions.create(
        **fields | {"messages": [*fields["messages"], *tool_messages], "tool_choice": "none"}
    )
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


@pytest.mark.long
def test_an_agent_goes_on_after_a_call_that_was_cut(client: openai.OpenAI) -> None:
    """The cut call goes back as the server returned it, with an error as its result."""
    fields: dict[str, Any] = {
        "model": "default",
        "tools": [openai.pydantic_function_tool(Animal)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    messages: Any = [{"role": "user", "content": QUESTION}]
    lengths = []
    for max_tokens in range(12, 40, 4):
        cut = client.chat.completions.create(**fields, messages=messages, max_tokens=max_tokens).choices[0]
        assert cut.finish_reason in ("length", "tool_calls")
        calls: Any = cut.message.tool_calls or []
        lengths += [len(call.function.arguments) for call in calls if cut.finish_reason == "length"]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "no JSON: try again"} for call in calls]
        again = client.chat.completions.create(**fields, messages=[*messages, cut.message, *results], max_tokens=80)
        (call,) = again.choices[0].message.tool_calls or []
        assert Animal.model_validate_json(call.function.arguments)
    assert len(set(lengths)) > 2, "calls were cut at several places within their arguments"
