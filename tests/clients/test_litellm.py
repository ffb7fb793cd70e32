"""litellm, where the name of a model starts with its provider."""

import asyncio
import os
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a list of prices
litellm = pytest.importorskip("litellm", reason="litellm is not installed: `make test-clients` has it")

MESSAGES = [{"role": "user", "content": "What do whales eat?"}]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(params=["openai/default", "hosted_vllm/default"])
def request_fields(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    return {"model": request.param, "messages": MESSAGES, "api_base": base_url, "api_key": "none", "num_retries": 0}


def test_completion_equals_plain_http(request_fields: dict[str, Any], plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, **GREEDY})
    answer = litellm.completion(**request_fields, **GREEDY, user="me")
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    assert answer.model.endswith(expected["model"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[name] == expected["usage"][name]
    assert asyncio.run(litellm.acompletion(**request_fields, **GREEDY)).choices == answer.choices


def test_an_answer_can_be_sent_back_in_a_conversation(request_fields: dict[str, Any], plain_post: PlainPost) -> None:
    answer = litellm.completion(**request_fields, **GREEDY).choices[0].message
    request_fields["messages"] = [*MESSAGES, answer, {"role": "user", "content": "And the others?"}]
    second = litellm.completion(**request_fields, **GREEDY)
    conversation = [*MESSAGES, {"role": "assistant", "content": answer.content}, request_fields["messages"][-1]]
    expected = plain_post("chat/completions", {"messages": conversation, **GREEDY})
    assert second.choices[0].message.content == expected["choices"][0]["message"]["content"]


def test_joined_stream_chunks_equal_the_unstreamed_answer(request_fields: dict[str, Any]) -> None:
    unstreamed = litellm.completion(**request_fields, **GREEDY)
    chunks = list(litellm.completion(**request_fields, **GREEDY, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == unstreamed.choices[0].message.content
    assert built.choices[0].finish_reason == "length"
    assert (built.usage.prompt_tokens, built.usage.completion_tokens) == (unstreamed.usage.prompt_tokens, 12)
    assert len(chunks) > 6

    async def collect() -> str:
        return "".join(
            [
                chunk.choices[0].delta.content or ""
                async for chunk in await litellm.acompletion(**request_fields, **GREEDY, stream=True)
            ]
        )

    assert asyncio.run(collect()) == unstreamed.choices[0].message.content


def test_samples_and_top_logprobs_match_plain_http(request_fields: dict[str, Any], plain_post: PlainPost) -> None:
    sampled = {"n": 2, "seed": 5, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"]}
    expected = plain_post("chat/completions", {"messages": MESSAGES, **sampled})["choices"]
    answer = litellm.completion(**request_fields, **sampled)
    assert [choice.message.content for choice in answer.choices] == [
        choice["message"]["content"] for choice in expected
    ]
    for choice, plain in zip(answer.choices, expected, strict=True):
        values = [(entry.token, len(entry.top_logprobs)) for entry in choice.logprobs.content]
        assert values == [(entry["token"], 2) for entry in plain["logprobs"]["content"]]


@pytest.mark.parametrize("model", ["text-completion-openai/default", "hosted_vllm/default"])
def test_text_completion_equals_plain_http(model: str, base_url: str, plain_post: PlainPost) -> None:
    body = {"prompt": "The whale is", "logprobs": 2, **GREEDY}
    expected = plain_post("completions", body)["choices"][0]
    answer = litellm.text_completion(model=model, api_base=base_url, api_key="none", **body)
    assert answer.choices[0].text == expected["text"]
    assert answer.choices[0].logprobs.tokens == expected["logprobs"]["tokens"]


def test_errors_raise_litellms_specific_exception_classes(request_fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature") as wrong:
        litellm.completion(**request_fields, temperature=9)
    assert wrong.value.status_code == 400
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**request_fields | {"model": request_fields["model"].replace("default", "other")})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**request_fields, max_tokens=100_000)


def test_an_answer_follows_its_schema(request_fields: dict[str, Any]) -> None:
    request_fields["messages"] = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(**request_fields, response_format=Animal, temperature=0, max_tokens=60)
    Animal.model_validate_json(answer.choices[0].message.content)


def test_arguments_of_a_forced_tool_call_follow_its_schema(base_url: str) -> None:
    # For hosted_vllm litellm drops the part of the schema that forbids other arguments.
    request_fields: dict[str, Any] = {"model": "openai/default", "api_base": base_url, "api_key": "none"}
    request_fields["messages"] = [{"role": "user", "content": QUESTION}]
    tool = {"type": "function", "function": {"name": "Animal", "parameters": Animal.model_json_schema()}}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**request_fields, **forced, temperature=0, max_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Animal"
    Animal.model_validate_json(call.function.arguments)


QUESTION_ITEM = {"model": "openai/default", "input": MESSAGES[0]["content"], "num_retries": 0}
# litellm asks for at least 16
SHORT = {"max_output_tokens": 24, "temperature": 0}


def text_of(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


def test_a_response_and_its_stream_equal_the_chat(base_url: str, plain_post: PlainPost) -> None:
    expected = plain_post("chat/completions", {"messages": MESSAGES, **GREEDY, "max_tokens": 24})
    fields = {**QUESTION_ITEM, **SHORT, "api_base": base_url, "api_key": "none"}
    response = litellm.responses(**fields)
    assert text_of(response) == expected["choices"][0]["message"]["content"]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (expected["usage"]["prompt_tokens"], 24)
    events = list(litellm.responses(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text_of(response)
    assert text_of(events[-1].response) == text_of(response)


def test_a_response_calls_its_tool(base_url: str) -> None:
    tool = {"type": "function", "name": "Animal", "parameters": Animal.model_json_schema()}
    fields = {**QUESTION_ITEM, "api_base": base_url, "api_key": "none", "max_output_tokens": 80, "temperature": 0}
    response = litellm.responses(**fields | {"input": QUESTION}, tools=[tool], tool_choice="required")
    call = next(item for item in response.output if item.type == "function_call")
    assert call.name == "Animal"
    Animal.model_validate_json(call.arguments)


def test_a_router_serves_responses_beside_chats(base_url: str) -> None:
    """litellm's proxy is this router: after one answer 404 it would refuse everybody's requests for a while."""
    deployment = {"model": "openai/default", "api_base": base_url, "api_key": "none"}
    router = litellm.Router([{"model_name": "animals", "litellm_params": deployment}], num_retries=0)

    async def run() -> list[str]:
        chat = {"model": "animals", "messages": MESSAGES, **GREEDY, "max_tokens": 24}
        before = await router.acompletion(**chat)
        response = await router.aresponses(model="animals", input=MESSAGES[0]["content"], **SHORT)
        after = await router.acompletion(**chat)
        return [before.choices[0].message.content, text_of(response), after.choices[0].message.content]

    before, response, after = asyncio.run(run())
    assert before == response == after != ""
