"""Sampling against distributions computed the plain way, and the kernels against torch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.examples import examples, few
from tests.model.helpers.pretend_device import on_device, on_host, pretended, with_tensors_on_device
from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import (
    LOGITS,
    chi_square,
    inside_limits,
    make_rows,
    noise_keys,
    staged_masks,
    top_rows,
    with_params,
)
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.sampling.noise import gumbel_noise
from tokasaurus.model.sampling.sample import SamplingRows, sample


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    if request.param == "torch":
        return None
    loaded = load_kernels()
    assert loaded is not None, "the tests need a C++ compiler"
    return loaded


def count_draws(
    logits: list[float],
    temperature: float,
    top_p: float,
    kernels: Kernels | None,
    top_k: int = 0,
    min_p: float = 0.0,
) -> np.ndarray:
    """How often each token is drawn in 40,000 draws of one sequence's consecutive positions."""
    num_draws = 40_000
    rows = make_rows(
        [temperature] * num_draws,
        [top_p] * num_draws,
        noise_keys([7] * num_draws, [0] * num_draws, list(range(num_draws))),
        top_k,
        min_p,
    )
    tokens, _, *_ = sample(torch.tensor(logits).repeat(num_draws, 1), rows, kernels)
    return np.bincount(tokens.numpy(), minlength=len(logits))


NO_TOP_K, NO_MIN_P = torch.zeros(1, dtype=torch.int32), torch.zeros(1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float, kernels: Kernels | None) -> None:
    logits = np.array(LOGITS) / temperature
    probabilities = np.exp(logits) / np.exp(logits).sum()
    # 6 degrees of freedom: above 27.9 in one of 10,000 correct runs.
    assert chi_square(count_draws(LOGITS, temperature, 1.0, kernels), probabilities) < 27.9


# Probabilities at temperature 1, in falling order: 0.42, 0.26, 0.16, 0.08, 0.06, 0.02, 0.005.
@few(
    5,
    ("top_p", "top_k", "min_p", "num_inside"),
    [
        (0.8, 0, 0.0, 3),
        (1.0, 4, 0.0, 4),
        (1.0, 0, 0.15, 4),  # 0.15 of the largest, 0.42, is 0.063
        (0.6, 2, 0.0, 1),  # top_k leaves 0.68; 0.42 of it is 0.62, more than top_p
        (0.9, 5, 0.15, 3),  # min_p leaves 0.92; 0.84 of it is 0.91, more than top_p
        (0.7, 2, 0.0, 2),
        (1.0, 1000, 0.0, 7),
        (0.8, 0, 0.001, 3),
    ],
)
def test_draws_under_limits_follow_the_renormalised_softmax(
    top_p: float, top_k: int, min_p: float, num_inside: int, kernels: Kernels | None
) -> None:
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum()
    inside = np.argsort(-probabilities)[:num_inside]
    counts = count_draws(LOGITS, 1.0, top_p, kernels, top_k, min_p)
    assert counts.sum() == counts[inside].sum()
    # Up to 6 degrees of freedom: above 27.9 in one of 10,000 correct runs.
    assert chi_square(counts[inside], probabilities[inside] / probabilities[inside].sum()) < 27.9


@pytest.mark.parametrize("vocab_size", [5, 16, 50, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_the_draw_is_the_best_token_inside_all_limits(seed: int, vocab_size: int, kernels: Kernels | None) -> None:
    """Tokens outside have logits close to the logits inside: with the same noise, the draw must be the token with
    the largest noisy logit among the tokens inside."""
    rng = np.random.default_rng(seed)
    num_rows = 80
    # Few values, so that many tie at the borders.
    logits = rng.integers(-12, 12, (num_rows, vocab_size)) * rng.choice([0.01, 0.3, 1.0])
    top_ks = rng.choice([0, 1, 3, 17, 400, 1500, 6000], num_rows)
    min_ps = rng.choice([0.0, 0.013, 0.31, 1.0], num_rows)
    top_ps = rng.choice([1.0, 0.987, 0.513, 0.0123], num_rows)
    keys = noise_keys(list(range(num_rows)), [0] * num_rows, [3] * num_rows)
    rows = with_params(make_rows([1.0] * num_rows, top_ps.tolist(), keys), top_k=top_ks, min_p=min_ps)
    tokens, _, *_ = sample(torch.tensor(logits, dtype=torch.float32), rows, kernels)
    limits = zip(logits, top_ps, top_ks, min_ps, strict=True)
    inside = np.stack([inside_limits(*row) for row in limits])
    noisy_logits = np.where(inside, logits + gumbel_noise(keys, vocab_size).numpy(), -np.inf)
    assert (inside.sum(axis=1) < vocab_size).mean() > 0.4
    # Sums of many probabilities may cross top_p one token apart.
    assert (tokens.numpy() == noisy_logits.argmax(axis=1)).mean() >= 0.98


@pytest.mark.parametrize(("position", "token"), [(213, 31642), (264, 41734)])
def test_the_only_token_that_top_p_leaves_is_drawn_whatever_its_noise(
    position: int, token: int, kernels: Kernels | None
) -> None:
    """Found by search: the hashes of these tokens are so close to 2^32 that the uniform would round to 1."""
    logits = torch.zeros(1, 50_000)
    logits[0, token] = 30
    tokens, _, *_ = sample(logits, make_rows([1.0], [0.9], noise_keys([0], [0], [position])), kernels)
    assert tokens.tolist() == [token]


def test_greedy_rows_take_the_maximum_beside_sampled_ones(kernels: Kernels | None) -> None:
    logits = torch.randn(6, 1003)
    rows = make_rows([0, 1, 0, 0.7, 0, 1], [0.1, 1, 1, 0.5, 1, 1], noise_keys([1] * 6, [0] * 6, [5] * 6))
    tokens, _, *_ = sample(logits, rows, kernels)
    assert tokens[[0, 2, 4]].tolist() == logits.argmax(dim=-1)[[0, 2, 4]].tolist()


def test_the_lowest_token_id_among_equal_maxima_is_taken(kernels: Kernels | None) -> None:
    logits = torch.zeros(2, 200)
    logits[1, [37, 100, 18]] = 1.0
    rows = make_rows([0.0, 0.0], [1.0, 1.0], noise_keys([1, 1], [0, 0], [1, 2]))
    assert sample(logits, rows, kernels)[0].tolist() == [0, 18]


@pytest.mark.parametrize("scale", [10, 100])
def test_logprobs_are_of_the_plain_distribution(scale: float, kernels: Kernels | None) -> None:
    logits = torch.randn(5, 1003) * scale
    rows = make_rows([0, 1, 2, 0.1, 1], [1, 1, 0.5, 0.5, 1], noise_keys([1] * 5, [0] * 5, [5] * 5))
    tokens, logprobs, *_ = sample(logits, rows, kernels)
    expected = logits.double().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert logprobs is not None
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6 * scale, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("vocab_size", [7, 4999])
def test_kernels_draw_the_tokens_that_torch_draws(vocab_size: int, top_p: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(300, vocab_size) * 3).to(dtype)
    temperatures = [0.0, 0.6, 1.0, 1.7] * 75
    keys = noise_keys(list(range(300)), [index % 3 for index in range(300)], list(range(300)))
    rows = make_rows(temperatures, [top_p] * 300, keys)
    by_torch, logprobs_by_torch, *_ = sample(logits, rows, None)
    by_kernels, logprobs, *_ = sample(logits, rows, load_kernels())
    assert (by_torch == by_kernels).float().mean() >= 0.99  # a near tie may fall either way
    same = by_torch == by_kernels
    assert logprobs is not None
    assert logprobs_by_torch is not None
    torch.testing.assert_close(logprobs[same], logprobs_by_torch[same], atol=2e-5, rtol=1e-5)
    greedy = torch.tensor(temperatures) == 0
    assert torch.equal(logits.gather(1, by_kernels.unsqueeze(1))[greedy], logits.amax(dim=-1, keepdim=True)[greedy])


@few(3, "spread", [0.0, 0.1, 5.0, 1.0])
def test_the_kernel_skips_no_token_that_would_have_won(spread: float) -> None:
    """It computes the noise only where an upper bound of it could win, which a flat distribution tests most."""
    num_rows = 40
    logits = torch.randn(num_rows, 50_000) * spread
    keys = noise_keys(list(range(num_rows)), [0] * num_rows, [8] * num_rows)
    tokens, _, *_ = sample(logits, make_rows([1.0] * num_rows, [1.0] * num_rows, keys), load_kernels())
    noisy_logits = logits + gumbel_noise(keys, 50_000)
    drawn = noisy_logits.gather(1, tokens.unsqueeze(1))
    torch.testing.assert_close(drawn, noisy_logits.amax(dim=1, keepdim=True))


@examples(60)
@given(
    logit_tenths=st.lists(st.integers(-40, 40), min_size=1, max_size=40, unique=True),
    top_p=st.floats(1 / 64, 1.0, width=32),
    by_kernels=st.booleans(),
)
def test_only_tokens_inside_top_p_are_drawn_including_the_least_likely(
    logit_tenths: list[int], top_p: float, by_kernels: bool
) -> None:
    logits = np.array(logit_tenths) / 10
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    assume(np.abs(before - top_p).min() > 1e-5)
    inside = order[before < top_p]
    num_draws = 500
    keys = noise_keys([3] * num_draws, [0] * num_draws, list(range(num_draws)))
    rows = make_rows([1.0] * num_draws, [top_p] * num_draws, keys)
    repeated = torch.tensor(logits, dtype=torch.float32).repeat(num_draws, 1)
    tokens, _, *_ = sample(repeated, rows, load_kernels() if by_kernels else None)
    drawn = set(tokens.tolist())
    assert drawn <= set(inside.tolist())
    if probabilities[inside[-1]] / probabilities[inside].sum() > 0.05:  # missed once in 10^11 runs
        assert inside[-1] in drawn


def test_tokens_as_likely_as_the_last_one_inside_top_p_are_inside(kernels: Kernels | None) -> None:
    logits = torch.zeros(2000, 300)
    logits[:, :10] = 1.0
    # Ten tokens have probability 0.086 together; the others are equal, so all of them or none are inside.
    keys = noise_keys(list(range(2000)), [0] * 2000, [1] * 2000)
    few, _, *_ = sample(logits, make_rows([1.0] * 2000, [0.05] * 2000, keys), kernels)
    everything, _, *_ = sample(logits, make_rows([1.0] * 2000, [0.2] * 2000, keys), kernels)
    assert set(few.tolist()) == set(range(10))
    assert len(set(everything.tolist())) > 250


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("token", [slice(None), 0, 57, 99])
def test_a_row_with_nan_or_infinity_has_no_token_and_does_not_affect_other_rows(
    token: slice | int, value: float, temperature: float, top_p: float, kernels: Kernels | None
) -> None:
    """One such logit suffices, wherever it is: also in the last of 100, which do not fill a vector."""
    logits = torch.randn(3, 100)
    logits[1, token] = value
    keys = noise_keys([1, 2, 3], [0, 0, 0], [1, 1, 1])
    tokens, logprobs, *_ = sample(logits, make_rows([temperature] * 3, [top_p] * 3, keys), kernels)
    assert tokens[1] == -1
    assert logprobs is not None
    assert not torch.isfinite(logprobs[1])
    for row in (0, 2):
        alone = make_rows([temperature], [top_p], keys[row : row + 1])
        assert torch.equal(sample(logits[row : row + 1], alone, kernels).tokens, tokens[row : row + 1])


def test_minus_infinity_is_the_logit_of_a_token_that_is_never_drawn(kernels: Kernels | None) -> None:
    logits = torch.full((200, 100), -torch.inf)
    logits[:, 30:40] = torch.randn(10)
    keys = noise_keys(list(range(200)), [0] * 200, [1] * 200)
    tokens = sample(logits, make_rows([1.0] * 200, [1.0] * 200, keys), kernels).tokens
    assert set(tokens.tolist()) <= set(range(30, 40))


def test_the_draw_of_a_row_does_not_depend_on_other_rows(kernels: Kernels | None) -> None:
    logits = torch.randn(130, 3000)
    keys = noise_keys(list(range(130)), [0] * 130, [4] * 130)
    together, _, *_ = sample(logits, make_rows([1.0] * 130, [1.0] * 130, keys), kernels)
    for row in (0, 63, 64, 129):
        alone, _, *_ = sample(logits[row : row + 1], make_rows([1.0], [1.0], keys[row : row + 1]), kernels)
        assert alone.tolist() == together[row : row + 1].tolist()


NUM_ROWS, VOCAB_SIZE = 130, 3000
LIMITS = {
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 40},
    "top_k above all": {"top_k": 2 * VOCAB_SIZE},
    "min_p": {"min_p": 0.02},
    "all limits": {"top_p": 0.9, "top_k": 60, "min_p": 0.001},
}


def rows_with(option: str) -> SamplingRows:
    """130 rows: two chunks and a part of one. The last 40 have the option; every fifth row is greedy."""
    keys = noise_keys(list(range(NUM_ROWS)), [0] * NUM_ROWS, [3] * NUM_ROWS)
    rows = make_rows([0.0, 1.0, 0.8, 1.3, 1.0] * (NUM_ROWS // 5), [1.0] * NUM_ROWS, keys)
    chosen = range(NUM_ROWS - 40, NUM_ROWS)
    if option in LIMITS:
        columns = {name: rows.params[name].copy() for name in LIMITS[option]}
        for name, column in columns.items():
            column[chosen] = LIMITS[option][name]
        return with_params(rows, **columns)
    if option == "masks":
        rng = np.random.default_rng(0)
        return dataclasses.replace(rows, masks=staged_masks({row: rng.random(VOCAB_SIZE) < 0.01 for row in chosen}))
    if option == "top":
        return dataclasses.replace(rows, top=top_rows(chosen, 5))
    rng = np.random.default_rng(1)
    contexts = {slot: rng.integers(0, VOCAB_SIZE, 30).tolist() for slot in range(NUM_ROWS)}
    state = Contexts(contexts, NUM_ROWS)
    biases = Rule(biases=((7, 30.0, ALWAYS), (7, -2.0, ALWAYS), (9, 29.0, ALWAYS)))
    penalties = Rule(10, presence=-12.5, frequency=0.5, repetition=1.4)
    state.open(list(contexts), dict.fromkeys(chosen, {"biases": biases, "penalties": penalties}[option]))
    return state.with_rules(rows, list(contexts))


@pytest.mark.parametrize("option", [*LIMITS, "masks", "top", "biases", "penalties"])
def test_the_host_does_not_wait_for_a_device_that_draws_the_same_tokens(option: str) -> None:
    rows = rows_with(option)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2
    expected = sample(logits, rows, None)
    with pretended():
        sampled = sample(on_device(logits), with_tensors_on_device(rows), None)
    for result, expected_result in zip(sampled, expected, strict=True):
        assert (result is None) == (expected_result is None)
        if result is not None:
            assert torch.equal(on_host(result), expected_result)
    if option == "top":
        assert expected.top_ids is not None
    elif option != "top_k above all":
        plain = sample(logits, make_rows(rows.params["temperature"].tolist(), [1.0] * NUM_ROWS, rows.noise_keys), None)
        assert (plain.tokens[-40:] != expected.tokens[-40:]).sum() >= 4, "the option changes draws"
