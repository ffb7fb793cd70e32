"""Prompt logprobs, stored by KV block.

A token's logprob depends only on the tokens up to it, so it is valid for every prompt that shares the token's block. It
comes from the logits of the position before it. A prompt is computed from its first block without
logprobs on; positions after that whose KV is cached are recomputed for their logits only.
"""

# Q prompt tokens whose logprobs a step computes, K top-k entries per token

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.forward import PromptLogprobsInput, PromptLogprobsOutput
from tokasaurus.messages.generation import PromptLogprobs, TopLogprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobChunk:
    """Prompt tokens of one row of a step whose logprobs the step computes."""

    row: int
    """Row of the step."""
    target_ids: NDArray[np.int32]
    """[Q], these tokens."""
    kv_indices: NDArray[np.int64]
    """[Q], the kv index under which each token's logprob is stored: block * page_size + offset."""
    num_top: int
    """Top-k logprobs requested per token."""


def build_prompt_logprobs_input(chunks: Sequence[PromptLogprobChunk]) -> PromptLogprobsInput | None:
    """The message part for the worker; None if there are no chunks."""
    if not chunks:
        return None
    return PromptLogprobsInput(
        rows=np.array([chunk.row for chunk in chunks], np.int32),
        counts=np.array([len(chunk.target_ids) for chunk in chunks], np.int32),
        target_ids=np.concatenate([chunk.target_ids for chunk in chunks]),
        num_top=max(chunk.num_top for chunk in chunks),
    )


@dataclass(frozen=True, slots=True)
class _TopColumns:
    """Adjacent columns of the top-k table, by kv index: both arrays are [kv indices, columns]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class PromptLogprobStore:
    """Prompt logprobs of every block.

    Along a path of the prefix tree `num_top` never increases, because a sequence that computes a block's logprobs has
    computed, or reads, those of all blocks before it.
    """

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self._page_size = page_size
        self.num_top = np.full(num_blocks + 1, -1, np.int32)
        """[num_blocks + 1], top-k logprobs per token of each block whose logprobs are all computed by steps already
        sent; -1 for other blocks. Such a block's KV is computed too. The values arrive with the results of those
        steps, so before any result of a sequence sent later."""
        # What num_top will be once the prefill of all admitted prompts is done.
        self._reserved = self.num_top.copy()
        num_kv_indices = (num_blocks + 1) * page_size
        self._logprobs = np.zeros(num_kv_indices, np.float32)
        self._ranks = np.zeros(num_kv_indices, np.int32)
        self._top: list[_TopColumns] = []  # most likely first

    def widen(self, num_top: int) -> None:
        """Reserve space for `num_top` top-k logprobs per token. Cheap: stored values are not copied, and the system
        provides the new memory when it is first written."""
        num_more = num_top - sum(columns.ids.shape[1] for columns in self._top)
        if num_more > 0:
            shape = len(self._logprobs), num_more
            self._top.append(_TopColumns(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))

    def forget(self, blocks: NDArray[np.int32]) -> None:
        """Delete the logprobs and reservations of `blocks`, which get a new owner."""
        self.num_top[blocks] = self._reserved[blocks] = -1

    def reserved(self, num_more: int = 0) -> NDArray[np.int32]:
        """What `num_top` will be once the prefill of all admitted prompts is done; a copy, followed by -1 for
        `num_more` imaginary blocks."""
        return np.concatenate((self._reserved, np.full(num_more, -1, np.int32)))

    def num_leading_blocks(self, blocks: NDArray[np.int32], num_top: int) -> int:
        """How many leading `blocks` have, or have reserved, prompt logprobs with at least `num_top` top-k logprobs."""
        return num_leading(self._reserved[blocks], num_top)

    def reserve(self, blocks: NDArray[np.int32], num_top: int) -> None:
        """Reserve prompt logprobs, each with `num_top` top-k, for `blocks`: the whole blocks of an admitted prompt."""
        self._reserved[blocks] = np.maximum(self._reserved[blocks], num_top)

    def drop_reservations(self) -> None:
        """Drop all reservations; sequences that still need one must reserve again."""
        self._reserved[:] = self.num_top

    def send_chunk(
        self,
        row: int,
        prompt_ids: NDArray[np.int32],
        table: NDArray[np.int32],
        start: int,
        end: int,
        num_top: int,
        may_repeat: bool = False,
    ) -> PromptLogprobChunk:
        """Record what the step being built computes: the prompt's positions `start` to before `end`, and the logprob of
        the token after each. table: block table of the prompt's slot. A prompt's last chunk may have no such token.
        may_repeat: some of these may be there, where layers with windows lack what they see: those stay."""
        page_size = self._page_size
        positions = np.arange(start + 1, min(end + 1, len(prompt_ids)))
        blocks = table[positions // page_size]
        is_there = self.num_top[blocks] >= num_top
        assert may_repeat or not is_there.any(), "the logprobs of a block are computed twice"
        whole = table[start // page_size : end // page_size]
        self.num_top[whole] = np.maximum(self.num_top[whole], num_top)
        blocks = np.where(is_there, 0, blocks)
        kv_indices = blocks.astype(np.int64) * page_size + positions % page_size
        return PromptLogprobChunk(row, prompt_ids[start + 1 : end + 1], kv_indices, num_top)

    def note(self, chunks: Iterable[PromptLogprobChunk], output: PromptLogprobsOutput) -> None:
        """Store the results of a step that computed `chunks`, even of sequences that have left: others may use them."""
        start = 0
        for chunk in chunks:  # one by one: two may contain the same token, with different rounding
            end, kv_indices = start + len(chunk.kv_indices), chunk.kv_indices
            self._logprobs[kv_indices] = output.logprobs[start:end]
            self._ranks[kv_indices] = output.ranks[start:end]
            self._note_top(kv_indices, output.top_ids[start:end], output.top_logprobs[start:end])
            start = end
        assert start == len(output.logprobs), f"{len(output.logprobs)} prompt logprobs, {start} expected"

    def _note_top(
        self, kv_indices: NDArray[np.int64], top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]
    ) -> None:
        """Store top-k entries [Q, K] under Q kv indices."""
        first, num_top = 0, top_ids.shape[1]
        for columns in self._top:
            if first >= num_top:
                return
            end = min(first + columns.ids.shape[1], num_top)
            columns.ids[kv_indices, : end - first] = top_ids[:, first:end]
            columns.logprobs[kv_indices, : end - first] = top_logprobs[:, first:end]
            first = end

    def read(self, table: NDArray[np.int32], num_tokens: int, num_top: int) -> PromptLogprobs:
        """The logprobs of a prompt of `num_tokens` tokens with block table `table`.

        Precondition: the results of all steps that computed its blocks' logprobs have arrived. The first token
        has none: its logprobs are NaN, its rank and top-k ids 0.
        """
        positions, page_size = np.arange(num_tokens), self._page_size
        kv_indices = table[positions // page_size].astype(np.int64) * page_size + positions % page_size
        logprobs, ranks = self._logprobs[kv_indices], self._ranks[kv_indices]
        logprobs[0], ranks[0] = np.nan, 0
        top = None
        if num_top:
            ids = np.concatenate([columns.ids[kv_indices] for columns in self._top], axis=1)[:, :num_top]
            values = np.concatenate([columns.logprobs[kv_indices] for columns in self._top], axis=1)[:, :num_top]
            ids[0], values[0] = 0, np.nan
            top = TopLogprobs(ids, values)
        return PromptLogprobs(logprobs, ranks, top)


def num_leading(num_top_of_blocks: NDArray[np.int32], num_top: int) -> int:
    """How many leading entries are at least `num_top`."""
    has_logprobs = num_top_of_blocks >= num_top
    return len(has_logprobs) if has_logprobs.all() else int(has_logprobs.argmin())


def first_position(num_blocks_with_logprobs: int, page_size: int) -> int:
    """First position that a prompt with `num_blocks_with_logprobs` leading blocks must compute: the last
    position in those blocks, whose logits give the next token's logprob."""
    return max(0, num_blocks_with_logprobs * page_size - 1)
