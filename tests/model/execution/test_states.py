"""Layers with states beside transformers, in float32: prompts in chunks of any size, from snapshots, and in batches."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.tiny_model import OPTIONS, VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.steps import CPU, NOTHING, StepDriver, int32, make_runner, one_thread
from tokasaurus.checkpoint.families.states import FAMILIES
from tokasaurus.messages.forward import ForwardInput, SlotChanges, StateSaves
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.state_math import CHUNK, Rows, recur
from tokasaurus.model.decoder.state_rows import ZEROS, Segments, segments_of
from tokasaurus.model.execution.runner import ModelRunner

NUM_SNAPSHOTS = 8
PROMPT = torch.randint(VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(1)).tolist()


class Model:
    """A family's random model, and what transformers computes of it."""

    def __init__(self, family: str, directory: Path) -> None:
        self.oracle: PreTrainedModel = save_random_model(directory, option_config(family, 0))
        self.decoder, self.info = load(directory, packed=True)

    def driver(self, num_slots: int = 20, num_blocks: int = 200) -> tuple[StepDriver, ModelRunner]:
        sizes = {"num_blocks": num_blocks, "num_slots": num_slots, "num_snapshots": NUM_SNAPSHOTS}
        runner = make_runner(self.decoder, self.info, None, **sizes)
        return StepDriver(runner, num_blocks=num_blocks), runner

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token but the first, after those before it."""
        with torch.inference_mode():
            logprobs = self.oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).flatten().tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with one_thread():
        yield Model(request.param, tmp_path_factory.mktemp(request.param))


def prefill(driver: StepDriver, slot: int, size: int) -> list[float]:
    """The rest of the slot's prompt, in chunks of this size -> the logprobs of its tokens."""
    found = []
    while count := min(size, driver.remaining(slot)):
        driver.run([], [(slot, count)])
        found += [each.logprob for each in driver.logprobs_by_slot[slot]]
    return found


def test_every_family_with_states_has_options() -> None:
    assert set(FAMILIES) <= set(OPTIONS)


def test_prompts_in_chunks_of_every_size_equal_transformers(model: Model) -> None:
    driver, _ = model.driver(num_slots=80, num_blocks=800)
    expected, token = model.logprobs(PROMPT), oracle_greedy(model.oracle, PROMPT, 1)[0][0]
    tokens, _ = oracle_greedy(model.oracle, [*PROMPT, token], 1)
    for size in range(1, 71):
        driver.open(size, PROMPT, num_prompt_top=0)
        assert prefill(driver, size, size) == pytest.approx(expected, abs=1e-4), size
        assert driver.run([size], [])[size][0] == tokens[0]


def test_a_zeroed_state_changes_what_follows(model: Model) -> None:
    """So that the other tests would notice."""
    driver, runner = model.driver()
    expected = model.logprobs(PROMPT)
    driver.open(1, PROMPT, num_prompt_top=0)
    driver.run([], [(1, 64)])
    states = runner._model.states
    assert states is not None
    for layer in range(len(states)):
        states.memory(layer)[1].zero_()
    found = prefill(driver, 1, 100)
    assert max(abs(np.subtract(found, expected[64:]))) > 0.01


def test_slots_that_start_from_snapshots_equal_transformers(model: Model) -> None:
    """Saved within chunks and at their ends, several of one chunk, beside a decoding sequence; the end differs."""
    driver, _ = model.driver()
    driver.open(1, PROMPT[:40])
    driver.run([], [(1, 40)])
    driver.open(2, PROMPT)
    driver.run([1], [(2, 20)], saves=[(0, 16, 1)])
    driver.run([1], [(2, 76)], saves=[(0, 12, 2), (0, 60, 3), (0, 76, 4)])
    driver.run([1], [(2, 54)])
    for slot, (snapshot, num_tokens) in enumerate([(1, 16), (2, 32), (3, 80), (4, 96), (3, 80)], start=3):
        ids = PROMPT[:num_tokens] + PROMPT[slot : slot + 50]
        driver.open(slot, ids, shares=(2, num_tokens // 16), snapshot=snapshot, num_prompt_top=0)
        found = prefill(driver, slot, 7 * slot)
        assert found == pytest.approx(model.logprobs(ids)[num_tokens:], abs=1e-4), (slot, snapshot)
        tokens, logprobs = oracle_greedy(model.oracle, [*ids, *oracle_greedy(model.oracle, ids, 1)[0]], 1)
        assert driver.run([slot], [])[slot] == (tokens[0], pytest.approx(logprobs[0], abs=1e-4))


def test_batches_with_snapshots_equal_sequences_alone(model: Model) -> None:
    """Random chunks of several prompts, with random saves, from which others start in the same step."""
    rng, (driver, _) = random.Random(3), model.driver()
    prompts = {slot: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 120))] for slot in range(1, 7)}
    found: dict[int, list[float]] = {slot: [] for slot in prompts}
    for slot, prompt in prompts.items():
        driver.open(slot, prompt, num_prompt_top=0)
    decoding: list[int] = []
    while running := [slot for slot in prompts if driver.remaining(slot)]:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        chunks = [(slot, rng.randint(1, min(40, driver.remaining(slot)))) for slot in chosen]
        snapshots = rng.sample(range(1, NUM_SNAPSHOTS + 1), NUM_SNAPSHOTS)
        saves = []
        for index, (_, count) in enumerate(chunks):
            for place in sorted(rng.sample(range(1, count + 1), min(count, rng.randint(0, 2), len(snapshots)))):
                saves.append((index, place, snapshots.pop()))
                if not snapshots:
                    break
        driver.run(decoding, chunks, saves=saves)
        for slot in chosen:
            found[slot] += [each.logprob for each in driver.logprobs_by_slot[slot]]
        decoding = [slot for slot in prompts if not driver.remaining(slot)][:3]
    for slot, prompt in prompts.items():
        assert found[slot] == pytest.approx(model.logprobs(prompt), abs=1e-4)


def test_a_state_that_is_not_finite_stays_within_its_sequence(model: Model) -> None:
    driver, runner = model.driver()
    for slot in (1, 2):
        driver.open(slot, PROMPT[:64], num_prompt_top=0)
    driver.run([], [(1, 20), (2, 20)])
    states = runner._model.states
    assert states is not None
    for layer in range(len(states)):
        states.memory(layer)[1] = torch.nan
    driver.run([], [(1, 44), (2, 44)])
    assert np.isnan(driver.logprobs_by_slot[1][0].logprob)
    found = [each.logprob for each in driver.logprobs_by_slot[2]]
    assert found == pytest.approx(model.logprobs(PROMPT[:64])[20:], abs=1e-4)
    driver.close(1)
    driver.open(1, PROMPT[:64], num_prompt_top=0)
    assert prefill(driver, 1, 30) == pytest.approx(model.logprobs(PROMPT[:64]), abs=1e-4)


def test_segments_are_chains_from_snapshot_to_snapshot() -> None:
    saves = StateSaves(int32([1, 1, 3]), int32([4, 10, 5]), int32([7, 2, 1]))
    counts = int32([1, 10, 6, 8])
    changes = SlotChanges(NOTHING, None, NOTHING, NOTHING)
    step = ForwardInput(1, int32([5, 3, 2, 4]), counts, 1, int32(range(24)), changes, saves=saves)
    segments = segments_of(step, int32([5, ZEROS, 2, 19]), num_slots=10)
    columns = segments.starts, segments.num_tokens, segments.sources, segments.targets
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (0, 1, 5, 5),
        *((1, 4, ZEROS, 16), (5, 6, 16, 11), (11, 0, 11, 3)),
        (11, 6, 2, 2),
        *((17, 5, 19, 10), (22, 3, 10, 4)),
    ]
    assert segments.chains.tolist() == [0, 1, 4, 5, 7]


@pytest.mark.parametrize("has_rate", [True, False])
def test_chunks_equal_the_recurrence_in_float64(has_rate: bool) -> None:
    """With decays from nearly none to nearly all."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, heads, size, value_size = 3 * CHUNK + 5, 3, 8, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = normal(num_tokens, heads, size), normal(num_tokens, heads, size), normal(num_tokens, heads, 5)
    key = torch.nn.functional.normalize(key, dim=-1)
    decay = -(normal(num_tokens, heads) * 3 - 3).exp()
    rate = normal(num_tokens, heads).sigmoid() if has_rate else None
    start = normal(heads, size, value_size)
    memory = torch.stack((torch.zeros_like(start), start))
    segments = Segments.of_prompt(num_tokens, target=1, source=1)
    found = recur(Rows(query, key, value, decay, rate), memory, segments)
    state = start.double()
    for token in range(num_tokens):
        state = state * decay[token].double().exp()[:, None, None]
        taught = value[token].double()
        if rate is not None:
            taught = (taught - torch.einsum("hkv,hk->hv", state, key[token].double())) * rate[token].double()[:, None]
        state = state + torch.einsum("hk,hv->hkv", key[token].double(), taught)
        expected = torch.einsum("hkv,hk->hv", state, query[token].double())
        torch.testing.assert_close(found[token].double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(memory[1].double(), state, atol=1e-4, rtol=1e-4)


def test_memory_is_as_large_as_is_counted(model: Model) -> None:
    from tokasaurus.model.buffer_sizes import state_bytes

    assert isinstance(model.decoder, Decoder)
    states = model.decoder.states
    assert states is not None
    states.allocate(3, CPU)
    total = sum(states.memory(layer).nbytes for layer in range(len(states)))
    assert total == 3 * state_bytes(model.info.spec.layers, 1) > 0
