"""Requests that use all kinds of sampling at once, of the models of tests/helpers/tiny_model, and their comparison."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.examples import IS_NIGHTLY

SHARED = "Every question begins with these words, which fill more than two blocks. "
"""The beginning of most prompts."""

# A sequence that may end early is expected to do so where lengths are underestimated, so all samples are admitted
# together; none does end early. Without the stop string, all would be known to use all their tokens, and would be
# admitted in turns.
PLAIN = {
    "temperature": 0,
    "n": 10,
    "max_tokens": 64 if IS_NIGHTLY else 40,
    "ignore_eos": True,
    "stop": ["a text that no sample has"],
}
GREEDY = {"temperature": 0, "logprobs": 3}
SEEDED = {"temperature": 1, "seed": 7, "logprobs": 2}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, in chunks": {**GREEDY, "prompt": SHARED * 4},
    "greedy samples": {**GREEDY, "n": 6},
    "without logprobs": {"temperature": 0},
    "seeded": {**SEEDED, "n": 4},
    "seeded, with limits": {**SEEDED, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "n": 2},
    "penalties": {**GREEDY, **PENALTIES},
    "seeded, with penalties": {**SEEDED, **PENALTIES, "n": 2},
    "sampled logprobs": {**SEEDED, **PENALTIES, "temperature": 0.7, "top_k": 40, "logprobs_mode": "sampled", "n": 2},
    "sampled logprobs, temperature alone": {**SEEDED, "temperature": 0.7, "logprobs_mode": "sampled"},
    "bias": {**GREEDY, "logit_bias": {"65": 5, "66": -100}, "min_tokens": 5},
    "grammar": {**GREEDY, "guided_regex": "(ab|cd|e[0-9]+f)+"},
    "seeded, with a grammar": {**SEEDED, "guided_regex": "[a-z ]+[0-9]{3}"},
    "prompt logprobs": {**GREEDY, "prompt": SHARED * 2, "prompt_logprobs": 2},
    "echo": {**GREEDY, "echo": True},
}


def mixed_bodies() -> list[dict[str, Any]]:
    """Two requests of each kind; one in `make test`."""
    return [
        {"model": "default", "prompt": f"{SHARED}{number}", "max_tokens": 16, "ignore_eos": True, **fields}
        for number in range(2 if IS_NIGHTLY else 1)
        for fields in KINDS.values()
    ]


def ask_mixed(toka: TokaProcess, num_threads: int = 8) -> list[dict[str, Any]]:
    """The answers to `mixed_bodies`, which are asked num_threads at a time."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(ask, mixed_bodies()))


def ask_plain(toka: TokaProcess) -> list[str]:
    """The texts of greedy requests that want nothing else of the model. The samples of each begin together, and outgrow
    a cache for 352 tokens if their lengths are underestimated: ten times four blocks, and those of the prompt, into 22.
    """
    numbers = range(2 if IS_NIGHTLY else 1)
    body = {"model": "default", "prompt": [f"{SHARED}{number}" for number in numbers], **PLAIN}
    answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def assert_same_answers(found: list[dict[str, Any]], expected: list[dict[str, Any]], max_diverged: int = 0) -> None:
    """Equal texts, tokens and ends; log-probabilities within 1e-4. max_diverged: texts that may differ; those of tiny
    models have no near ties."""
    num_diverged = 0
    for body, one, other in zip(mixed_bodies(), found, expected, strict=True):
        for choice, right in zip(one["choices"], other["choices"], strict=True):
            if choice["text"] != right["text"]:
                num_diverged += 1
                assert num_diverged <= max_diverged, (body, choice["text"], right["text"])
                continue
            assert choice["finish_reason"] == right["finish_reason"], body
            assert _numbers(choice) == pytest.approx(_numbers(right), abs=1e-4), body
        if num_diverged == 0:
            assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]


def _numbers(value: Any) -> list[float]:
    """All log-probabilities of a choice. Dictionaries by token are read in the order of their keys."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _numbers(value[key])]
    if isinstance(value, list):
        return [number for entry in value for number in _numbers(entry)]
    return [value] if isinstance(value, float) else []
