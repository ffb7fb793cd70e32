"""What a client sees of the prefix cache, and counters that are exact after each request."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.expected_texts import COUNTERS
from tests.end_to_end.toka_process import TokaProcess, running_toka
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.text.tokenizer import Tokenizer

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def toka() -> Iterator[TokaProcess]:
    with running_toka("dtype=float32", "kv_cache_num_tokens=8192", "max_tokens_per_forward=256") as process:
        yield process
        assert process.stop() == 0


def ask(toka: TokaProcess, route: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{toka.url}/v1/{route}", json={"model": "default", **fields}, timeout=60)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def common_prefix(first: list[int], second: list[int]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


@pytest.mark.parametrize("num_tokens", [16, 17, 48, 65])
def test_a_prompt_that_comes_again_is_cached_but_for_its_last_block(num_tokens: int, toka: TokaProcess) -> None:
    rng = random.Random(num_tokens)
    prompt = [rng.randrange(1000, 20000) for _ in range(num_tokens)]
    whole = (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    bodies = [{}, {}, {"n": 3}, {"cache_salt": "a"}, {"cache_salt": "b", "n": 2}, {"cache_salt": "a"}, {}]
    cached = [num_cached(ask(toka, "completions", prompt=prompt, max_tokens=2, **fields)) for fields in bodies]
    assert cached == [0, whole, whole, 0, 0, whole, whole]


def test_prompts_share_their_common_blocks(toka: TokaProcess) -> None:
    rng = random.Random(1)
    asked: list[list[int]] = []
    for _ in range(12):
        other = rng.choice(asked) if asked else []
        prompt = other[: rng.randint(0, len(other))] + [rng.randrange(20000, 40000) for _ in range(rng.randint(1, 40))]
        expected = max((common_prefix(prompt, before) for before in asked), default=0) // PAGE_SIZE * PAGE_SIZE
        expected = min(expected, (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE)
        # One token is sampled and its KV is never computed: the cache holds whole blocks of prompts alone.
        assert num_cached(ask(toka, "completions", prompt=prompt, max_tokens=1)) == expected
        asked.append(prompt)


def test_the_second_turn_of_a_chat_finds_the_first_prompt_and_answer_cached(toka: TokaProcess) -> None:
    tokenizer = Tokenizer.load(resolve_checkpoint(None).tokenizer_directory)
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse and two cats."}]
    first = ask(toka, "chat/completions", messages=messages, max_tokens=75, temperature=0)
    reply = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    second = ask(toka, "chat/completions", messages=messages, max_tokens=5, temperature=0)
    num_known = first["usage"]["total_tokens"]
    before = tokenizer.encode_chat(messages[:1]) + tokenizer.encode(reply, add_special_tokens=False)
    assert (first["choices"][0]["finish_reason"], len(before)) == ("length", num_known)
    assert common_prefix(before, tokenizer.encode_chat(messages)) == num_known
    # The KV of the last token of the answer is never computed.
    assert num_cached(second) == (num_known - 1) // PAGE_SIZE * PAGE_SIZE
    assert num_cached(second) > first["usage"]["prompt_tokens"]


def test_counters_are_exact_after_each_request(toka: TokaProcess) -> None:
    story = {"messages": [{"role": "user", "content": "Count to three."}], "max_tokens": 25}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "One, two,", "max_tokens": 7, "temperature": 0}),
        ("completions", {"prompt": ["One, two,", "A, B,"], "max_tokens": 12, "n": 3}),
        ("completions", {"prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40, "stop": " 9"}),
        ("chat/completions", {**story, "temperature": 0}),
        ("chat/completions", {**story, "n": 4, "seed": 3}),
    ]
    totals = {name: toka.gauge(name) for name in COUNTERS}
    finish_reasons: set[str] = set()
    for route, fields in bodies:
        answer = ask(toka, route, **fields)
        finish_reasons |= {choice["finish_reason"] for choice in answer["choices"]}
        for name, count in COUNTERS.items():
            totals[name] += count(answer["usage"], fields.get("n", 1))
            assert toka.gauge(name) == totals[name], (name, fields)
        for name in ("toka_kv_blocks_used", "toka_requests_running", "toka_requests_waiting"):
            assert toka.gauge(name) == 0, (name, fields)
    assert finish_reasons == {"stop", "length"}
