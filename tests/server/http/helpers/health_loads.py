"""The largest requests, by which a server's event loop could be blocked."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import orjson

from tests.server.helpers.fake_engine import FakeEngine, Reply
from tokasaurus.messages.generation import GenerateRequest, TopLogprobs
from tokasaurus.messages.status import EngineLimits

# 250 ms on a machine without other work; test machines are slow and busy. Before, these loads took 2 to 20 s.
MAX_SECONDS = 1.5
NUM_TOP = 20
EVENT = b"data: "


def letters(request: GenerateRequest, _index: int) -> Reply:
    """As many letters "a" as asked for, with top-k logprobs."""
    count = min(request.max_new_tokens, 40_000)
    top = None
    if request.num_top_logprobs:
        ids = np.tile(np.arange(97, 97 + NUM_TOP, dtype=np.int32), (count, 1))
        top = TopLogprobs(ids, np.tile(-np.arange(NUM_TOP, dtype=np.float32), (count, 1)))
    return Reply([97] * count, [-1.0] * count if request.want_logprobs else None, "length", top=top)


def make_engine() -> FakeEngine:
    return FakeEngine(letters, EngineLimits(64, 16, 100_000), delta_size=50, max_deltas=1024)


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields)


def completion(**fields: Any) -> bytes:
    return orjson.dumps({"model": "default", "prompt": "hi", "max_tokens": 1} | fields)


def post(http: httpx.Client, path: str, content: bytes) -> httpx.Response:
    return http.post(path, content=content, headers={"Content-Type": "application/json"})


def count_events(http: httpx.Client, path: str, content: bytes, pause_s: float = 0.0) -> int:
    """pause_s: the client reads nothing for so long after the first bytes."""
    num_events, tail = 0, b""
    with http.stream("POST", path, content=content, headers={"Content-Type": "application/json"}) as response:
        assert response.status_code == 200
        for part in response.iter_raw():
            num_events += (tail + part).count(EVENT)
            tail = (tail + part)[1 - len(EVENT) :]  # the mark may be cut
            time.sleep(pause_s)
            pause_s = 0.0
    return num_events


def many_choices(http: httpx.Client, share: float) -> None:
    count = int(65_536 * share)
    assert count_events(http, "/v1/chat/completions", chat(n=count, stream=True)) == 2 * count + 1


def many_whole_choices(http: httpx.Client, share: float) -> None:
    count = int(65_536 * share)
    answer = post(http, "/v1/completions", completion(n=count))
    assert answer.content.count(b'"index":') == count


def late_reader_with_logprobs(http: httpx.Client, share: float) -> None:
    content = chat(max_tokens=int(20_000 * share), logprobs=True, top_logprobs=NUM_TOP, stream=True)
    assert count_events(http, "/v1/chat/completions", content, pause_s=2) > 2


def long_stop_strings(http: httpx.Client, _share: float) -> None:
    stops = ["a" * (1000 + number) + "b" for number in range(16)]
    assert count_events(http, "/v1/completions", completion(max_tokens=40_000, stop=stops, stream=True)) > 2


def text_of_special_tokens(http: httpx.Client, _share: float) -> None:
    content = chat(messages=[{"role": "user", "content": "<|im_end|>" * 400_000}])
    answer = post(http, "/v1/chat/completions", content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def long_text_of_special_tokens_within_the_first_bound(http: httpx.Client, _share: float) -> None:
    content = chat(messages=[{"role": "user", "content": "<|im_start|>" * 33_000}])
    assert post(http, "/v1/chat/completions", content).status_code == 400


def many_token_ids(http: httpx.Client, _share: float) -> None:
    prompts = [[97 + number % 20 for number in range(9_000)]] * 110
    answer = post(http, "/v1/completions", completion(prompt=prompts))
    assert answer.status_code == 200


def largest_bodies(http: httpx.Client, _share: float) -> None:
    for unit in (b"[],", b"12345,", b'"a":1,'):
        content = b'{"prompt":[' + unit * (60_000_000 // len(unit)) + b"1]}"
        answer = post(http, "/v1/completions", content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    content = b'{"model":"default","max_tokens":1,"prompt":"' + b"a" * 60_000_000 + b'"}'
    assert post(http, "/v1/completions", content).status_code == 400


def largest_texts_to_tokenize(http: httpx.Client, _share: float) -> None:
    content = orjson.dumps({"prompt": "hello world " * 87_000})
    assert post(http, "/tokenize", content).status_code == 200
    answer = post(http, "/tokenize", orjson.dumps({"prompt": "hello world " * 1_700_000}))
    assert answer.status_code == 400
    assert "at most 1048576 characters" in answer.json()["error"]["message"]


def many_messages(http: httpx.Client, _share: float) -> None:
    """Four at a time; a request of one token is answered before them."""
    content = chat(messages=[{"role": "user", "content": "a"}] * 60_000)
    with ThreadPoolExecutor(4) as threads:
        large = [threads.submit(post, http, "/v1/chat/completions", content) for _ in range(4)]
        time.sleep(0.5)
        started = time.perf_counter()
        assert post(http, "/v1/chat/completions", chat()).status_code == 200
        small_s = time.perf_counter() - started
        assert not all(one.done() for one in large)
        assert small_s < 4 * MAX_SECONDS, small_s  # once only: the machine may stop for a second or two
        assert {one.result().status_code for one in large} == {400}


def long_line_of_a_bulk_body(http: httpx.Client, _share: float) -> None:
    line = b'{"custom_id":"1","url":"/v1/completions","body":' + completion() + b"}\n"
    content = line + b"x" * 60_000_000 + b"\n" + line.replace(b'"1"', b'"2"')
    answer = http.post("/v1/bulk", content=content, headers={"Content-Type": "application/x-ndjson"})
    codes = [orjson.loads(result)["response"]["status_code"] for result in answer.content.splitlines()]
    assert sorted(codes) == [200, 200, 413]


LOADS: list[Callable[[httpx.Client, float], None]] = [
    many_choices,
    many_whole_choices,
    late_reader_with_logprobs,
    long_stop_strings,
    text_of_special_tokens,
    long_text_of_special_tokens_within_the_first_bound,
    many_token_ids,
    largest_bodies,
    largest_texts_to_tokenize,
    many_messages,
    long_line_of_a_bulk_body,
]
