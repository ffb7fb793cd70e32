"""Logprobs of the distribution that tokens are drawn from, against NumPy in float64: each rule alone, and all mixed."""

import dataclasses
import math
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import make_rows, noise_keys, staged_masks, top_rows, with_params
from tests.model.sampling.helpers.logprobs_as_sampled import (
    ALONE,
    RANK_CASES,
    VOCAB_SIZE,
    Row,
    check,
    make_case,
    mixes,
    sample_on_rank,
)
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.model import buffer_sizes
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.sampling.rules import choose_rows
from tokasaurus.model.sampling.sample import Sampled, _replace_logprobs, sample
from tokasaurus.model.staging.staging import ON_HOST


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return None if request.param == "torch" else load_kernels()


@pytest.mark.parametrize("row", ALONE, ids=str)
def test_each_rule_alone(row: Row, kernels: Kernels | None) -> None:
    case = make_case([row] * 8)
    check(case, sample(case.logits, case.rows, kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [None, 3])
def test_rows_of_every_kind_together(at_once: int | None, dtype: torch.dtype, kernels: Kernels | None) -> None:
    """at_once: rows that plain torch takes together, so that they are cut anywhere."""
    case = make_case([*ALONE, *mixes(0, 140)], dtype=dtype)
    with unittest.mock.patch.object(buffer_sizes, "_MAX_AS_SAMPLED_ROWS", at_once or buffer_sizes._MAX_AS_SAMPLED_ROWS):
        check(case, sample(case.logits, case.rows, kernels))


def test_tokens_and_the_other_rows_logprobs_do_not_change(kernels: Kernels | None) -> None:
    case = make_case(mixes(2, 90))
    assert case.rows.as_sampled is not None
    with_drawn, without = (
        sample(case.logits, rows, kernels) for rows in (case.rows, dataclasses.replace(case.rows, as_sampled=None))
    )
    assert torch.equal(with_drawn.tokens, without.tokens)
    others = np.setdiff1d(np.arange(90), case.rows.as_sampled.on_host)
    assert with_drawn.logprobs is not None
    assert without.logprobs is not None
    assert len(others) > 5
    assert torch.equal(with_drawn.logprobs[others], without.logprobs[others])


def test_a_token_that_its_mask_forces_against_a_bias_is_certain(kernels: Kernels | None) -> None:
    """The mask allows one token, or two, and a bias of -inf excludes these."""
    allowed = {0: np.arange(VOCAB_SIZE) == 9, 1: np.isin(np.arange(VOCAB_SIZE), (0, 4)), 2: np.arange(VOCAB_SIZE) == 0}
    forbidden = tuple((token, -np.inf, ALWAYS) for token in (0, 4, 9))
    contexts = Contexts({1: [1], 2: [1], 3: [1]}, 4)
    contexts.open([1, 2, 3], {slot: Rule(biases=forbidden) for slot in (1, 2, 3)})
    keys = noise_keys([1, 2, 3], [0] * 3, [0] * 3)
    for top_p in (1.0, 0.5):
        rows = contexts.with_rules(make_rows([1.0] * 3, [top_p] * 3, keys), [1, 2, 3])
        chosen = choose_rows(np.arange(3), ON_HOST)
        rows = dataclasses.replace(rows, masks=staged_masks(allowed), as_sampled=chosen, top=top_rows(range(3), 2))
        logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        tokens, logprobs, top_ids, top_logprobs = sample(logits, rows, kernels)
        assert tokens.tolist()[::2] == [9, 0]
        assert tokens[1] in (0, 4)
        assert logprobs is not None
        assert logprobs.tolist() == [0, 0, 0]
        assert top_ids is not None
        assert top_ids[:, 0].tolist() == tokens.tolist()
        assert top_logprobs is not None
        assert top_logprobs.tolist() == [[0, -math.inf]] * 3


def test_a_drawn_token_is_possible_however_sums_round(kernels: Kernels | None) -> None:
    """top_p is each partial sum of the probabilities, of which many are equal; torch computes them again after the
    kernels have drawn."""
    num_rows = 3000
    logits = (torch.arange(100) // 7 * -0.25).repeat(num_rows, 1)
    sums = logits[0].double().softmax(dim=0).cumsum(0)[torch.arange(num_rows) % 100]
    keys = noise_keys(list(range(num_rows)), [0] * num_rows, [0] * num_rows)
    rows = with_params(make_rows([1.0] * num_rows, [1.0] * num_rows, keys), top_p=sums.float().clamp(max=0.99).numpy())
    rows = dataclasses.replace(rows, as_sampled=choose_rows(np.arange(num_rows), ON_HOST))
    sampled = sample(logits, rows, kernels)
    assert sampled.logprobs is not None
    assert torch.isfinite(sampled.logprobs).all()
    if kernels is not None:  # as on CUDA: another executor has drawn
        other = Sampled(sampled.tokens, torch.zeros(num_rows))
        assert rows.as_sampled is not None
        _replace_logprobs(other, rows.as_sampled, logits, rows)
        assert other.logprobs is not None
        one_group = math.log1p(math.exp(-0.25))  # the second, where only the first is possible
        torch.testing.assert_close(other.logprobs, sampled.logprobs, atol=one_group + 1e-5, rtol=0)


def test_a_row_whose_logits_are_no_numbers_has_no_token_and_changes_no_other(kernels: Kernels | None) -> None:
    case = make_case(ALONE)
    expected = sample(case.logits, case.rows, kernels)
    broken = case.logits.clone()
    broken[3, 5], broken[8, 0] = torch.nan, torch.inf
    sampled = sample(broken, case.rows, kernels)
    assert np.flatnonzero(sampled.tokens < 0).tolist() == [3, 8]
    others = sampled.tokens >= 0
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(sampled.logprobs[others], expected.logprobs[others])


def test_two_ranks_have_the_same_logprobs(tmp_path: Path) -> None:
    for of_rank in run_ranks(2, tmp_path, 2 * len(RANK_CASES), sample_on_rank):
        for index, arrays in enumerate(of_rank):
            check(make_case(RANK_CASES[index // 2]), Sampled(*map(torch.from_numpy, arrays)))
