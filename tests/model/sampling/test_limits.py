"""Which tokens limits exclude, on the host and on a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.model.helpers.pretend_device import on_device, on_host, pretended
from tests.model.helpers.sampling_rows import inside_limits, make_rows, with_params
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.sampling.rules import (
    choose_rows,
    columns_of,
    has_limits,
    limited_rows,
    limits_in_use,
    outside_limits,
)
from tokasaurus.model.sampling.sample import SamplingRows, sample
from tokasaurus.model.staging.staging import ON_HOST


def limited(top_p: list[float], top_k: list[int] | None = None, min_p: list[float] | None = None) -> SamplingRows:
    """Rows of temperature 1."""
    num_rows = len(top_p)
    rows = make_rows([1.0] * num_rows, top_p, torch.zeros(num_rows, 2, dtype=torch.int64))
    columns = {"top_k": top_k, "min_p": min_p}
    return with_params(rows, **{name: np.array(values) for name, values in columns.items() if values is not None})


def excluded(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return outside_limits(logits, columns_of(rows.device_params), limits_in_use(rows.params))


@examples(60)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    top_p=st.floats(1 / 64, 1.0, width=32),
)
def test_top_p_keeps_the_fewest_most_likely_tokens_that_reach_it(logits: list[float], top_p: float) -> None:
    probabilities = torch.tensor(logits).softmax(dim=-1)
    outside = excluded(torch.tensor([logits]), limited([top_p]))[0]
    kept = probabilities[~outside]
    assert kept.sum() >= min(top_p, 1) - 1e-5
    assert outside.sum() == 0 or probabilities[outside].max() < kept.min()
    # Without the least likely kept token, and its equals, top_p would not be reached.
    assert kept[kept > kept.min()].sum() < top_p + 1e-5


def test_top_p_reaches_past_the_candidates_of_a_flat_distribution() -> None:
    logits = torch.linspace(0, 0.01, 5000).unsqueeze(0)
    outside = excluded(logits, limited([0.9]))[0]
    ordered = logits[0].softmax(dim=-1).sort(descending=True).values
    expected = int((ordered.cumsum(0) < 0.9).sum()) + 1
    assert abs(int((~outside).sum()) - expected) <= 1


@pytest.mark.parametrize("top_ps", [(1.0,), (1.0, 0.987, 0.513, 0.0123)])
@pytest.mark.parametrize("top_ks", [(0,), (0, 1, 17, 400), (0, 17, 1500, 6000)])
@pytest.mark.parametrize("scale", [0.001, 1.0, 8.0])
def test_a_device_excludes_what_the_host_excludes(
    top_ps: tuple[float, ...], top_ks: tuple[int, ...], scale: float
) -> None:
    """A device that the host must not wait for applies top_p to all tokens, never to candidates alone."""
    rng = np.random.default_rng(0)
    num_rows, vocab_size = 24, 5000
    logits = rng.integers(-300, 300, (num_rows, vocab_size)) / 100 * scale  # few values, so that many tie
    top_p, top_k, min_p = (rng.choice(values, num_rows) for values in (top_ps, top_ks, (0.0, 0.031)))
    rows = limited(top_p.tolist(), top_k.tolist(), min_p.tolist())
    tensor = torch.tensor(logits, dtype=torch.float32)
    outside = excluded(tensor, rows)
    with pretended():
        on_other = outside_limits(
            on_device(tensor), columns_of(on_device(rows.device_params)), limits_in_use(rows.params)
        )
    assert torch.equal(on_host(on_other), outside)
    expected = [~inside_limits(*row) for row in zip(logits, top_p, top_k, min_p, strict=True)]
    # Sums of many probabilities may cross top_p one value apart.
    same = [(own == expected_own).all() for own, expected_own in zip(outside.numpy(), expected, strict=True)]
    assert np.mean(same) >= 0.85


@pytest.mark.parametrize("shape", ["flat", "usual", "peaked", "tied"])
def test_the_kernels_keep_the_same_tokens_of_a_large_vocabulary(shape: str) -> None:
    """By the probability of all that they keep, which the log-probability of the drawn token tells."""
    settings = [
        *((top_p, 0, 0.0) for top_p in (0.02, 0.5, 0.9, 0.999)),
        *((1.0, top_k, 0.0) for top_k in (1, 64, 900, 99_000, 200_000)),
        *((1.0, 0, 0.05), (0.9, 64, 0.0), (0.3, 5000, 0.0), (0.7, 300, 0.01), (0.9, 0, 0.3)),
    ]
    logits = torch.randn(len(settings), 100_003, generator=torch.Generator().manual_seed(0))
    if shape == "tied":
        logits = (logits * 8).round() / 4
    elif shape != "flat":
        logits *= 3.0
    if shape == "peaked":
        logits[:, 77] = 22.0
    top_p, top_k, min_p = (list(column) for column in zip(*settings, strict=True))
    rows = limited(top_p, top_k, min_p)
    rows = replace(rows, as_sampled=choose_rows(np.arange(len(settings)), ON_HOST))
    sampled = sample(logits, rows, load_kernels())
    assert sampled.logprobs is not None
    for row, params, token, logprob in zip(logits.double(), settings, sampled.tokens, sampled.logprobs, strict=True):
        kept = row[torch.from_numpy(inside_limits(row.numpy(), *params))].logsumexp(dim=0)
        assert float(row[token] - logprob) == pytest.approx(float(kept), abs=1e-4), params


def test_greedy_rows_and_rows_that_allow_every_token_have_no_limits() -> None:
    rows = with_params(
        limited([1.0, 0.9, 1.0, 1.0, 0.9], [0, 0, 5, 0, 0], [0.0, 0.0, 0.0, 0.1, 0.0]),
        temperature=np.array([1.0, 1.0, 0.5, 2.0, 0.0]),
    )
    chosen = limited_rows(has_limits(rows.params), ON_HOST)
    assert chosen is not None
    assert chosen.on_host.tolist() == [1, 2, 3]
    assert limited_rows(has_limits(rows.params[[0, 4]]), ON_HOST) is None
