"""Masks of token filters against sets of tokens, one step after the other."""

import random

import numpy as np
import pytest

from tests.helpers.examples import seeds
from tokasaurus.manager.state.token_filter import FilterMasks
from tokasaurus.messages.generation import TokenFilter


def tokens_in(mask: np.ndarray) -> set[int]:
    return {int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


@pytest.mark.parametrize("seed", seeds(60))
def test_masks_allow_what_completes_no_bad_sequence(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([3, 31, 32, 33, 70])
    few = range(min(vocab_size, rng.choice([2, 3, 5])))
    allowed = None if rng.random() < 0.3 else tuple(rng.sample(few, rng.randint(1, len(few))))
    bad = tuple(tuple(rng.choices(few, k=rng.choice([1, 2, 2, 3, 4]))) for _ in range(rng.randint(0, 6)))
    masks = FilterMasks(TokenFilter.of_ids(vocab_size, allowed, bad))
    generated: list[int] = []
    for _ in range(30):
        expected = {
            token
            for token in (range(vocab_size) if allowed is None else allowed)
            if not any(tuple([*generated, token][-len(ids) :]) == ids for ids in bad)
        }
        newest = generated[-masks.num_read_tokens :] if masks.num_read_tokens else []
        assert tokens_in(masks.mask(newest)) == expected
        assert masks.leaves_none(newest) == (not expected)
        generated.append(rng.choice(few))  # also tokens that are not allowed


def test_only_sequences_of_several_tokens_need_the_tokens_before() -> None:
    assert FilterMasks(TokenFilter.of_ids(9, (1, 2), ((3,), (2,)))).num_read_tokens == 0
    assert FilterMasks(TokenFilter.of_ids(9, None, ((3,), (2, 4), (1, 2, 3)))).num_read_tokens == 2
