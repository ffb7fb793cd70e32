"""Token counts of an answer, added up as its deltas arrive: reading them costs the same for any number of sequences."""

import sys
from dataclasses import dataclass

from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import PromptTokensDetails, Usage


@dataclass(slots=True)
class _RequestCount:
    """One request of the body."""

    num_missing: int
    """Sequences of which nothing has arrived."""
    fewest_cached: int = sys.maxsize
    """Of the others, the fewest cached tokens."""


class UsageCounter:
    """Counts one answer, whole or streamed."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._prompt_tokens = sum(len(request.prompt_ids) for request in prepared.requests)
        self._completion_tokens = self._cached = self._computed = self._shared = self._recomputed = 0
        self._requests: dict[int, _RequestCount] = {}  # by request index, from the first delta on
        # (request index, sequence index) -> (computed, shared, recomputed) so far of an unfinished sequence
        self._counted: dict[tuple[int, int], tuple[int, int, int]] = {}

    def add(self, request_index: int, sequence_index: int, delta: SequenceDelta | FinishedSequence) -> None:
        key = (request_index, sequence_index)
        before = self._counted.pop(key, None)
        if before is None:
            self._add_cached(request_index, delta.num_cached_tokens)
            before = (0, 0, 0)
        now = (delta.num_computed_tokens, delta.num_shared_tokens, delta.num_recomputed_tokens)
        if delta.finish_reason is None:
            self._counted[key] = now
        self._completion_tokens += len(delta.token_ids)
        self._computed += now[0] - before[0]
        self._shared += now[1] - before[1]
        self._recomputed += now[2] - before[2]

    def _add_cached(self, request_index: int, num_cached: int) -> None:
        """Of a request's samples, the one with the fewest cached tokens computed all that earlier requests had not
        cached. The other samples may have read some of that from the cache, which is not counted.
        """
        count = self._requests.get(request_index)
        if count is None:
            count = _RequestCount(self._prepared.requests[request_index].num_sequences)
            self._requests[request_index] = count
        count.num_missing -= 1
        count.fewest_cached = min(count.fewest_cached, num_cached)
        if count.num_missing == 0:
            self._cached += count.fewest_cached

    def usage(self) -> Usage:
        """The counts of all that was added."""
        details = PromptTokensDetails(self._cached, self._computed, self._shared, self._recomputed)
        total = self._prompt_tokens + self._completion_tokens
        return Usage(self._prompt_tokens, self._completion_tokens, total, details)
