"""The field `prompt_logprobs`, in vLLM's shape."""

import dataclasses
from typing import Any

import numpy as np
import openai
import pytest

from tests.server.helpers.echo_entries import entries_of, expected_entries, say_hello
from tests.server.helpers.fake_engine import FakeEngine, prompt_logprobs
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tokasaurus.messages.generation import GenerateRequest, PromptLogprobs, TopLogprobs
from tokasaurus.server.respond.logprobs import build_prompt_logprobs
from tokasaurus.server.served_model import ServedModel

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]


def expected_field(request: GenerateRequest, num_top: int, model: ServedModel) -> list[dict[str, Any] | None]:
    """The field, built from the fake engine's prompt logprobs, where the token of rank r has logprob -r / 2."""
    field: list[dict[str, Any] | None] = [None]
    computed = prompt_logprobs(dataclasses.replace(request, num_top_prompt_logprobs=num_top))
    for position in range(1, len(request.prompt_ids)):
        values = {int(request.prompt_ids[position]): float(computed.logprobs[position])}
        if computed.top is not None:
            values |= zip(
                computed.top.token_ids[position].tolist(), computed.top.logprobs[position].tolist(), strict=True
            )
        field.append(
            {
                str(token_id): {
                    "logprob": value,
                    "rank": round(-2 * value),
                    "decoded_token": model.tokenizer.token_text(token_id),
                }
                for token_id, value in values.items()
            }
        )
    return field


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_completions_have_prompt_logprobs_in_every_choice(
    server: LiveServer, served_model: ServedModel, num_top: int
) -> None:
    server.engine.script = say_hello
    body = {"model": "default", "prompt": ["hello world", "a"], "n": 2, "prompt_logprobs": num_top}
    answer = server.http.post("/v1/completions", json=body).json()
    fields = [expected_field(request, num_top, served_model) for request in server.engine.requests]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [fields[0], fields[0], fields[1], fields[1]]
    assert {choice["text"] for choice in answer["choices"]} == {"hello€"}
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert {request.num_top_prompt_logprobs for request in server.engine.requests} == {num_top}
    assert {request.want_logprobs for request in server.engine.requests} == {False}
    body["return_token_ids"] = True
    answer = server.http.post("/v1/completions", json=body).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [fields[0], fields[0], fields[1], fields[1]]
    assert {tuple(choice["prompt_token_ids"]) for choice in answer["choices"][2:]} == {(97,)}


def test_chat_has_prompt_logprobs_beside_the_choices(server: LiveServer, served_model: ServedModel) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    for extra in ({"prompt_logprobs": 2}, {"prompt_logprobs": 2, "return_token_ids": True}):
        answer = client.chat.completions.create(model="default", messages=HELLO, n=2, extra_body=extra)
        (request,), server.engine.requests[:] = server.engine.requests[:], []
        extras = answer.model_extra or {}
        assert extras["prompt_logprobs"] == expected_field(request, 2, served_model)
        assert extras["prompt_token_ids"] == (request.prompt_ids.tolist() if "return_token_ids" in extra else None)
        assert [choice.message.content for choice in answer.choices] == ["hello€", "hello€"]


@pytest.mark.parametrize(("logprobs", "num_top"), [(1, 4), (4, 1), (0, 0), (3, 0), (0, 3)])
def test_echoed_logprobs_and_prompt_logprobs_each_have_their_requested_top_k(
    server: LiveServer, served_model: ServedModel, logprobs: int, num_top: int
) -> None:
    server.engine.script = say_hello
    answer = sync_client(server).completions.create(
        model="default", prompt="hello world", logprobs=logprobs, echo=True, extra_body={"prompt_logprobs": num_top}
    )
    (request,) = server.engine.requests
    assert (request.num_top_logprobs, request.num_top_prompt_logprobs) == (logprobs, max(logprobs, num_top))
    (choice,) = answer.choices
    echoed = expected_entries(request, logprobs, served_model.tokenizer)
    assert entries_of(choice)[: len(echoed)] == echoed
    assert (choice.model_extra or {})["prompt_logprobs"] == expected_field(request, num_top, served_model)


def test_a_prompt_token_among_the_most_likely_keeps_its_own_rank(served_model: ServedModel) -> None:
    """The prompt token may be listed after an equally likely token."""
    top = TopLogprobs(np.array([[0, 0], [98, 97]], np.int32), np.array([[np.nan] * 2, [-0.5, -0.5]], np.float32))
    computed = PromptLogprobs(np.array([np.nan, -0.5], np.float32), np.array([0, 1], np.int32), top)
    first, second = build_prompt_logprobs(np.array([5, 97], np.int32), computed, 2, served_model.tokenizer)
    assert first is None
    assert second is not None
    assert {key: (entry.rank, entry.decoded_token) for key, entry in second.items()} == {"97": (1, "a"), "98": (1, "b")}


def test_prompt_logprobs_are_refused_in_streams(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(say_hello)) as server:
        client = sync_client(server)
        fields: dict[str, Any] = {"extra_body": {"prompt_logprobs": 0}, "stream": True}
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="default", prompt="a", **fields)
        assert refused.value.param == "prompt_logprobs"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="default", messages=HELLO, **fields)
        assert refused.value.param == "prompt_logprobs"
