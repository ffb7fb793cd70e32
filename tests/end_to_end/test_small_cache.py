"""Servers in float32 with a KV cache so small that preemption is constant, compared with a large cache."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.end_to_end.helpers.expected_texts import (
    FLAGS,
    Expected,
    ask_all_at_once,
    ask_demo_model,
    ask_large_cache_server,
    assert_all_done_and_counted,
    assert_tokens_match_oracle,
    num_diverged,
)
from tests.end_to_end.helpers.toka_process import running_toka, wait_for
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tokasaurus.commands.bench.workloads import DATA
from tokasaurus.text.tokenizer import Tokenizer

QUESTIONS = DATA / "gsm8k_test_200.jsonl"

# Each answer is expected to end after 1/50 of max_tokens, and the length predictor never learns from finished
# sequences: far more sequences are admitted than the cache can hold until they finish.
SMALL = (*FLAGS, "kv_cache_num_tokens=640", "early_stopping_init_mean=0.02", "track_early_stopping=F")
MODES = [
    (),
    ("scheduling_steps_ahead=1",),
    ("greedy_prefill=F",),
]
MODELS = ["tiny", pytest.param("demo", marks=pytest.mark.long)]


def make_bodies(num_bodies: int, stop: list[str]) -> list[dict[str, Any]]:
    """Greedy and seeded bodies of many lengths, with 1 to 3 samples, with and without stop strings and logprobs."""
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[:num_bodies]]
    bodies: list[dict[str, Any]] = []
    for number, question in enumerate(questions):
        last_sentence = question.rsplit(". ", maxsplit=1)[-1]
        body: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "system", "content": "Explain."}, {"role": "user", "content": last_sentence}],
            "max_tokens": 60 + number * 17 % 41,
            "temperature": number % 2,
            "seed": number,
            "n": 1 + number // 2 % 3,
        }
        if number % 5 == 1:
            body["stop"] = stop
        if number % 4 < 2:
            body["logprobs"] = True
        bodies.append(body)
    return bodies


@pytest.fixture(scope="module")
def demo() -> Expected:
    return ask_demo_model(("max_tokens_per_forward=256",), make_bodies(20, [".\n", " = ", "how many"]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A tiny model with random weights, which runs many more sequences in the same time."""
    directory = tmp_path_factory.mktemp("tiny")
    oracle = save_tiny_model(directory, "qwen3")
    name_every_token(directory / "tokenizer.json")
    # Prompts have about a hundred tokens: most steps split one, and several are in prefill at once.
    flags = (f"model={directory}", "max_tokens_per_forward=48")
    return ask_large_cache_server(
        flags, Tokenizer.load(directory), oracle, make_bodies(36 if IS_NIGHTLY else 14, ["a", "1", "(", "Q", "z"])
    )


def name_every_token(path: Path) -> None:
    """Gives each of the tiny model's tokens without a text a unique one, so that answers identify every token."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<unused {number}>" for number in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(path))


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> Expected:
    found: Expected = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("expected", MODELS, indirect=True)
@pytest.mark.long
def test_large_cache_tokens_match_transformers_greedy_and_sampled(expected: Expected) -> None:
    """Checks the answers that the small caches are compared with, and the logits that define ties."""
    assert_tokens_match_oracle(expected, itertools.chain(*expected.samples[:8]))


@pytest.mark.parametrize(
    ("expected", "mode"),
    [
        ("tiny", MODES[1]),
        *(pytest.param("tiny", mode, marks=pytest.mark.long) for mode in (MODES[0], MODES[2])),
        pytest.param("demo", (), marks=pytest.mark.long),
    ],
    indirect=["expected"],
)
def test_constant_preemption_in_a_small_cache_changes_no_token(expected: Expected, mode: tuple[str, ...]) -> None:
    num_sequences = sum(map(len, expected.samples))
    with running_toka(*SMALL, *expected.flags, *mode) as toka:
        answers = ask_all_at_once(toka, [samples[0].body for samples in expected.samples])
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") >= num_sequences / 3
        assert toka.gauge("toka_recomputed_tokens_total") > 0
        assert toka.stop() == 0
    assert num_diverged(expected, answers) <= 2, "ties are rare"


@pytest.mark.long
@pytest.mark.parametrize("expected", ["tiny"], indirect=True)
def test_disconnecting_clients_change_no_token_of_requests_sharing_their_blocks(expected: Expected) -> None:
    rng = random.Random(0)
    with running_toka(*SMALL, *expected.flags) as toka:
        bodies = [samples[0].body for samples in expected.samples]
        # Clients disconnect near admission: some requests are still waiting, some prefill, some decode.
        disconnect_after = [max(1, index + rng.randint(-8, 0)) for index in range(len(bodies))]
        answers = ask_all_at_once(toka, bodies, disconnect_after)
        wait_for(lambda: toka.gauge("toka_requests_running") + toka.gauge("toka_requests_waiting") == 0, timeout_s=60)
        assert toka.gauge("toka_kv_blocks_used") == 0
        generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert toka.gauge("toka_generation_tokens_total") > generated, "some disconnected requests had generated tokens"
        assert toka.stop() == 0
    assert num_diverged(expected, answers) <= 2, "ties are rare"


@pytest.mark.parametrize("expected", MODELS, indirect=True)
def test_expected_samples_cover_stop_strings_both_finish_reasons_and_sampling(expected: Expected) -> None:
    samples = list(itertools.chain(*expected.samples))
    assert len(samples) >= (36 if IS_NIGHTLY else 20)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    with_stop = [sample for sample in samples if "stop" in sample.body]
    assert sum(sample.finish_reason == "stop" for sample in with_stop) >= 3
    assert not any(stop in sample.text for sample in with_stop for stop in sample.body["stop"])
    assert len({sample.text for sample in samples if sample.body["temperature"]}) > (12 if IS_NIGHTLY else 8)
