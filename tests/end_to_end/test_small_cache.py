"""Servers in float32 whose KV cache is so small that sequences are preempted all the time, against a large cache."""

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
    ask_with_much_room,
    assert_all_done_and_counted,
    assert_tokens_are_the_best,
    num_parted,
)
from tests.end_to_end.helpers.toka_process import running_toka, wait_for
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tokasaurus.text.tokenizer import Tokenizer

QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "data" / "gsm8k_test_200.jsonl"

# Each answer is expected to end after a fiftieth of max_tokens, and nothing is learnt from those that do not: far more
# sequences are admitted than the cache can hold to their ends.
SMALL = (*FLAGS, "kv_cache_num_tokens=640", "early_stopping_init_mean=0.02", "early_stopping_initial_wait=1000000")
MODES = [
    (),
    ("deferred_tasks=always", "scheduling_steps_ahead=1"),
    ("deferred_tasks=deferred", "greedy_prefill=F"),
]


def make_bodies(num_bodies: int, stop: list[str]) -> list[dict[str, Any]]:
    """Greedy and seeded, of 1 to 3 samples, with and without stop strings and log-probabilities, of many lengths."""
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
    """Random weights: many more sequences in the same time."""
    directory = tmp_path_factory.mktemp("tiny")
    oracle = save_tiny_model(directory, "qwen3")
    name_every_token(directory / "tokenizer.json")
    # Prompts have about a hundred tokens: most steps cut one, and several prompts are under way.
    flags = (f"model={directory}", "max_tokens_per_forward=48")
    return ask_with_much_room(flags, Tokenizer.load(directory), oracle, make_bodies(50, ["a", "1", "(", "Q", "z"]))


def name_every_token(path: Path) -> None:
    """The tiny model has tokens without a text, which could not be told apart in an answer."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<unused {number}>" for number in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(path))


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> Expected:
    found: Expected = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("expected", ["demo", "tiny"], indirect=True)
def test_the_large_cache_gives_the_tokens_of_transformers_greedy_and_drawn(expected: Expected) -> None:
    """So what the small caches are compared with is right, and so are the scores by which texts may part."""
    assert_tokens_are_the_best(expected, itertools.chain(*expected.samples[:8]))


@pytest.mark.parametrize(
    ("expected", "mode"), [("demo", ()), *(("tiny", mode) for mode in MODES)], indirect=["expected"]
)
def test_a_cache_that_is_far_too_small_changes_no_token(expected: Expected, mode: tuple[str, ...]) -> None:
    num_sequences = sum(map(len, expected.samples))
    with running_toka(*SMALL, *expected.flags, *mode) as toka:
        answers = ask_all_at_once(toka, [samples[0].body for samples in expected.samples])
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") >= num_sequences / 3
        assert toka.gauge("toka_recomputed_tokens_total") > 0
        assert toka.stop() == 0
    assert num_parted(expected, answers) <= 2, "ties are rare"


@pytest.mark.parametrize("expected", ["tiny"], indirect=True)
def test_clients_that_go_away_change_no_token_of_those_that_share_their_blocks(expected: Expected) -> None:
    rng = random.Random(0)
    with running_toka(*SMALL, *expected.flags) as toka:
        bodies = [samples[0].body for samples in expected.samples]
        # About when they are admitted: some wait still, some prefill, some decode.
        leave_after = [max(1, place + rng.randint(-8, 0)) for place in range(len(bodies))]
        answers = ask_all_at_once(toka, bodies, leave_after)
        wait_for(lambda: toka.gauge("toka_requests_running") + toka.gauge("toka_requests_waiting") == 0, timeout_s=5)
        assert toka.gauge("toka_kv_blocks_used") == 0
        generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert toka.gauge("toka_generation_tokens_total") > generated, "some of them had begun"
        assert toka.stop() == 0
    assert num_parted(expected, answers) <= 2, "ties are rare"


@pytest.mark.parametrize("expected", ["demo", "tiny"], indirect=True)
def test_the_samples_cover_what_they_should(expected: Expected) -> None:
    samples = list(itertools.chain(*expected.samples))
    assert len(samples) >= 36
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    asked = [sample for sample in samples if "stop" in sample.body]
    assert sum(sample.finish_reason == "stop" for sample in asked) >= 3
    assert not any(stop in sample.text for sample in asked for stop in sample.body["stop"])
    assert len({sample.text for sample in samples if sample.body["temperature"]}) > 12
