"""Servers in float32 whose KV cache is so small that sequences are put back all the time, against a large cache."""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.end_to_end.toka_process import TokaProcess, running_toka, wait_for
from tests.tiny_model import VOCAB_SIZE, save_tiny_model
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.model.sampling_noise import gumbel_noise, position_keys, sequence_keys
from tokasaurus.text.tokenizer import Tokenizer

QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "data" / "gsm8k_test_200.jsonl"
TIE = 1e-3
"""Two texts may part where the two best scores differ by less: float32 sums depend on the order of their terms."""

FLAGS = ("dtype=float32", "max_seqs_per_forward=64")
LARGE = (*FLAGS, "kv_cache_num_tokens=20000")
# Each answer is expected to end after a fiftieth of max_tokens, and nothing is learnt from those that do not: far more
# sequences are admitted than the cache can hold to their ends.
SMALL = (*FLAGS, "kv_cache_num_tokens=640", "early_stopping_init_mean=0.02", "early_stopping_initial_wait=1000000")
MODES = [
    (),
    ("optional_work=always", "scheduling_steps_ahead=1"),
    ("optional_work=deferred", "greedy_prefill=F"),
]


@dataclass(frozen=True)
class Sample:
    """One of the samples that a chat body asks for, as the server with the large cache gave it.

    token_ids: without the eos.
    """

    body: dict[str, Any]
    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Expected:
    """A model, the flags that serve it, transformers' copy of it, and the samples of each body."""

    flags: tuple[str, ...]
    tokenizer: Tokenizer
    oracle: PreTrainedModel
    samples: list[list[Sample]]

    def token_ids(self, choice: dict[str, Any]) -> list[int]:
        """Of a choice with log-probabilities."""
        ids = {self.tokenizer.token_bytes(token_id): token_id for token_id in range(self.tokenizer.vocab_size)}
        return [ids[bytes(token["bytes"])] for token in choice["logprobs"]["content"]]

    def scores(self, sample: Sample, num_tokens: int) -> torch.Tensor:
        """What each of the sample's first `num_tokens` tokens, and the one behind them, was the best of: float32
        [num_tokens + 1, V], the oracle's logits, with the sample's noise where it was drawn at temperature 1."""
        prompt_ids = self.tokenizer.encode_chat(sample.body["messages"])
        with torch.inference_mode():
            logits = self.oracle(torch.tensor([prompt_ids + sample.token_ids[:num_tokens]])).logits[0]
        logits = logits[len(prompt_ids) - 1 :]
        if not sample.body["temperature"]:
            return logits
        keys = sequence_keys(np.array([sample.body["seed"]], np.uint64), np.array([sample.index], np.uint32))
        positions = np.arange(len(prompt_ids), len(prompt_ids) + num_tokens + 1, dtype=np.int32)
        noise_keys = torch.from_numpy(position_keys(keys.repeat(len(positions)), positions).astype(np.int64))
        return logits + gumbel_noise(noise_keys, logits.shape[1])


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


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def ask_all_at_once(
    toka: TokaProcess, bodies: list[dict[str, Any]], leave_after: list[int] | None = None
) -> list[dict[str, Any]]:
    """The answers to `bodies`. leave_after: for each body, another client asks the same a moment before, and goes away
    when so many answers have come."""
    answers: list[dict[str, Any]] = [{}] * len(bodies)
    leaving: list[list[asyncio.Task[Any]]] = [[] for _ in range(len(bodies) + 1)]

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=toka.url, timeout=240) as client:
            num_answers = 0

            async def ask_for(place: int) -> None:
                nonlocal num_answers
                answers[place] = await ask(client, bodies[place])
                num_answers += 1
                for task in leaving[num_answers]:
                    task.cancel()

            tasks = []
            for place, body in enumerate(bodies):
                if leave_after is not None:
                    leaving[leave_after[place]].append(asyncio.create_task(ask(client, body)))
                tasks.append(asyncio.create_task(ask_for(place)))
            await asyncio.gather(*tasks)
            await asyncio.gather(*itertools.chain(*leaving), return_exceptions=True)

    asyncio.run(ask_all())
    return answers


def assert_all_done_and_counted(toka: TokaProcess, answers: list[dict[str, Any]]) -> None:
    for name in ("toka_kv_blocks_used", "toka_requests_running", "toka_requests_waiting"):
        assert toka.gauge(name) == 0, name
    for name, usage in (
        ("toka_generation_tokens_total", "completion_tokens"),
        ("toka_prompt_tokens_total", "prompt_tokens"),
    ):
        assert toka.gauge(name) == sum(answer["usage"][usage] for answer in answers), name


def ask_large_cache(
    flags: tuple[str, ...], tokenizer: Tokenizer, oracle: PreTrainedModel, bodies: list[dict[str, Any]]
) -> Expected:
    with running_toka(*LARGE, *flags) as toka:
        answers = ask_all_at_once(toka, [{**body, "logprobs": True} for body in bodies])
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") == 0
        assert toka.stop() == 0
    expected = Expected(flags, tokenizer, oracle, [])
    for body, answer in zip(bodies, answers, strict=True):
        expected.samples.append(
            [
                Sample(
                    body=body,
                    index=choice["index"],
                    text=choice["message"]["content"],
                    finish_reason=choice["finish_reason"],
                    token_ids=expected.token_ids(choice),
                    logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                )
                for choice in answer["choices"]
            ]
        )
    return expected


@pytest.fixture(scope="module")
def demo() -> Expected:
    """The demo model: real weights and text."""
    checkpoint = resolve_checkpoint(None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    return ask_large_cache(
        ("max_tokens_per_forward=256",), tokenizer, oracle, make_bodies(20, [".\n", " = ", "how many"])
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Random weights: many more sequences in the same time."""
    directory = tmp_path_factory.mktemp("tiny")
    oracle = save_tiny_model(directory, "qwen3")
    name_every_token(directory / "tokenizer.json")
    # Prompts have about a hundred tokens: most steps cut one, and several prompts are under way.
    flags = (f"model={directory}", "max_tokens_per_forward=48")
    return ask_large_cache(flags, Tokenizer.load(directory), oracle, make_bodies(50, ["a", "1", "(", "Q", "z"]))


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
    for sample in itertools.chain(*expected.samples[:8]):
        scores = expected.scores(sample, len(sample.token_ids))[:-1]
        chosen = scores.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        behind = (scores.max(dim=1).values - chosen).tolist()
        first = next((place for place, gap in enumerate(behind) if gap > 0), None)
        assert first is None or behind[first] < TIE, f"token {first} is {behind[first]} from the best"


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
        # About when their turn has come: some wait still, some prefill, some decode.
        leave_after = [max(1, place + rng.randint(-8, 0)) for place in range(len(bodies))]
        answers = ask_all_at_once(toka, bodies, leave_after)
        wait_for(lambda: toka.gauge("toka_requests_running") + toka.gauge("toka_requests_waiting") == 0, timeout_s=5)
        assert toka.gauge("toka_kv_blocks_used") == 0
        generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert toka.gauge("toka_generation_tokens_total") > generated, "some of them had begun"
        assert toka.stop() == 0
    assert num_parted(expected, answers) <= 2, "ties are rare"


def num_parted(expected: Expected, answers: list[dict[str, Any]]) -> int:
    """Samples whose text is another than it should be."""
    return sum(
        has_parted(expected, sample, choice)
        for samples, answer in zip(expected.samples, answers, strict=True)
        for sample, choice in zip(samples, answer["choices"], strict=True)
    )


def has_parted(expected: Expected, sample: Sample, choice: dict[str, Any]) -> bool:
    """Whether the choice is another than the sample, which it may be after a tie alone."""
    has_same_text = (choice["message"]["content"], choice["finish_reason"]) == (sample.text, sample.finish_reason)
    if "logprobs" in sample.body:
        token_ids = expected.token_ids(choice)
        num_agreed = common_prefix(sample.token_ids, token_ids)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs[:num_agreed] == pytest.approx(sample.logprobs[:num_agreed], abs=1e-4)
        if has_same_text:
            assert token_ids == sample.token_ids
    else:
        token_bytes = [expected.tokenizer.token_bytes(token_id) for token_id in sample.token_ids]
        num_same_bytes = common_prefix(b"".join(token_bytes), choice["message"]["content"].encode())
        num_agreed = sum(end <= num_same_bytes for end in itertools.accumulate(map(len, token_bytes)))
    if has_same_text:
        return False
    best = expected.scores(sample, num_agreed)[-1].topk(2).values
    assert best[0] - best[1] < TIE, f"texts part at token {num_agreed}, which is no tie"
    return True


def common_prefix(first: list[int] | bytes, second: list[int] | bytes) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


@pytest.mark.parametrize("expected", ["demo", "tiny"], indirect=True)
def test_the_samples_cover_what_they_should(expected: Expected) -> None:
    samples = list(itertools.chain(*expected.samples))
    assert len(samples) >= 36
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    asked = [sample for sample in samples if "stop" in sample.body]
    assert sum(sample.finish_reason == "stop" for sample in asked) >= 3
    assert not any(stop in sample.text for sample in asked for stop in sample.body["stop"])
    assert len({sample.text for sample in samples if sample.body["temperature"]}) > 12
