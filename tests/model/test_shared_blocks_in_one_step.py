"""Rows that read blocks which another row of the same forward fills."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.examples import few
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.steps import StepDriver, make_runner

BACKENDS = ["reference", "torch", "cpu"]
NUM_DECODED = 4


@dataclass
class Completion:
    """A slot's prompt and sampling parameters, and the tokens that it sampled."""

    prompt: list[int]
    temperature: float
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Batch:
    """Completions by slot, on a driver with an empty KV cache."""

    def __init__(self, new_driver: Callable[[], StepDriver]) -> None:
        self._new_driver = new_driver
        self._driver = new_driver()
        self.completions: dict[int, Completion] = {}

    def open(
        self, prompt: list[int], temperature: float = 0.0, sample: int = 0, shares: tuple[int, int] | None = None
    ) -> int:
        """shares: (slot, blocks). -> the new slot."""
        slot = len(self.completions) + 1
        self.completions[slot] = Completion(prompt, temperature, sample)
        self._driver.open(slot, prompt, temperature, seed=5, sample=sample, shares=shares)
        return slot

    def run(self, decode: list[int], prefill: list[tuple[int, int]]) -> None:
        for slot, (token, logprob) in self._driver.run(decode, prefill).items():
            assert logprob is not None
            self.completions[slot].tokens.append(token)
            self.completions[slot].logprobs.append(logprob)

    def remaining(self, slot: int) -> int:
        return self._driver.remaining(slot)

    def decode_all(self) -> None:
        for _ in range(NUM_DECODED):
            self.run(sorted(self.completions), [])

    def assert_as_if_alone(self) -> None:
        """Each sequence has the tokens and logprobs that it has alone, in a KV cache and steps of its own."""
        for shared in self.completions.values():
            alone = Batch(self._new_driver)
            alone.open(shared.prompt, shared.temperature, shared.sample)
            alone.run([], [(1, len(shared.prompt))])
            for _ in shared.tokens[1:]:
                alone.run([1], [])
            assert shared.tokens == alone.completions[1].tokens
            assert shared.logprobs == pytest.approx(alone.completions[1].logprobs, abs=1e-4)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_driver(backend: str, tmp_path: Path) -> Callable[[], StepDriver]:
    save_tiny_model(tmp_path, "qwen3")
    model, info = load(tmp_path)
    return lambda: StepDriver(make_runner(model, info, backend))


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@few(2, "num_tokens", [17, 48, 33, 90])
def test_samples_of_a_prompt_start_in_the_step_that_computes_it(
    num_tokens: int, new_driver: Callable[[], StepDriver]
) -> None:
    """All samples but the first compute only their last block and read the others, which the first row fills."""
    prompt = random_tokens(random.Random(num_tokens), num_tokens)
    num_shared = (num_tokens - 1) // 16
    batch = Batch(new_driver)
    first = batch.open(prompt)
    others = [batch.open(prompt, 1.0, sample, (first, num_shared)) for sample in range(1, 5)]
    batch.run([], [(first, num_tokens), *((slot, num_tokens - 16 * num_shared) for slot in others)])
    batch.decode_all()
    assert len({tuple(completion.tokens) for completion in batch.completions.values()}) == 5
    batch.assert_as_if_alone()


@few(2, "first_chunk", [16, 40, 1, 23, 77])
def test_samples_start_in_the_step_with_the_last_chunk_of_their_prompt(
    first_chunk: int, new_driver: Callable[[], StepDriver]
) -> None:
    """Two steps fill the shared blocks, the second in the same forward; another sequence decodes meanwhile."""
    rng = random.Random(first_chunk)
    prompt = random_tokens(rng, 78)
    batch = Batch(new_driver)
    decoding = batch.open(random_tokens(rng, 20))
    first = batch.open(prompt)
    batch.run([], [(decoding, 20), (first, first_chunk)])
    others = [batch.open(prompt, temperature, sample, (first, 4)) for temperature, sample in ((0.0, 1), (1.0, 2))]
    batch.run([decoding], [(first, 78 - first_chunk), *((slot, 14) for slot in others)])
    batch.decode_all()
    batch.assert_as_if_alone()


@few(2, "seed", range(6))
def test_a_row_reads_blocks_of_several_rows_before_it(seed: int, new_driver: Callable[[], StepDriver]) -> None:
    """Each prompt shares some whole blocks with a random earlier one, so that a chain of rows fills the blocks that the
    last row reads. Steps prefill the prompts in order, and the last chunk of a step may end anywhere."""
    rng = random.Random(seed)
    batch = Batch(new_driver)
    batch.open(random_tokens(rng, rng.randint(17, 60)))
    for sample in range(1, 7):
        other = rng.randint(1, sample)
        prompt = batch.completions[other].prompt
        num_shared = rng.randint(0, len(prompt) // 16)
        longer = prompt[: num_shared * 16] + random_tokens(rng, rng.randint(1, 40))
        batch.open(longer, rng.choice([0.0, 1.0]), sample, (other, num_shared))
    prefilling = sorted(batch.completions)
    while prefilling:
        budget = rng.randint(1, 160)
        chunks = []
        for slot in prefilling:
            chunks.append((slot, min(budget, batch.remaining(slot))))
            budget -= chunks[-1][1]
            if budget == 0:
                break
        batch.run([], chunks)
        prefilling = [slot for slot in prefilling if batch.remaining(slot)]
    batch.decode_all()
    batch.assert_as_if_alone()


def test_shared_greedy_samples_have_the_tokens_of_transformers(backend: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    prompt = random_tokens(random.Random(2), 50)
    batch = Batch(lambda: StepDriver(make_runner(model, info, backend)))
    first = batch.open(prompt)
    others = [batch.open(prompt, sample=sample, shares=(first, 3)) for sample in range(1, 4)]
    batch.run([], [(first, 50), *((slot, 2) for slot in others)])
    batch.decode_all()
    expected, logprobs = oracle_greedy(oracle, prompt, 1 + NUM_DECODED)
    for completion in batch.completions.values():
        assert completion.tokens == expected
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
