"""Draws under token masks, against the plain distribution of the allowed tokens."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import (
    LOGITS,
    chi_square,
    inside_limits,
    make_masks,
    make_rows,
    noise_keys,
    staged_masks,
    top_rows,
    with_params,
)
from tests.model.helpers.steps import NOTHING, int32, make_runner, open_greedy
from tokasaurus.messages.forward import ForwardInput, SlotChanges
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.sampling.noise import gumbel_noise
from tokasaurus.model.sampling.rules import RuledRows
from tokasaurus.model.sampling.sample import SamplingRows, sample


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return None if request.param == "torch" else load_kernels()


def rules_of_rows(num_rows: int, biases: dict[int, tuple[tuple[int, float], ...]]) -> RuledRows:
    """biases: (token, value) pairs of some rows."""
    rules = {row: Rule(biases=tuple((*bias, ALWAYS) for bias in own)) for row, own in biases.items()}
    contexts = Contexts({row: [1] for row in range(num_rows)}, num_rows)
    contexts.open(list(range(num_rows)), rules)
    selected = contexts.select(list(range(num_rows)))
    assert selected is not None
    return selected


def sampled_rows(num_rows: int, temperature: float = 1.0) -> SamplingRows:
    keys = noise_keys([1] * num_rows, [0] * num_rows, list(range(num_rows)))
    return make_rows([temperature] * num_rows, [1.0] * num_rows, keys)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"), [(0.7, 1.0, 0, 0.0), (1.0, 0.8, 0, 0.0), (1.0, 1.0, 2, 0.0)]
)
def test_draws_follow_the_softmax_of_the_allowed_tokens(
    temperature: float, top_p: float, top_k: int, min_p: float, kernels: Kernels | None
) -> None:
    """Limits apply to the allowed tokens: the mask forbids the most likely token."""
    num_draws = 20_000
    allowed = np.array([0, 1, 1, 0, 1, 1, 0], np.bool_)
    adjusted_logits = np.where(allowed, np.array(LOGITS) / temperature, -np.inf)
    inside = inside_limits(adjusted_logits, top_p, top_k, min_p)
    probabilities = np.where(inside, np.exp(adjusted_logits), 0)
    probabilities /= probabilities.sum()
    keys = noise_keys([7] * num_draws, [0] * num_draws, list(range(num_draws)))
    rows = make_rows([temperature] * num_draws, [top_p] * num_draws, keys, top_k, min_p)
    masks = staged_masks(dict.fromkeys(range(num_draws), allowed))
    tokens = sample(torch.tensor(LOGITS).repeat(num_draws, 1), dataclasses.replace(rows, masks=masks), kernels).tokens
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert 2 <= inside.sum() < 5
    assert counts.sum() == counts[inside].sum()
    # Up to 3 degrees of freedom: above 21.1 in one of 10,000 correct runs.
    assert chi_square(counts[inside], probabilities[inside]) < 21.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 64, 1003])
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_with_every_sampling_feature_the_draw_is_the_best_allowed_token(
    fraction: float, vocab_size: int, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = 150
    logits = torch.tensor(rng.normal(size=(num_rows, vocab_size)) * 3, dtype=torch.float32).to(dtype)
    temperatures = rng.choice([0.0, 0.5, 1.5], num_rows)
    top_ps, top_ks, min_ps = (rng.choice(values, num_rows) for values in ([1.0, 0.9], [0, 5], [0.0, 0.02]))
    masked = rng.random(num_rows) < 0.8
    allowed = rng.random((num_rows, vocab_size)) < fraction
    allowed[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = True
    biases = {
        int(row): tuple((int(token), float(rng.normal() * 5)) for token in rng.integers(0, vocab_size, 3))
        for row in np.flatnonzero(rng.random(num_rows) < 0.5)
    }
    keys = noise_keys(list(range(num_rows)), [0] * num_rows, [3] * num_rows)
    rows = dataclasses.replace(
        with_params(make_rows(temperatures.tolist(), top_ps.tolist(), keys), top_k=top_ks, min_p=min_ps),
        rules=rules_of_rows(num_rows, biases),
        masks=staged_masks({int(row): allowed[row] for row in np.flatnonzero(masked)}),
        top=top_rows(range(0, num_rows, 2), 3),
    )
    sampled = sample(logits, rows, kernels)
    tokens = sampled.tokens.numpy()
    allowed[~masked] = True
    assert allowed[np.arange(num_rows), tokens].all()

    noise = gumbel_noise(keys, vocab_size).double().numpy()
    winners = []
    for row in range(num_rows):
        adjusted_logits = logits[row].double().numpy()
        for token, value in biases.get(row, ()):
            adjusted_logits[token] += value
        adjusted_logits[~allowed[row]] = -np.inf
        if temperatures[row] > 0:
            adjusted_logits /= temperatures[row]
            adjusted_logits[~inside_limits(adjusted_logits, top_ps[row], top_ks[row], min_ps[row])] = -np.inf
            adjusted_logits += noise[row]
        winners.append(adjusted_logits.argmax())
    assert (tokens == winners).mean() >= 0.97  # near ties, and sums that may cross top_p one token apart
    plain = logits.double().log_softmax(dim=-1)
    assert sampled.logprobs is not None
    assert sampled.top_logprobs is not None
    chosen = plain.gather(1, sampled.tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(sampled.logprobs.double(), chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sampled.top_logprobs.double(), plain[::2].topk(3).values, atol=1e-5, rtol=1e-5)


def test_a_mask_that_allows_the_unmasked_draw_does_not_change_it(kernels: Kernels | None) -> None:
    logits = torch.randn(100, 2500, generator=torch.Generator().manual_seed(0))
    free = sample(logits, sampled_rows(100), kernels).tokens.numpy()
    allowed = np.random.default_rng(0).random((100, 2500)) < 0.3
    allowed[np.arange(0, 100, 2), free[::2]] = True
    allowed[np.arange(1, 100, 2), free[1::2]] = False
    masks = staged_masks(dict(enumerate(allowed)))
    drawn = sample(logits, dataclasses.replace(sampled_rows(100), masks=masks), kernels).tokens.numpy()
    assert (drawn[::2] == free[::2]).all()
    assert (drawn[1::2] != free[1::2]).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("bias", [None, -100.0, -np.inf])
def test_the_only_allowed_token_is_drawn_whatever_its_bias(
    bias: float | None, top_p: float, temperature: float, kernels: Kernels | None
) -> None:
    vocab_size, only = 203, list(range(203))
    keys = noise_keys(only, [0] * vocab_size, [0] * vocab_size)
    rows = make_rows([temperature] * vocab_size, [top_p] * vocab_size, keys)
    biases = {} if bias is None else {token: ((token, bias),) for token in only}
    rows = dataclasses.replace(
        rows,
        rules=None if bias is None else rules_of_rows(vocab_size, biases),
        masks=staged_masks(dict(enumerate(np.eye(vocab_size, dtype=np.bool_)))),
    )
    logits = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1)) * 5
    assert sample(logits, rows, kernels).tokens.tolist() == only


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_allowed_token_is_preferred_to_allowed_tokens_with_a_bias_of_minus_infinity(
    temperature: float, kernels: Kernels | None
) -> None:
    allowed = np.zeros(100, np.bool_)
    allowed[[40, 41, 77]] = True
    forbidden = ((40, -np.inf), (41, -np.inf))
    rules = rules_of_rows(2, {0: forbidden, 1: (*forbidden, (77, -np.inf))})
    rows = sampled_rows(2, temperature)
    rows = dataclasses.replace(rows, rules=rules, masks=staged_masks({0: allowed, 1: allowed}))
    drawn = sample(torch.zeros(2, 100), rows, kernels).tokens.tolist()
    assert drawn[0] == 77
    assert drawn[1] in (40, 41, 77)


@pytest.mark.parametrize(("value", "expected"), [(-torch.inf, {50, 99}), (torch.nan, {-1}), (torch.inf, {-1})])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_row_draws_an_allowed_token_or_none_if_its_logits_are_not_numbers(
    value: float, expected: set[int], temperature: float, kernels: Kernels | None
) -> None:
    allowed = np.zeros(100, np.bool_)
    allowed[[50, 99]] = True
    rows = dataclasses.replace(sampled_rows(3, temperature), masks=staged_masks({1: allowed}))
    logits = torch.randn(3, 100)
    logits[1] = value
    tokens = sample(logits, rows, kernels).tokens.tolist()
    assert tokens[1] in expected
    without = dataclasses.replace(rows, masks=None)
    assert sample(logits, without, kernels).tokens.tolist()[::2] == tokens[::2]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_masks_apply_to_the_rows_that_sample(backend: str, tmp_path: Path) -> None:
    """The middle row of the step does not sample: slot 2 is in the middle of its prompt."""
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=backend == "cpu")
    runner = make_runner(model, info, backend)
    opens = [open_greedy(slot, num_tokens) for slot, num_tokens in ((1, 3), (2, 9), (3, 5))]
    fields = (field.name for field in dataclasses.fields(opens[0]))
    joined = {
        name: np.concatenate([getattr(own, name) for own in opens])
        for name in fields
        if getattr(opens[0], name) is not None
    }
    changes = SlotChanges(NOTHING, type(opens[0])(**joined), int32([1, 2, 3]), int32([1, 2, 3]))
    only = np.arange(VOCAB_SIZE) == 200
    masks = make_masks({1: only})
    step = ForwardInput(1, int32([1, 2, 3]), int32([3, 4, 5]), 0, int32(range(12)), changes, masks=masks)
    free = dataclasses.replace(step, masks=None)
    masked_tokens = runner.run(step).output().token_ids.tolist()
    free_tokens = runner.run(free).output().token_ids.tolist()
    assert masked_tokens == [free_tokens[0], 200]
    assert free_tokens[1] != 200


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_token_whose_wanted_logprob_is_not_finite_fails_its_row_alone(
    backend: str, wants: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask forces a token to which the model gives no probability."""
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    compute = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: compute(hidden).index_fill(1, torch.tensor([200]), -torch.inf))
    runner = make_runner(model, info, backend)
    opened = dataclasses.replace(
        open_greedy(1, 3),
        **{name: np.concatenate([getattr(open_greedy(1, 3), name)] * 2) for name in ("sampling", "seeds")},
        slots=int32([1, 2]),
        num_prompt_tokens=int32([3, 3]),
        first_positions=int32([0, 0]),
        sample_indices=np.zeros(2, np.uint32),
        want_logprobs=np.array([wants, True]),
    )
    changes = SlotChanges(NOTHING, opened, int32([1, 2]), int32([1, 2]))
    masks = make_masks({0: np.arange(VOCAB_SIZE) == 200})
    output = runner.run(
        ForwardInput(1, int32([1, 2]), int32([3, 3]), 0, int32(range(6)), changes, masks=masks)
    ).output()
    assert output.token_ids[0] == 200
    assert (output.nonfinite is not None) == wants
    if output.nonfinite is not None:
        assert output.nonfinite.positions.tolist() == [2]
        assert output.nonfinite.blocks.tolist() == [1]
