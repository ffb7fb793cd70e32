"""What comes of the sequences of one call, put together: awaited as a whole, or read while it comes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokasaurus.messages.generation import FinishReason, GenerateRequest, PromptLogprobs, SequenceDelta, TopLogprobs


class SequenceAborted(Exception):
    """Its grammar could not be followed; why, in one line."""


def _join(parts: Sequence[TopLogprobs]) -> TopLogprobs:
    """Those of one sequence's tokens, in order; at least one."""
    ids, logprobs = [part.token_ids for part in parts], [part.logprobs for part in parts]
    return TopLogprobs(np.concatenate(ids), np.concatenate(logprobs))


@dataclass(slots=True)
class FinishedSequence:
    """All tokens of one sequence, as sampled: the eos or stop string's tokens included. While deltas still come, what
    they add up to so far.

    logprobs: one per token; None where not asked. top_parts: likewise, as they came; empty where not asked. The numbers
    of tokens and prompt_logprobs are SequenceDelta's.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: FinishReason = "length"
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_shared_tokens: int = 0
    top_parts: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def append(self, delta: SequenceDelta) -> None:
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
        """Of all tokens; None where not asked."""
        return _join(self.top_parts) if self.top_parts else None


class Results:
    """The sequences of one `generate` call. `finished` is set when all of them are whole."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.sequences = [[FinishedSequence() for _ in range(request.num_sequences)] for request in requests]
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_unfinished = sum(request.num_sequences for request in requests)

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        self.sequences[request_index][delta.sequence_index].append(delta)
        if delta.error and not self.finished.done():
            self.finished.set_exception(SequenceAborted(delta.error))
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0 and not self.finished.done():
                self.finished.set_result(None)


class StreamCollector:
    """What has come of one `stream` call and has not been read. A reader who is slow gets fewer and longer deltas."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self._num_unread_ends = sum(request.num_sequences for request in requests)
        self._unread: dict[tuple[int, int], SequenceDelta] = {}
        self._has_unread = asyncio.Event()

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        """request_index: in the requests of the call."""
        place = (request_index, delta.sequence_index)
        before = self._unread.get(place)
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
                prompt_logprobs=before.prompt_logprobs,  # on a first delta alone
            )
        self._unread[place] = delta
        self._has_unread.set()

    async def read(self) -> list[tuple[int, SequenceDelta]]:
        """(index of the request, delta) of each sequence that has anything new, of which there is at least one, for
        which it waits; none once every sequence's last delta has been read. Raises SequenceAborted."""
        if self._num_unread_ends == 0:
            return []
        await self._has_unread.wait()
        self._has_unread.clear()
        deltas = [(request_index, delta) for (request_index, _), delta in self._unread.items()]
        for _, delta in deltas:
            if delta.error:
                raise SequenceAborted(delta.error)
        self._unread = {}
        self._num_unread_ends -= sum(delta.finish_reason is not None for _, delta in deltas)
        return deltas
