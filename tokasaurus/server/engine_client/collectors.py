"""Collectors of one call's deltas: `Results` waits for whole sequences, `StreamCollector` hands deltas on."""

import asyncio
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.commands import FIRST_VERSIONS, WeightVersions
from tokasaurus.messages.forward import RoutedExperts
from tokasaurus.messages.generation import FinishReason, GenerateRequest, PromptLogprobs, SequenceDelta, TopLogprobs

MAX_MERGED_TOKENS = 1024
BYTES_OF_VALUE = 8
"""Bytes of experts that are as much work as a token or a logprob."""
VALUES_PER_DELTA = 16
"""Work of an event, as a multiple of the work of one of its values."""


def values_per_token(delta: SequenceDelta) -> int:
    """Values that an answer has for each token of the delta: the token, its logprob, its top-k logprobs."""
    num_top = 0 if delta.top is None else delta.top.token_ids.shape[1]
    return 1 + (delta.logprobs is not None) + num_top


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
    weight_versions: WeightVersions = FIRST_VERSIONS
    """Complete once it has finished."""
    experts: RoutedExperts | None = None
    vector: NDArray[np.float32] | None = None
    end_number: int = field(default=0, compare=False)
    """Number of the sequence in the order in which the answer's sequences finished."""
    is_finished: bool = False
    """Whether the last delta has arrived."""
    num_values: int = 0
    """Its tokens and logprobs, as `values_per_token` counts them."""

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
        self.num_values += len(delta.token_ids) * values_per_token(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.weight_versions = delta.weight_versions
            self.experts = delta.experts
            self.vector = delta.vector
            self.num_values += 0 if delta.vector is None else len(delta.vector)
            self.is_finished = True
            if delta.experts is not None:
                self.num_values += delta.experts.nbytes // BYTES_OF_VALUE

    @property
    def top(self) -> TopLogprobs | None:
        """Top-k logprobs of all tokens; None if not requested."""
        return _join(self.top_parts) if self.top_parts else None


class AnswerTooLarge(Exception):
    """More values were collected for one answer than it may have."""


class Results:
    """The sequences of one `generate` call. `finished` is done when all of them have finished, or one was aborted.

    max_values: tokens and logprobs that all sequences together may have; None for no limit. Beyond it, `finished`
    raises AnswerTooLarge.
    """

    def __init__(self, requests: Sequence[GenerateRequest], max_values: int | None = None) -> None:
        # Objects are made when a sequence's first delta arrives: 65,536 of them at once would block the event loop.
        self._rows: list[list[FinishedSequence | None]] = [[None] * request.num_sequences for request in requests]
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_unfinished = sum(request.num_sequences for request in requests)
        self._max_values = sys.maxsize if max_values is None else max_values
        self._num_values = 0
        self._num_ends = 0

    @property
    def sequences(self) -> list[list[FinishedSequence]]:
        """The sequences of each request, in order. Precondition: `finished` is done, without an error."""
        return [[sequence for sequence in row if sequence is not None] for row in self._rows]

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        row = self._rows[request_index]
        sequence = row[delta.sequence_index]
        if sequence is None:
            sequence = row[delta.sequence_index] = FinishedSequence()
        self._num_values -= sequence.num_values
        sequence.append(delta)
        self._num_values += sequence.num_values
        if delta.error:
            self.fail(SequenceAborted(delta))
        elif self._num_values > self._max_values:
            self.fail(AnswerTooLarge(f"the answer has more than {self._max_values} values"))
        if delta.finish_reason is not None:
            sequence.end_number = self._num_ends
            self._num_ends += 1
            self._num_unfinished -= 1
            if self._num_unfinished == 0 and not self.finished.done():
                self.finished.set_result(None)

    def restart(self, request_index: int) -> bool:
        """Forgets everything that came for this request, because the engine will run it again from the start.

        Returns True: nothing of it has been read. Precondition: the request has an unfinished sequence.
        """
        row = self._rows[request_index]
        for sequence in row:
            if sequence is not None:
                self._num_unfinished += sequence.is_finished
                self._num_values -= sequence.num_values
        row[:] = [None] * len(row)
        return True

    def fail(self, error: Exception) -> None:
        """Makes `finished` raise `error`, unless it is done."""
        if not self.finished.done():
            self.finished.set_exception(error)


class StreamCollector:
    """The unread deltas of one `stream` call, merged per sequence: a slow reader gets fewer and longer deltas.

    After each `read`, the reader says whether it has sent anything (`note_sent`, `note_nothing_sent`). Until it has,
    what was read is kept: if a request is restarted, the reader begins anew with the deltas of the others.
    """

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self._num_sequences = [request.num_sequences for request in requests]
        self._num_unread_last_deltas = sum(self._num_sequences)
        # (request index, sequence index) -> its unread deltas; the sequence that has waited longest comes first.
        self._unread: OrderedDict[tuple[int, int], list[SequenceDelta]] = OrderedDict()
        self._begun_requests: set[int] = set()  # the client may have received something of these
        self._num_read_last_deltas = Counter[int]()  # by request index
        self.begins_anew = False
        """Whether earlier reads are void: the last result contains all that still counts."""
        self._restarted: set[int] = set()  # since the last read
        self._last_read: list[tuple[int, SequenceDelta]] = []
        self._kept: list[tuple[int, SequenceDelta]] = []  # read before, while nothing has been sent
        self._has_sent = False
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def add(self, request_index: int, delta: SequenceDelta) -> None:
        """request_index: position of the delta's request in the call's requests."""
        key = (request_index, delta.sequence_index)
        parts = self._unread.get(key)
        if parts is None:
            self._unread[key] = [delta]
        else:
            parts.append(delta)
            # Merging only small parts of similar size copies each token a few times: with all in one part, a late
            # reader's tokens would be copied at each step, and with each delta kept, they would take ten times the
            # memory.
            while len(parts) > 1 and len(parts[-2].token_ids) <= len(parts[-1].token_ids) < MAX_MERGED_TOKENS:
                parts[-2:] = [_merge(parts[-2:])]
        if delta.error:
            self.fail(SequenceAborted(delta))
        self._has_news.set()

    async def read(self, max_values: int = sys.maxsize) -> list[tuple[int, SequenceDelta]]:
        """(request index, delta) of sequences with unread deltas, longest waiting first; waits until there is one.

        max_values: approximate work of turning the result into events, as `values_per_token` for each token and
        VALUES_PER_DELTA for each delta. A longer delta is split, and the rest is left for the next call. If the reader
        `begins_anew`, deltas that were read before come in addition.

        Empty once the last delta of every sequence has been read. Raises SequenceAborted and the error of `fail`.
        """
        if self._num_unread_last_deltas == 0:
            return []
        while not self._unread and self._error is None:
            self._has_news.clear()
            await self._has_news.wait()
        if self._error is not None:
            raise self._error
        deltas: list[tuple[int, SequenceDelta]] = []
        while self._unread and max_values > 0:
            key, parts = self._unread.popitem(last=False)
            per_token = values_per_token(parts[0])
            # At least one token, so that each call makes progress.
            taken, rest = _take_tokens(parts, max(1, (max_values - VALUES_PER_DELTA) // per_token))
            max_values -= VALUES_PER_DELTA + len(taken.token_ids) * per_token
            if rest:
                self._unread[key] = rest
                self._unread.move_to_end(key, last=False)
            self._begun_requests.add(key[0])
            if taken.finish_reason is not None:
                self._num_unread_last_deltas -= 1
                self._num_read_last_deltas[key[0]] += 1
            deltas.append((key[0], taken))
            if rest:
                break  # each sequence has at most one new delta in a result
        return deltas if self._has_sent else self._without_void(deltas)

    def restart(self, request_index: int) -> bool:
        """Forgets everything that came for this request, because the engine will run it again from the start.

        False, and nothing changes, if the client may have received a part of it. Precondition: the request has an
        unfinished sequence.
        """
        if request_index in self._begun_requests:
            return False
        self._num_unread_last_deltas += self._num_read_last_deltas.pop(request_index, 0)
        if not self._has_sent:
            self._restarted.add(request_index)
        for sequence_index in range(self._num_sequences[request_index]):
            self._unread.pop((request_index, sequence_index), None)
        return True

    def _without_void(self, deltas: list[tuple[int, SequenceDelta]]) -> list[tuple[int, SequenceDelta]]:
        """The result of a read before anything was sent. deltas: the new ones."""
        still_valid = [read for read in self._kept if read[0] not in self._restarted]
        self._restarted.clear()
        self._begun_requests.update(index for index, _ in still_valid)
        self.begins_anew = len(still_valid) < len(self._kept)
        if self.begins_anew:
            self._kept = []
            deltas = still_valid + deltas
        self._last_read = deltas
        return deltas

    def note_nothing_sent(self) -> None:
        """The last read gave nothing to send. If nothing was sent before, every request may still be restarted."""
        if not self._has_sent:
            self._kept += self._last_read
            self._last_read = []
            self._begun_requests.clear()

    def note_sent(self) -> None:
        """The client receives something: what was read so far is never void."""
        if not self._has_sent:
            self._has_sent, self.begins_anew, self._kept, self._last_read = True, False, [], []
            self._restarted.clear()

    def fail(self, error: Exception) -> None:
        """Makes the waiting or next `read` raise `error`, unless everything has been read. The first error counts."""
        if self._error is None:
            self._error = error
        self._has_news.set()


def _take_tokens(parts: list[SequenceDelta], max_tokens: int) -> tuple[SequenceDelta, list[SequenceDelta]]:
    """The first `max_tokens` tokens of consecutive deltas as one delta, and the deltas of the rest.

    All of them if there are no more tokens. A rest has tokens, so the last delta keeps the end token.
    """
    num_tokens = 0
    for index, part in enumerate(parts):
        num_missing = max_tokens - num_tokens
        if len(part.token_ids) > num_missing:
            if num_missing == 0:
                return _merge(parts[:index]), parts[index:]
            return _merge([*parts[:index], _cut(part, 0, num_missing)]), [
                _cut(part, num_missing, len(part.token_ids)),
                *parts[index + 1 :],
            ]
        num_tokens += len(part.token_ids)
    return _merge(parts), []


def _cut(delta: SequenceDelta, start: int, end: int) -> SequenceDelta:
    """The tokens `start` to `end` of a delta; all that comes once is in the first or the last part."""
    is_last = end == len(delta.token_ids)
    return replace(
        delta,
        token_ids=delta.token_ids[start:end],
        logprobs=None if delta.logprobs is None else delta.logprobs[start:end],
        top=None if delta.top is None else TopLogprobs(delta.top.token_ids[start:end], delta.top.logprobs[start:end]),
        finish_reason=delta.finish_reason if is_last else None,
        experts=delta.experts if is_last else None,
        prompt_logprobs=delta.prompt_logprobs if start == 0 else None,
    )


def _merge(parts: list[SequenceDelta]) -> SequenceDelta:
    """One delta with the tokens of consecutive deltas; at least one."""
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    tops = [part.top for part in parts if part.top is not None]
    return replace(
        parts[-1],
        token_ids=list(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        top=_join(tops) if tops else None,
        prompt_logprobs=parts[0].prompt_logprobs,  # only the first delta has it
    )
