import asyncio
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tokasaurus.commands.bench.client import (
    BadAnswer,
    ClientOptions,
    RequestResult,
    ServerError,
    Usage,
    open_client,
    read_usage,
)
from tokasaurus.commands.bench.workloads import OfferedRequest, as_chat


def offered(prompt: str = "a b", max_tokens: int = 4, num_samples: int = 1, **fields: Any) -> OfferedRequest:
    return OfferedRequest({"prompt": prompt}, num_samples, max_tokens, 0.5, ignore_eos=True, **fields)


def offer(
    base_url: str, requests: Sequence[OfferedRequest], concurrency: int | None = None, **options: Any
) -> list[RequestResult]:
    fields = {"api_key": None, "timeout_s": 30.0, "usage_per_choice": False, "extra_body": {}} | options

    async def run() -> list[RequestResult]:
        async with open_client(ClientOptions(base_url, **fields)) as client:
            return await client.offer(requests, "scripted", concurrency)

    return asyncio.run(run())


def test_results_come_in_the_order_of_the_requests_with_their_tokens(scripted_server: Any) -> None:
    scripted_server.latency_s = lambda body: 0.01 * (5 - body["max_tokens"])  # the last answers first
    requests = [offered("word " * i, max_tokens=i, num_samples=2) for i in range(1, 5)]
    results = offer(scripted_server.base_url, requests)
    assert [(r.index, r.prompt_tokens, r.completion_tokens, r.cached_tokens, r.error) for r in results] == [
        (i - 1, i, 2 * i, 3, None) for i in range(1, 5)
    ]


def test_latency_is_the_servers_response_time(scripted_server: Any) -> None:
    scripted_server.latency_s = lambda body: body["max_tokens"] / 100
    results = offer(scripted_server.base_url, [offered(max_tokens=m) for m in (5, 20, 40)])
    for result, slept_s in zip(results, (0.05, 0.2, 0.4), strict=True):
        assert slept_s <= result.latency_s < slept_s + 10
        assert result.finished_s - result.sent_s == pytest.approx(result.latency_s)


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 1), (3, 3), (None, 12)])
def test_concurrency_is_reached_and_never_exceeded(
    scripted_server: Any, concurrency: int | None, expected: int
) -> None:
    scripted_server.latency_s = lambda _: 0.05
    scripted_server.min_in_flight = expected
    offer(scripted_server.base_url, [offered() for _ in range(12)], concurrency)
    assert scripted_server.max_in_flight == expected
    assert len(scripted_server.bodies) == 12


def test_requests_are_sent_when_they_are_due(scripted_server: Any) -> None:
    arrivals = (0.0, 0.1, 0.3)
    results = offer(scripted_server.base_url, [offered(arrival_s=arrival) for arrival in arrivals])
    for result, arrival_s in zip(results, arrivals, strict=True):
        assert arrival_s <= result.sent_s < arrival_s + 10


def test_the_wait_of_a_due_request_for_a_connection_is_told_apart(scripted_server: Any) -> None:
    scripted_server.latency_s = lambda _: 0.2
    results = offer(scripted_server.base_url, [offered(arrival_s=0.0) for _ in range(3)], concurrency=1)
    waits = sorted(result.waited_s or 0.0 for result in results)
    assert waits[1] >= 0.2
    assert waits[2] >= 0.4
    assert all(result.latency_s < waits[1] + 10 for result in results)
    assert offer(scripted_server.base_url, [offered()])[0].waited_s is None


def test_body_and_headers_match_the_offered_requests(scripted_server: Any) -> None:
    requests = [offered(num_samples=3), as_chat(offered("hi"))]
    offer(scripted_server.base_url, requests, concurrency=1, api_key="secret", extra_body={"cache_prompt": False})
    common = {"model": "scripted", "max_tokens": 4, "temperature": 0.5, "ignore_eos": True, "cache_prompt": False}
    assert scripted_server.bodies == [
        {"prompt": "a b", "n": 3} | common,
        {"messages": [{"role": "user", "content": "hi"}]} | common,
    ]
    assert scripted_server.paths == ["completions", "chat/completions"]
    assert {headers["authorization"] for headers in scripted_server.headers} == {"Bearer secret"}


def test_failed_requests_are_marked_and_not_retried(scripted_server: Any) -> None:
    scripted_server.status = lambda body: 503 if body["prompt"] == "bad" else 200
    results = offer(scripted_server.base_url, [offered("good"), offered("bad"), offered("good")])
    assert [result.error is None for result in results] == [True, False, True]
    assert str(results[1].error).startswith("HTTP 503: {")
    assert results[1].completion_tokens == 0
    assert len(scripted_server.bodies) == 3


def test_slow_answer_is_a_failure(scripted_server: Any) -> None:
    scripted_server.latency_s = lambda _: 1.0
    [result] = offer(scripted_server.base_url, [offered()], timeout_s=0.1)
    assert result.error == "no answer within 0.1 s"


def test_absent_server_fails_requests_and_has_no_model() -> None:
    [result] = offer("http://127.0.0.1:1/v1", [offered()])
    assert "ClientConnectorError" in str(result.error)

    async def find_model() -> str:
        async with open_client(ClientOptions("http://127.0.0.1:1/v1", None, 5.0, False, {})) as client:
            return await client.find_model()

    with pytest.raises(ServerError, match=r"127\.0\.0\.1:1/v1/models"):
        asyncio.run(find_model())


def payload(num_choices: int, completion_tokens: object) -> Any:
    return {"choices": [{}] * num_choices, "usage": {"prompt_tokens": 9, "completion_tokens": completion_tokens}}


def test_usage_of_one_choice_is_multiplied_only_where_asked() -> None:
    request = offered(max_tokens=4, num_samples=8)
    assert read_usage(payload(8, 32), request, usage_per_choice=False) == Usage(9, 0, 32)
    assert read_usage(payload(8, 4), request, usage_per_choice=True) == Usage(9, 0, 32)
    with pytest.raises(BadAnswer, match=r"is 4, expected 32 .*usage_per_choice=T"):
        read_usage(payload(8, 4), request, usage_per_choice=False)


def test_fewer_tokens_are_accepted_only_where_eos_may_end_a_choice() -> None:
    ending = OfferedRequest({"prompt": "a"}, 1, 100, 0.0, ignore_eos=False)
    assert read_usage(payload(1, 40), ending, usage_per_choice=False).completion_tokens == 40
    with pytest.raises(BadAnswer, match=r"is 40, expected 100"):
        read_usage(payload(1, 40), offered(max_tokens=100), usage_per_choice=False)


@pytest.mark.parametrize("answer", [[], {}, {"choices": [{}], "usage": None}, payload(1, None)])
def test_answer_without_usage_is_not_counted(answer: Any) -> None:
    with pytest.raises(BadAnswer, match="no valid choices and usage"):
        read_usage(answer, offered(), usage_per_choice=False)


def test_missing_choice_is_not_counted() -> None:
    with pytest.raises(BadAnswer, match="1 choices, expected 2"):
        read_usage(payload(1, 8), offered(num_samples=2), usage_per_choice=False)


@pytest.mark.parametrize("is_chat", [False, True])
def test_times_of_a_stream_are_those_of_its_events(scripted_server: Any, is_chat: bool) -> None:
    request = offered(max_tokens=5)
    [result] = offer(scripted_server.base_url, [as_chat(request) if is_chat else request], is_streaming=True)
    assert result.error is None
    assert scripted_server.bodies[0]["stream_options"] == {"include_usage": True}
    assert (result.completion_tokens, result.cached_tokens, len(result.events_s)) == (5, 3, 5)
    assert result.first_token_s == result.events_s[0] >= 0.01
    assert result.latency_s == result.events_s[-1]
    assert sum(result.gaps_s) == pytest.approx(result.events_s[-1] - result.events_s[0])
    assert len(result.gaps_s) == 4
    assert sum(result.gaps_s) >= 0.03


def test_gaps_are_between_events_of_one_sample(scripted_server: Any) -> None:
    [result] = offer(scripted_server.base_url, [offered(max_tokens=4, num_samples=3)], is_streaming=True)
    assert result.error is None
    assert len(result.events_s) == 12
    times = [result.events_s[index::3] for index in range(3)]
    gaps = sorted(after - before for one in times for before, after in itertools.pairwise(one))
    assert sorted(result.gaps_s) == pytest.approx(gaps)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([(0.0, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}})], "no token"),
        ([(0.0, {"choices": [{"text": "a"}]})], "connection was closed"),
        ([(0.0, {"choices": [{"text": "a", "finish_reason": "stop"}]})], "usage"),
        ([(0.0, {"choices": [{"text": "a"}]}), (0.0, {"error": {"message": "engine died"}})], "engine died"),
        ([(0.0, [1, 2])], "none of the API"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure(
    scripted_server: Any, events: list[tuple[float, Any]], reason: str
) -> None:
    scripted_server.events = lambda _: events
    [result] = offer(scripted_server.base_url, [offered()], is_streaming=True)
    assert reason in str(result.error)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_turn_follows_the_answer_to_the_turn_before(scripted_server: Any, is_streaming: bool) -> None:
    first, second = (as_chat(offered(text)) for text in ("one", "two"))
    requests = [first, dataclasses.replace(second, after=0)]
    results = offer(scripted_server.base_url, requests, concurrency=1, is_streaming=is_streaming)
    assert [result.error for result in results] == [None, None]
    said = "roar " * 4 if is_streaming else "roar"
    assert scripted_server.bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "two"},
    ]
    assert results[1].sent_s >= results[0].finished_s


def test_a_stream_may_end_without_a_line_end(scripted_server: Any) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 4}
    scripted_server.events = lambda _: [(0.0, {"choices": [{"index": 0, "text": "a"}]})]
    scripted_server.stream_end = b'data: {"choices": [], "usage": ' + json.dumps(usage).encode() + b"}"
    [result] = offer(scripted_server.base_url, [offered()], is_streaming=True)
    assert (result.error, result.completion_tokens) == (None, 4)


@pytest.mark.parametrize("choice", [None, {}, {"message": None}])
def test_a_chat_without_a_message_is_a_failure(scripted_server: Any, choice: Any) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 4}
    scripted_server.answer = lambda _: {"choices": [choice], "usage": usage}
    [result] = offer(scripted_server.base_url, [as_chat(offered())])
    assert result.error == "the answer has no message"


def test_a_turn_after_a_failed_one_is_not_sent(scripted_server: Any) -> None:
    scripted_server.status = lambda _: 500
    chat = as_chat(offered("one"))
    results = offer(scripted_server.base_url, [chat, dataclasses.replace(chat, after=0)])
    assert results[1].error == "the turn before it failed"
    assert len(scripted_server.bodies) == 1
