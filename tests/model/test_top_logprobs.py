"""Top-k logprobs of sampled tokens, against plain torch and against transformers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.sampling_rows import make_rows, noise_keys, top_rows
from tests.model.helpers.steps import CPU, NOTHING, StepDriver, int32, make_runner, open_greedy
from tokasaurus.messages.forward import SlotChanges
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.sampling.sample import Sampled, sample


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return None if request.param == "torch" else load_kernels()


def sample_with_top(logits: torch.Tensor, rows: list[int], count: int, kernels: Kernels | None) -> Sampled:
    """Every other row is greedy."""
    num_rows = len(logits)
    keys = noise_keys([1] * num_rows, [0] * num_rows, list(range(num_rows)))
    plain = make_rows([0.0, 0.8] * (num_rows // 2), [1.0] * num_rows, keys)
    return sample(logits, dataclasses.replace(plain, top=top_rows(rows, count)), kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "count"), [(7, 7), (1003, 1), (5001, 20), (300, 299)])
def test_top_logprobs_equal_log_softmax(
    vocab_size: int, count: int, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    logits = (torch.randn(150, vocab_size, generator=torch.Generator().manual_seed(count)) * 3).to(dtype)
    rows = list(range(1, 150, 3))
    sampled = sample_with_top(logits, rows, count, kernels)
    expected = logits.double().log_softmax(dim=-1)[rows]
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    torch.testing.assert_close(sampled.top_logprobs.double(), expected.topk(count).values, atol=3e-6, rtol=1e-5)
    # bfloat16 logits are often equal, so values are compared, not ids
    by_ids = expected.gather(1, sampled.top_ids.long())
    torch.testing.assert_close(sampled.top_logprobs.double(), by_ids, atol=3e-6, rtol=1e-5)
    assert all(len(set(ids)) == count for ids in sampled.top_ids.tolist())


def test_a_sampled_token_has_the_same_logprob_among_the_top_k(kernels: Kernels | None) -> None:
    logits = torch.randn(200, 997, generator=torch.Generator().manual_seed(3)) * 4
    sampled = sample_with_top(logits, list(range(200)), 40, kernels)
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    is_chosen = sampled.top_ids == sampled.tokens.unsqueeze(1)
    assert 150 < int(is_chosen.sum()) < 200
    chosen = sampled.logprobs.unsqueeze(1).expand_as(is_chosen)
    assert torch.equal(sampled.top_logprobs[is_chosen], chosen[is_chosen])
    assert torch.equal(sampled.top_logprobs[::2, 0], sampled.logprobs[::2])  # the greedy rows


def test_the_kernels_prefer_lower_ids_among_equal_logits() -> None:
    logits = torch.zeros(2, 200)
    logits[1, [150, 37, 100, 18]] = 1.0
    sampled = sample_with_top(logits, [0, 1], 3, load_kernels())
    assert sampled.top_ids is not None
    assert sampled.top_ids.tolist() == [[0, 1, 2], [18, 37, 100]]


@pytest.mark.parametrize("count", [1, 20, 900])
@pytest.mark.parametrize("vocab_size", [900, 5000])
def test_the_kernels_find_the_most_likely_tokens_at_any_position(vocab_size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    spread = torch.randn(vocab_size, generator=generator)
    few = torch.full((vocab_size,), -torch.inf)
    few[[3, 700, 771]] = torch.tensor([1.0, -2.0, 2.0])
    in_one_column = torch.randn(vocab_size, generator=generator)
    in_one_column[5::768] += 100
    rows = [
        *(spread, spread * 1e30, spread.sort().values, spread.sort(descending=True).values),
        *(torch.where(spread > 2, spread, -1e9), spread.round(), few, in_one_column),
    ]
    logits = torch.stack(rows)
    sampled = sample_with_top(logits, list(range(len(rows))), count, load_kernels())
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    is_finite = expected.values[:, :count] > -torch.inf
    assert torch.equal(sampled.top_ids, expected.indices[:, :count].int().where(is_finite, 0))
    assert torch.equal(sampled.top_logprobs == -torch.inf, ~is_finite)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_top_logprobs_in_mixed_steps_equal_transformers(tmp_path: Path, backend: str) -> None:
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=backend == "cpu")
    driver = StepDriver(make_runner(model, info, backend))
    rng = np.random.default_rng(5)
    counts = {1: 0, 2: 3, 3: 8, 4: 1}
    texts = {slot: rng.integers(0, VOCAB_SIZE, 7 * slot).tolist() for slot in counts}
    for slot, count in counts.items():
        driver.open(slot, list(texts[slot]), temperature=0.7 if slot == 3 else 0.0, seed=slot, num_top=count)
    for step in range(6):
        decode = [slot for slot in counts if not driver.remaining(slot)]
        prefill = [(slot, min(11, driver.remaining(slot))) for slot in counts if driver.remaining(slot)]
        sampled = driver.run(decode, prefill)
        assert set(driver.top) == {slot for slot in sampled if counts[slot]}
        for slot, (token, logprob) in sampled.items():
            with torch.no_grad():
                expected = oracle(torch.tensor([texts[slot]])).logits[0, -1].log_softmax(dim=-1).topk(counts[slot])
            top = driver.top.get(slot, [])
            assert [token_id for token_id, _ in top] == expected.indices.tolist(), step
            assert [value for _, value in top] == pytest.approx(expected.values.tolist(), abs=1e-4)
            assert dict(top).get(token, logprob) == logprob
            texts[slot].append(token)


def test_a_reopened_slot_does_not_keep_num_top_logprobs() -> None:
    table = SlotTable(SlotTableSize(num_slots=3, max_blocks=4), CPU)
    opened = dataclasses.replace(open_greedy(1, 5), num_top_logprobs=int32([3]))
    table.apply(SlotChanges(NOTHING, opened, NOTHING, NOTHING))
    assert table.num_top_logprobs.tolist() == [0, 3, 0]
    table.apply(SlotChanges(int32([1]), open_greedy(1, 5), NOTHING, NOTHING))
    assert table.num_top_logprobs.tolist() == [0, 0, 0]
