"""Ranks that each have a part of the vocabulary sample as one process does that has all of it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.examples import few
from tests.model.sampling.helpers.shard_ranks import (
    CASES,
    NUM_ROWS,
    Case,
    empty_logprobs,
    make_case,
    prompt_targets,
    run_ranks,
)
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.sampling.noise import gumbel_noise, keys_of_shard
from tokasaurus.model.sampling.prompt_logprobs import fill_token_logprobs
from tokasaurus.model.sampling.sample import Sampled, sample


def max_bytes(case: Case, num_ranks: int) -> int:
    """That a rank sends for a sampled step."""
    if case.is_plain:
        # Score, token, whether it is finite; for logprobs, also its logit and the log-sum-exp.
        num_bytes = case.num_rows * 8 * (5 if case.any_logprobs else 3)
        return num_bytes + len(case.top_rows) * 2 * 8 * case.num_top
    # Its logits of all rows, those of its own among them; then token and log-probability of each own row. All ranks
    # send as many top log-probabilities as the rank with the most.
    logits = case.num_rows * -(-case.vocab_size // num_ranks) * case.dtype.itemsize
    return logits + -(-case.num_rows // num_ranks) * 2 * 8 + len(case.top_rows) * 2 * 8 * case.num_top


def bytes_of_prompt(case: Case) -> int:
    """That a rank sends for the prompt logprobs of all rows."""
    # A log-sum-exp, the token's logit and rank; the most likely tokens.
    return NUM_ROWS * (3 * 4 + 2 * 8 * min(4, case.vocab_size))


def assert_sampled_alike(got: list[np.ndarray | None], expected: Sampled) -> None:
    tokens, logprobs, _, top_logprobs = got
    assert tokens is not None
    np.testing.assert_array_equal(tokens, expected.tokens)
    assert (logprobs is None) == (expected.logprobs is None)
    is_good = expected.tokens.numpy() >= 0
    if logprobs is not None:
        np.testing.assert_allclose(logprobs[is_good], expected.logprobs[is_good], atol=1e-5, rtol=0)
    assert (top_logprobs is None) == (expected.top_logprobs is None)
    if top_logprobs is not None:
        np.testing.assert_allclose(top_logprobs, expected.top_logprobs, atol=1e-5, rtol=0)


@few(1, "num_ranks", [2, 3])
def test_ranks_sample_as_one_process_and_exchange_no_more_than_they_need(num_ranks: int, tmp_path: Path) -> None:
    num_prompts = sum(case.has_prompt for case in CASES)
    answers = run_ranks(num_ranks, tmp_path, 2 * len(CASES) + num_prompts)
    for of_rank in answers:
        sent = iter(of_rank)
        for case in CASES:
            logits, rows = make_case(case)
            expected = sample(logits, rows, None)
            for _ in ("torch", "kernels"):
                got, num_bytes = next(sent)
                assert_sampled_alike(got, expected)
                if expected.top_ids is not None:  # logits are distinct, so that their order is too
                    np.testing.assert_array_equal(got[2], expected.top_ids)
                assert num_bytes <= max_bytes(case, num_ranks), case.name
            if case.has_prompt:
                wanted = empty_logprobs(min(4, case.vocab_size))
                fill_token_logprobs(logits, prompt_targets(case.vocab_size), wanted, None)
                computed, num_bytes = next(sent)
                for name, got_part, want_part in zip(wanted._fields, computed, wanted, strict=True):
                    if name != "top_ids" or case.dtype == torch.float32:  # bfloat16 has ties, in any order
                        np.testing.assert_allclose(got_part, want_part, atol=1e-5, rtol=0)
                assert num_bytes <= bytes_of_prompt(case), case.name
    for (first, _), *others in zip(*answers, strict=True):
        for other, _ in others:
            assert repr(other) == repr(first), "every rank has the same results"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("has_kernels", [False, True])
def test_rows_that_are_cut_into_ranges_are_sampled_as_together(case: Case, has_kernels: bool) -> None:
    logits, rows = make_case(case)
    kernels = load_kernels() if has_kernels else None
    whole = sample(logits, rows, kernels)
    ends = sorted({0, 1, min(66, case.num_rows), case.num_rows})
    parts = [
        sample(logits[start:end], rows.cut(start, end - start), kernels) for start, end in itertools.pairwise(ends)
    ]
    for name, together in whole._asdict().items():
        if together is None:
            assert all(getattr(part, name) is None for part in parts)
            continue
        found = torch.cat([value for part in parts if (value := getattr(part, name)) is not None])
        torch.testing.assert_close(
            found, together, rtol=0, atol=1e-6 if name.endswith("logprobs") else 0, equal_nan=True
        )


def test_the_keys_of_a_shard_give_its_tokens_the_noise_of_the_whole() -> None:
    keys = torch.tensor([[0, 0], [2**32 - 1, 5], [123456789, 2**31]])
    whole = gumbel_noise(keys, 900)
    for first_id in (0, 1, 450, 899):
        shard = gumbel_noise(keys_of_shard(keys, first_id), 900 - first_id)
        assert torch.equal(shard, whole[:, first_id:])
