"""What the model says of the tokens of prompts, kept with the KV blocks that hold them.

A token's log-probability depends on the tokens up to it alone, so it is right for all whose prompts share its block. It
comes from the logits of the position before it. A prompt is scored from its first block without scores on; where the
KV of what follows is there already, it is computed again for its logits alone.
"""

# Q scored tokens of a step, P tokens of a prompt, B blocks, K likeliest tokens

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import ScoredRows, TokenScores
from tokasaurus.messages.generation import PromptLogprobs, TopLogprobs


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Scored tokens of one row of a step.

    row: of the S rows. target_ids: int32 [Q]. places: int64 [Q], where the scores are kept: block * page_size + offset.
    num_top: of the likeliest tokens that are wanted at each.
    """

    row: int
    target_ids: NDArray[np.int32]
    places: NDArray[np.int64]
    num_top: int


def build_scored_rows(chunks: Sequence[ScoredChunk]) -> ScoredRows | None:
    """What the worker is told; None where nothing is scored."""
    if not chunks:
        return None
    return ScoredRows(
        rows=np.array([chunk.row for chunk in chunks], np.int32),
        counts=np.array([len(chunk.target_ids) for chunk in chunks], np.int32),
        target_ids=np.concatenate([chunk.target_ids for chunk in chunks]),
        num_top=max(chunk.num_top for chunk in chunks),
    )


@dataclass(frozen=True, slots=True)
class _TopColumns:
    """Some of the K likeliest tokens of each place, next to each other: all [places, columns]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class PromptScores:
    """Of each block: whether it is scored, and the scores.

    num_top: int32 [num_blocks + 1], steps that score the whole block are sent, with so many likeliest tokens at each
    place; -1 where not. Such a block is computed as well. The values come with the results of these steps, so before
    any result of a sequence that was sent later.

    Along a path of the prefix tree num_top never grows, for who scores a block scores or has read all before it.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self._page_size = page_size
        self.num_top = np.full(num_blocks + 1, -1, np.int32)
        # The same once all prompts that have been admitted are through.
        self._reserved = self.num_top.copy()
        num_kv_indices = (num_blocks + 1) * page_size
        self._logprobs = np.zeros(num_kv_indices, np.float32)
        self._ranks = np.zeros(num_kv_indices, np.int32)
        self._top: list[_TopColumns] = []  # the likeliest first

    def widen(self, num_top: int) -> None:
        """So many likeliest tokens will be asked for. Takes no time: what is kept stays where it is, and the system
        gives memory for the others when they come."""
        num_more = num_top - sum(columns.ids.shape[1] for columns in self._top)
        if num_more > 0:
            shape = len(self._logprobs), num_more
            self._top.append(_TopColumns(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """`blocks` are given to another owner."""
        self.num_top[blocks] = self._reserved[blocks] = -1

    def reserved(self, num_more: int = 0) -> NDArray[np.int32]:
        """A copy of what `num_top` will be once all prompts that have been admitted are through, with -1 for `num_more`
        blocks that there are not."""
        return np.concatenate((self._reserved, np.full(num_more, -1, np.int32)))

    def num_leading_blocks(self, blocks: NDArray[np.int32], num_top: int) -> int:
        """How many of `blocks`, from the first on, will be scored with `num_top` likeliest tokens or more."""
        return num_leading(self._reserved[blocks], num_top)

    def reserve(self, blocks: NDArray[np.int32], num_top: int) -> None:
        """A prompt has been admitted that scores what is not scored of `blocks`, all its whole ones."""
        self._reserved[blocks] = np.maximum(self._reserved[blocks], num_top)

    def drop_reservations(self) -> None:
        """Whoever still keeps one has to make it again."""
        self._reserved[:] = self.num_top

    def send_chunk(
        self, row: int, prompt_ids: NDArray[np.int32], table: NDArray[np.int32], start: int, end: int, num_top: int
    ) -> ScoredChunk:
        """The step at hand computes the positions from `start` to before `end` of a prompt, which its slot's `table`
        has the blocks of, and scores the tokens that follow them. The last chunk of a prompt may score nothing."""
        page_size = self._page_size
        positions = np.arange(start + 1, min(end + 1, len(prompt_ids)))
        blocks = table[positions // page_size]
        assert (self.num_top[blocks] < num_top).all(), "a block is scored again"
        whole = table[start // page_size : end // page_size]
        self.num_top[whole] = np.maximum(self.num_top[whole], num_top)
        places = blocks.astype(np.int64) * page_size + positions % page_size
        return ScoredChunk(row, prompt_ids[start + 1 : end + 1], places, num_top)

    def note(self, chunks: Iterable[ScoredChunk], scores: TokenScores) -> None:
        """The results of a step that scored `chunks`. Where their sequence has left, others may rely on them."""
        start = 0
        for chunk in chunks:  # one by one: two may score a place, each with its own rounding
            end, places = start + len(chunk.places), chunk.places
            self._logprobs[places] = scores.logprobs[start:end]
            self._ranks[places] = scores.ranks[start:end]
            self._note_top(places, scores.top_ids[start:end], scores.top_logprobs[start:end])
            start = end
        assert start == len(scores.logprobs), f"{len(scores.logprobs)} scores, {start} expected"

    def _note_top(
        self, places: NDArray[np.int64], top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]
    ) -> None:
        """Both [Q, K], of the Q places."""
        first, num_top = 0, top_ids.shape[1]
        for columns in self._top:
            if first >= num_top:
                return
            end = min(first + columns.ids.shape[1], num_top)
            columns.ids[places, : end - first] = top_ids[:, first:end]
            columns.logprobs[places, : end - first] = top_logprobs[:, first:end]
            first = end

    def read(self, table: NDArray[np.int32], num_tokens: int, num_top: int) -> PromptLogprobs:
        """Of a prompt whose blocks `table` has, when the results of all that scored it are back."""
        positions = np.arange(num_tokens)
        places = table[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size
        logprobs, ranks = self._logprobs[places], self._ranks[places]
        logprobs[0], ranks[0] = np.nan, 0
        top = None
        if num_top:
            ids = np.concatenate([columns.ids[places] for columns in self._top], axis=1)[:, :num_top]
            values = np.concatenate([columns.logprobs[places] for columns in self._top], axis=1)[:, :num_top]
            ids[0], values[0] = 0, np.nan
            top = TopLogprobs(ids, values)
        return PromptLogprobs(logprobs, ranks, top)


def num_leading(num_top_of_blocks: NDArray[np.int32], num_top: int) -> int:
    """How many, from the first on, are `num_top` or more."""
    is_scored = num_top_of_blocks >= num_top
    return len(is_scored) if is_scored.all() else int(is_scored.argmin())


def first_position(num_scored_blocks: int, page_size: int) -> int:
    """Where a prompt begins to be computed whose first blocks are scored: the logits of the last position in them score
    the token behind it."""
    return max(0, num_scored_blocks * page_size - 1)
