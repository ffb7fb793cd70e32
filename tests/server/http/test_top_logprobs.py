"""Top-k logprobs, token ids and packed arrays, as the OpenAI client receives them."""

import base64
import dataclasses
from typing import Any

import httpx
import numpy as np
import openai
import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import assert_exactly_openai_shaped, sync_client
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, TopLogprobs
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.respond.logprobs import TokenLogprob, TokenNames, build_completion_logprobs
from tokasaurus.server.served_model import ServedModel

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOKENS = [259, ord("1"), *"€".encode(), IM_END]
CHOSEN = np.array([-0.1, -2.3, -0.7, -0.9, -1.1, -0.3], np.float32).tolist()


def top_of(token_ids: list[int], logprobs: list[float], count: int) -> TopLogprobs:
    """The top `count` logprobs at each position. At odd positions another token than the sampled one is most likely."""
    ids = np.array(
        [[65 + position if position % 2 else token, *range(97, 97 + count)] for position, token in enumerate(token_ids)]
    )
    values = np.array([[-0.05 if position % 2 else value] for position, value in enumerate(logprobs)], np.float32)
    values = values - np.arange(count + 1, dtype=np.float32)
    return TopLogprobs(ids[:, :count].astype(np.int32), values[:, :count])


def say_hello(request: GenerateRequest, _index: int) -> Reply:
    if not request.want_logprobs:
        return Reply(TOKENS)
    count = request.num_top_logprobs
    return Reply(TOKENS, CHOSEN, top=top_of(TOKENS, CHOSEN, count) if count else None)


def test_completion_logprobs_have_the_top_k_and_the_sampled_token(server: LiveServer) -> None:
    server.engine.script = say_hello
    raw = sync_client(server).completions.with_raw_response.create(model="default", prompt="a", logprobs=2)
    assert_exactly_openai_shaped(raw.content, Completion)
    logprobs = raw.parse().choices[0].logprobs
    assert logprobs is not None
    top = top_of(TOKENS, CHOSEN, 2).logprobs.tolist()
    assert logprobs.token_logprobs == CHOSEN[:5]
    assert logprobs.top_logprobs == [
        {"hello": CHOSEN[0], "a": top[0][1]},
        {"B": top[1][0], "a": top[1][1], "1": CHOSEN[1]},
        {"\ufffd": CHOSEN[2], "a": top[2][1]},
        {"D": top[3][0], "a": top[3][1], "\ufffd": CHOSEN[3]},
        {"\ufffd": CHOSEN[4], "a": top[4][1]},
    ]
    is_greedy = [
        value == max(top.values()) for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    ]
    assert is_greedy == [True, False, True, False, True]
    assert server.engine.requests[0].num_top_logprobs == 2


def test_chat_logprobs_have_the_top_k_with_bytes(server: LiveServer) -> None:
    server.engine.script = say_hello
    raw = sync_client(server).chat.completions.with_raw_response.create(
        model="default", messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert_exactly_openai_shaped(raw.content, ChatCompletion)
    logprobs = raw.parse().choices[0].logprobs
    assert logprobs is not None
    top = top_of(TOKENS, CHOSEN, 2).logprobs.tolist()
    entries = logprobs.content or []
    assert [(entry.token, entry.logprob) for entry in entries][:2] == [("hello", CHOSEN[0]), ("1", CHOSEN[1])]
    assert [[(other.token, other.logprob, other.bytes) for other in entry.top_logprobs] for entry in entries[1:3]] == [
        [("B", top[1][0], [66]), ("a", top[1][1], [97])],
        [("\ufffd", CHOSEN[2], [0xE2]), ("a", top[2][1], [97])],
    ]


@pytest.mark.parametrize("stop", [None, "€"])
def test_streams_have_the_same_top_k_logprobs_as_unstreamed_answers(server: LiveServer, stop: str | None) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    chat: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "stop": stop, "n": 2}
    whole_chat = client.chat.completions.create(model="default", **chat)
    with client.chat.completions.stream(model="default", **chat) as stream:
        collected = stream.get_final_completion()
    for choice, expected_choice in zip(collected.choices, whole_chat.choices, strict=True):
        assert choice.logprobs == expected_choice.logprobs
    completion: dict[str, Any] = {"prompt": "a", "logprobs": 3, "stop": stop}
    (unstreamed,) = client.completions.create(model="default", **completion).choices
    assert unstreamed.logprobs is not None
    joined: list[dict[str, float]] = []
    for chunk in client.completions.create(model="default", stream=True, **completion):
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        joined += logprobs.top_logprobs
    assert joined == unstreamed.logprobs.top_logprobs
    assert len(joined) == (5 if stop is None else 2)


def test_a_sequence_joins_the_top_k_logprobs_of_its_deltas() -> None:
    whole, sequence = top_of(TOKENS, CHOSEN, 2), FinishedSequence()
    assert sequence.top is None
    for start, end in ((0, 1), (1, 4), (4, 6)):
        delta_top = TopLogprobs(whole.token_ids[start:end], whole.logprobs[start:end])
        sequence.append(SequenceDelta("r", 0, TOKENS[start:end], CHOSEN[start:end], None, 0, 0, 0, 0, delta_top))
    assert sequence.top is not None
    assert sequence.top.token_ids.tolist() == whole.token_ids.tolist()
    assert sequence.top.logprobs.tolist() == whole.logprobs.tolist()


def test_top_logprobs_keep_the_most_likely_of_tokens_with_the_same_text(served_model: ServedModel) -> None:
    tokens = [
        TokenLogprob(0xE2, -3.0, 0, False, [(0xFF, -0.5), (97, -1.0), (0xE3, -2.0)]),
        TokenLogprob(0xFF, -0.5, 0, False, [(0xFF, -0.5), (0xE2, -3.0)]),
    ]
    built = build_completion_logprobs(tokens, TokenNames(served_model.tokenizer))
    assert built.top_logprobs == [{"\ufffd": -0.5, "a": -1.0}, {"\ufffd": -0.5}]
    assert built.token_logprobs == [-3.0, -0.5]


def unpack(texts: list[str], dtype: str) -> list[list[float]]:
    return [np.frombuffer(base64.b64decode(text), dtype).tolist() for text in texts]


@pytest.mark.parametrize("count", [0, 3])
def test_fingerprint_has_ids_and_packed_logprobs_of_all_sampled_tokens(server: LiveServer, count: int) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    extra = {"logprobs_in_fingerprint": True}
    completion = client.completions.create(model="default", prompt=["a", "b"], logprobs=count, extra_body=extra)
    chat = client.chat.completions.create(
        model="default", messages=HELLO, n=2, logprobs=True, top_logprobs=count, extra_body=extra, stop="1"
    )
    for answer in (completion, chat):
        assert [choice.logprobs for choice in answer.choices] == [None, None]
        fingerprint = orjson.loads(answer.system_fingerprint or "")
        assert fingerprint["completion_ids"] == [TOKENS, TOKENS]
        assert unpack(fingerprint["packed_chosen_logprobs"], "<f4") == [CHOSEN, CHOSEN]
        ids, values = fingerprint["packed_topk_indices"], fingerprint["packed_topk_logprobs"]
        if count:
            top = top_of(TOKENS, CHOSEN, count)
            assert unpack(ids, "<i4") == [top.token_ids.reshape(-1).tolist()] * 2
            assert unpack(values, "<f4") == [top.logprobs.reshape(-1).tolist()] * 2
        else:
            assert (ids, values) == (None, None)


def test_fingerprint_without_logprobs_has_only_ids(server: LiveServer) -> None:
    server.engine.script = say_hello
    answer = sync_client(server).completions.create(
        model="default", prompt="a", extra_body={"logprobs_in_fingerprint": True}
    )
    assert orjson.loads(answer.system_fingerprint or "") == {
        "completion_ids": [TOKENS],
        "packed_chosen_logprobs": None,
        "packed_topk_indices": None,
        "packed_topk_logprobs": None,
    }


def chunks_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json={"model": "default", "stream": True, "return_token_ids": True, **body})
    events = response.text.split("\n\n")[:-2]  # without [DONE] and the empty text after it
    return [orjson.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("stop", [None, "lo1"])
def test_completions_return_token_ids_unstreamed_and_streamed(server: LiveServer, stop: str | None) -> None:
    server.engine.script = say_hello
    body = {"prompt": ["ab", "c"], "n": 2, "stop": stop}
    answer = sync_client(server).completions.create(
        model="default", prompt=["ab", "c"], n=2, stop=stop, extra_body={"return_token_ids": True}
    )
    expected = [([97, 98], TOKENS)] * 2 + [([99], TOKENS)] * 2
    extras = [choice.model_extra or {} for choice in answer.choices]
    assert [(extra["prompt_token_ids"], extra["token_ids"]) for extra in extras] == expected
    joined: dict[int, tuple[list[int], list[int]]] = {}
    for chunk in chunks_of(server.http, "/v1/completions", body):
        (choice,) = chunk["choices"]
        is_first = choice["index"] not in joined
        assert is_first == (choice["prompt_token_ids"] is not None)
        joined.setdefault(choice["index"], (choice["prompt_token_ids"], []))[1].extend(choice["token_ids"])
    assert [joined[index] for index in range(4)] == expected


def test_chats_return_token_ids_unstreamed_and_streamed(server: LiveServer) -> None:
    server.engine.script = say_hello
    answer = sync_client(server).chat.completions.create(
        model="default", messages=HELLO, n=2, extra_body={"return_token_ids": True}
    )
    prompt_ids = server.engine.requests[0].prompt_ids.tolist()
    assert (answer.model_extra or {})["prompt_token_ids"] == prompt_ids
    assert [(choice.model_extra or {})["token_ids"] for choice in answer.choices] == [TOKENS, TOKENS]
    first, second, *chunks = chunks_of(server.http, "/v1/chat/completions", {"messages": HELLO, "n": 2})
    assert first["prompt_token_ids"] == second["prompt_token_ids"] == prompt_ids
    joined: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        assert "prompt_token_ids" not in chunk
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert joined == {0: TOKENS, 1: TOKENS}


def test_the_flag_limits_the_number_of_requested_top_logprobs(served_model: ServedModel) -> None:
    with live_server(dataclasses.replace(served_model, max_topk_logprobs=2), FakeEngine(say_hello)) as server:
        client = sync_client(server)
        assert client.completions.create(model="default", prompt="a", logprobs=2).choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError, match="logprobs may be at most 2") as refused:
            client.completions.create(model="default", prompt="a", logprobs=3)
        assert refused.value.param == "logprobs"
        with pytest.raises(openai.BadRequestError, match="top_logprobs may be at most 2") as refused:
            client.chat.completions.create(model="default", messages=HELLO, logprobs=True, top_logprobs=3)
        assert refused.value.param == "top_logprobs"
