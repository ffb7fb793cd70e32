"""Many samples of a few questions after the same few-shot examples, in float32: prefix groups change no text."""

import itertools
from typing import Any

import pytest

from tests.end_to_end.helpers.expected_texts import (
    FLAGS,
    LARGE,
    Expected,
    ask_all_at_once,
    ask_demo_model,
    assert_all_done_and_counted,
    assert_tokens_match_oracle,
    details,
    num_diverged,
)
from tests.end_to_end.helpers.toka_process import running_toka
from tokasaurus.commands.bench.workloads import DATA, load_jsonl

PAGE_SIZE = 16
GROUPS = ("use_hydragen=T", "hydragen_min_group_size=2", f"hydragen_min_prefix_len={PAGE_SIZE}")
# One prompt takes more than half of the cache. Each answer is expected to end after 1/50 of max_tokens, and the length
# predictor never learns from finished sequences.
SMALL = (*FLAGS, "kv_cache_num_tokens=480", "early_stopping_init_mean=0.02", "track_early_stopping=F")

ASKED = [(0, 1, 10), (1, 1, 8), (2, 0, 6), (0, 0, 1), (1, 0, 1), (2, 1, 1)]
"""(question, temperature, number of samples) of each request. Greedy samples of one request are identical."""


def make_bodies() -> list[dict[str, Any]]:
    shots = load_jsonl(DATA / "gsm8k_train_8_shots.jsonl")[:2]
    few_shots = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
    questions = [line["question"] for line in load_jsonl(DATA / "gsm8k_test_200.jsonl")]
    return [
        {
            "model": "default",
            "messages": [{"role": "user", "content": f"{few_shots}Question: {questions[question]}\nAnswer:"}],
            "max_tokens": 40,
            "temperature": temperature,
            "seed": seed,
            "n": num_samples,
            **({"logprobs": True} if seed % 2 == 0 else {}),
        }
        for seed, (question, temperature, num_samples) in enumerate(ASKED)
    ]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return ask_demo_model(("use_hydragen=F",), make_bodies())


@pytest.mark.long
def test_without_prefix_groups_tokens_match_transformers_and_none_are_shared(expected: Expected) -> None:
    assert_tokens_match_oracle(expected, (samples[-1] for samples in expected.samples))
    assert [details(usage)["shared_tokens"] for usage in expected.usages] == [0] * len(ASKED)
    samples = list(itertools.chain(*expected.samples))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    assert len({sample.text for sample in samples}) > 16


@pytest.mark.long
def test_prefix_groups_change_no_token(expected: Expected) -> None:
    """Samples of a request share all whole blocks of the prompt, question included, while they decode."""
    bodies = make_bodies()
    with running_toka(*LARGE, *GROUPS) as toka:
        answers = ask_all_at_once(toka, bodies)
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") == 0
        assert toka.stop() == 0
    assert num_diverged(expected, answers) <= 2, "ties are rare"
    for body, answer in zip(bodies, answers, strict=True):
        num_in_blocks = (answer["usage"]["prompt_tokens"] - 1) // PAGE_SIZE * PAGE_SIZE
        assert details(answer["usage"])["shared_tokens"] == body["n"] * num_in_blocks


@pytest.mark.long
def test_prefix_groups_change_no_token_under_constant_preemption(expected: Expected) -> None:
    bodies = make_bodies()
    with running_toka(*SMALL, *GROUPS) as toka:
        answers = ask_all_at_once(toka, bodies)
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") >= sum(body["n"] for body in bodies) / 2
        assert toka.gauge("toka_recomputed_tokens_total") > 0
        assert toka.stop() == 0
    assert num_diverged(expected, answers) <= 2, "ties are rare"
    for body, answer in zip(bodies, answers, strict=True):
        if body["n"] > 1:
            assert details(answer["usage"])["shared_tokens"] > body["n"] * answer["usage"]["prompt_tokens"] / 2
