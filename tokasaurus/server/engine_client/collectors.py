"""Collectors of one call's deltas: `Results` waits for whole sequences, `StreamCollector` hands deltas on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokasaurus.messages.generation import FinishReason, GenerateRequest, PromptLogprobs, SequenceDelta, TopLogprobs


class SequenceAborted(Exception):
    """The engine aborted a sequence. The message is the reason, in one line."""

    def __init__(self, delta: SequenceDelta) -> None:
        super().__init__(delta.error)
        self.code = delta.error_code


def _join(parts: Sequence[TopLogprobs]) -> TopLogprobs:
    """Concatenates the top-k logprobs of consecutive tokens; at least one part."""
    ids, logprobs = [part.token_ids for part in parts], [part.logprobs for part in parts]
    return TopLogprobs(np.concatenate(ids), np.concatenate(logprobs))


@dataclass(slots=True)
class FinishedSequence:
    """The deltas of one sequence, added up. Until the last delta, what has arrived so far.

    Fields without an explanation are explained in SequenceDelta.
    """

    token_ids: list[int] = field(default_factory=list)
    """All tokens as sampled, including the eos token or the tokens of a stop string."""
    logprobs: list[float] | None = None
    """One per token; None if not requested."""
    finish_reason: FinishReason = "length"
    """Valid after the last delta."""
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_shared_tokens: int = 0
    top_parts: list[TopLogprobs] = field(default_factory=list)
    """Top-k logprobs of all tokens, in parts as they arrived; empty if not requested."""
    prompt_logprobs: PromptLogprobs | None = None

    def append(self, delta: SequenceDelta) -> None:
        """Adds the sequence's next delta."""
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        if delta.top is not None:
            self.top_parts.append(delta.top)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_computed_tokens = delta.num_computed_tokens
        self.num_recomputed_tokens = delta.num_recomputed_tokens
        self.num_shared_tokens = delta.num_shared_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason

    @property
    def top(self) -> TopLogprobs | None:
        """Top-k logprobs of all tokens; None if not requested."""
        return _join(self.top_parts) if self.top_parts else None


class Results:
    """The sequences of one `generate` call. `finished` is done when all of them have finished, or one was aborted."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.sequences = [[FinishedSequence() for _ in range(request.num_sequences)] for request in requests]
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_unfinished = sum(request.num_sequences for request in requests)

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        self.sequences[request_index][delta.sequence_index].append(delta)
        if delta.error and not self.finished.done():
            self.finished.set_exception(SequenceAborted(delta))
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0 and not self.finished.done():
                self.finished.set_result(None)


class StreamCollector:
    """The unread deltas of one `stream` call, merged per sequence: a slow reader gets fewer and longer deltas."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self._num_unread_last_deltas = sum(request.num_sequences for request in requests)
        self._unread: dict[tuple[int, int], SequenceDelta] = {}
        self._has_unread = asyncio.Event()

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        """request_index: position of the delta's request in the call's requests."""
        key = (request_index, delta.sequence_index)
        before = self._unread.get(key)
        if before is not None:
            before.token_ids.extend(delta.token_ids)
            if before.logprobs is not None and delta.logprobs is not None:
                before.logprobs.extend(delta.logprobs)
            top = None if before.top is None or delta.top is None else _join((before.top, delta.top))
            delta = replace(
                delta,
                token_ids=before.token_ids,
                logprobs=before.logprobs,
                top=top,
                prompt_logprobs=before.prompt_logprobs,  # only the first delta has it
            )
        self._unread[key] = delta
        self._has_unread.set()

    async def read(self) -> list[tuple[int, SequenceDelta]]:
        """(request index, delta) of each sequence with an unread delta; waits until there is at least one.

        Empty once the last delta of every sequence has been read. Raises SequenceAborted.
        """
        if self._num_unread_last_deltas == 0:
            return []
        await self._has_unread.wait()
        self._has_unread.clear()
        deltas = [(request_index, delta) for (request_index, _), delta in self._unread.items()]
        for _, delta in deltas:
            if delta.error:
                raise SequenceAborted(delta)
        self._unread = {}
        self._num_unread_last_deltas -= sum(delta.finish_reason is not None for _, delta in deltas)
        return deltas
