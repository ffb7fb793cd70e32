"""Masks of the tokens that a request's TokenFilter allows next, by the tokens that a sequence has generated."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import TokenFilter

_BITS = 32  # tokens per word of a mask, as in TokenMasks


class FilterMasks:
    """One for all samples of a request. At least one token is allowed first, which the server has checked."""

    def __init__(self, token_filter: TokenFilter) -> None:
        is_allowed = np.zeros(-(-token_filter.vocab_size // _BITS) * _BITS, np.bool_)
        if token_filter.allowed is None:
            is_allowed[: token_filter.vocab_size] = True
        else:
            bits = np.frombuffer(token_filter.allowed, np.uint8)
            is_allowed[: token_filter.vocab_size] = np.unpackbits(
                bits, count=token_filter.vocab_size, bitorder="little"
            )
        is_allowed[[ids[0] for ids in token_filter.bad_sequences if len(ids) == 1]] = False
        self._first: NDArray[np.uint32] = np.packbits(is_allowed, bitorder="little").view(np.uint32)
        self._num_first = int(is_allowed.sum())
        longer = [ids for ids in token_filter.bad_sequences if len(ids) > 1]
        # by the last token before: (the tokens before, the token that would complete the sequence)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for ids in longer:
            self._longer.setdefault(ids[-2], []).append((list(ids[:-1]), ids[-1]))
        self.num_read_tokens = max((len(ids) - 1 for ids in longer), default=0)
        """How many of the last generated tokens a mask depends on; 0 if all masks are the same."""

    def mask(self, last_tokens: Sequence[int]) -> NDArray[np.uint32]:
        """uint32 [words], as in TokenMasks; the caller must not modify it.

        last_tokens: the last `num_read_tokens` generated ones, or all if fewer."""
        forbidden = self._forbidden(last_tokens)
        if not forbidden:
            return self._first
        mask: NDArray[np.uint32] = self._first.copy()
        for token_id in forbidden:
            mask[token_id // _BITS] &= ~np.uint32(1 << token_id % _BITS)
        return mask

    def leaves_none(self, last_tokens: Sequence[int]) -> bool:
        """Whether `mask` is empty."""
        forbidden = self._forbidden(last_tokens)
        return len(forbidden) >= self._num_first and not bool(self.mask(last_tokens).any())

    def _forbidden(self, last_tokens: Sequence[int]) -> set[int]:
        """The tokens that complete a bad sequence."""
        if not last_tokens:
            return set()
        return {
            last
            for before, last in self._longer.get(last_tokens[-1], ())
            if len(before) <= len(last_tokens) and list(last_tokens[-len(before) :]) == before
        }
