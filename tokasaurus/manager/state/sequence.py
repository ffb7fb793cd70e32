"""Sequences: the request of each, its slot and blocks while it runs, and what it keeps across preemption."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode
from tokasaurus.manager.state.grammar_matcher import GrammarMatcher
from tokasaurus.manager.state.token_filter import FilterMasks
from tokasaurus.messages.commands import WeightVersions
from tokasaurus.messages.forward import RoutedExperts
from tokasaurus.messages.generation import GenerateRequest, PromptLogprobs, TopLogprobs
from tokasaurus.text.stop_strings import StopMatcher


class Phase(Enum):
    """Stage of a sequence's life."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DRAINING = 3
    """Every step it may need is sent; the last results have not arrived."""
    FINISHED = 4


@dataclass(slots=True)
class Prompt:
    """Tokens to prefill before the next one is sampled.

    All samples of a request share one object, so equal prompts are recognised by identity.
    """

    token_ids: NDArray[np.int32]
    """[P]"""
    token_bytes: bytes
    """`token_ids` as bytes."""

    def __len__(self) -> int:
        return len(self.token_ids)


def make_prompt(token_ids: NDArray[np.int32]) -> Prompt:
    return Prompt(token_ids, token_ids.tobytes())


class KeptTop:
    """Top-k logprobs of every token that one sequence has sampled, kept across preemption. count: k."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids = bytearray()
        self._logprobs = bytearray()

    def append(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add the top-k logprobs of the next token. Both arrays have at least `count` entries, most likely first."""
        self._ids += token_ids[: self._count].tobytes()
        self._logprobs += logprobs[: self._count].tobytes()

    def part(self, start: int, end: int) -> TopLogprobs:
        """A copy of the entries for sampled tokens `start` to before `end`."""
        own = slice(4 * self._count * start, 4 * self._count * end)
        ids = np.frombuffer(bytes(self._ids[own]), np.int32)
        logprobs = np.frombuffer(bytes(self._logprobs[own]), np.float32)
        assert len(ids) == self._count * (end - start), f"{len(ids)} top-k entries for tokens {start} to {end}"
        return TopLogprobs(ids.reshape(-1, self._count), logprobs.reshape(-1, self._count))


@dataclass(slots=True)
class TokenCounts:
    """How tokens were processed, for one sequence or for all since start."""

    asked: int = 0
    """Prompt tokens, counted when the sequence first starts; asked = cached + computed unless cancelled."""
    cached: int = 0
    """Prompt tokens read from the cache before the sequence had computed them, at its first start or a later one."""
    computed: int = 0
    """Prompt tokens that the sequence computed, each counted once."""
    recomputed: int = 0
    """Prompt or sampled tokens computed again: their KV had been available before a preemption."""
    shared: int = 0
    """Prompt tokens in the longest prefix attended to in a prefix group. A sequence's own count is updated when it
    leaves its slot, as is its count of tokens recomputed by decode steps; `shared` in the totals is updated at once."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. State that changes with every step is in SlotArrays."""

    request: GenerateRequest
    index: int
    """Which of the request's samples."""
    prompt: Prompt
    """The request's prompt, followed by the tokens sampled before the last preemption."""
    salt: bytes
    """Separates prefix caches: only prompts with the same salt share blocks."""
    stop_matcher: StopMatcher | None
    """Finds its stop strings; None without any."""
    stop_row: int = 0
    """Row of StopTokens.may_end for its stop strings."""
    phase: Phase = Phase.WAITING
    slot: int = 0
    """Batch slot; 0 while waiting."""
    is_open: bool = False
    """A step that opens the slot has been built."""
    table_is_sent: bool = False
    """The worker has the blocks of its whole prompt."""
    node: PrefixNode | None = None
    """Deepest prefix tree node that it uses; None while waiting."""
    num_tree_blocks: int = 0
    """Leading blocks of its block table that belong to the prefix tree; the sequence owns the others."""
    num_cached_blocks: int = 0
    """Leading blocks of its block table that it does not compute, or computes again, while it is new to the worker."""
    snapshot_block: int = 0
    """The block whose snapshot its states start from; 0: they start from zeros, or have started."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Snapshots that it has promised: after how many tokens, ascending, and of which block."""
    num_cached_tokens: int | None = None
    """Prompt tokens read from the cache when it first started; None before."""
    num_kv_tokens_before: int = 0
    """Largest number of tokens with KV when it left a slot; 0 before that."""
    num_streamed_tokens: int = 0
    """Sampled tokens already in deltas; 0 if it is not streamed."""
    admitted_s: float = 0.0
    """Time of its first admission, as in SequenceTimes."""
    first_token_s: float = 0.0
    """Time of its first token, as in SequenceTimes."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    kept_token_ids: list[int] = field(default_factory=list)
    """Tokens sampled before its last preemption."""
    kept_logprobs: list[float] = field(default_factory=list)
    """Logprobs of `kept_token_ids`, if requested."""
    kept_top: KeptTop | None = None
    """Top-k logprobs of all its sampled tokens; None if not requested."""
    needs_prompt_logprobs: bool = False
    """Its prefill computes prompt logprobs: the request asks for them, this is its first sample, and they are not known
    yet."""
    prompt_logprobs: PromptLogprobs | None = None
    """Set once known, until a delta carries them."""
    kept_experts: RoutedExperts | None = None
    """Experts of all tokens before its last preemption but the last, if requested."""
    vector: NDArray[np.float32] | None = None
    """As of SequenceDelta, once known."""
    weight_versions: WeightVersions = ()
    """Set if `kept_token_ids` has tokens of earlier weights than the present ones."""
    token_masks: FilterMasks | None = None
    """Token masks of the request's token filter; None without one."""
    grammar_matcher: GrammarMatcher | None = None
    """None without a grammar, or until it is compiled."""

    @property
    def may_stop(self) -> bool:
        """Whether it may end before max_new_tokens."""
        request = self.request
        if request.max_new_tokens == 0:
            return False
        may_end_anywhere = not request.ignore_eos or self.stop_matcher is not None or self.needs_results
        return may_end_anywhere or len(request.stop_token_ids) > 0

    @property
    def has_grammar(self) -> bool:
        return self.request.grammar != "" and self.request.max_new_tokens > 0

    @property
    def needs_results(self) -> bool:
        """Each mask depends on the token before, so that no step may run ahead of the results."""
        return self.has_grammar or (self.token_masks is not None and self.token_masks.num_read_tokens > 0)

    @property
    def max_sampled_tokens(self) -> int:
        """At least 1: the step that completes the prefill samples a token even if none is requested."""
        return max(1, self.request.max_new_tokens)

    @property
    def max_kv_tokens(self) -> int:
        """KV tokens at its maximum length: the KV of the last token is never needed."""
        return len(self.request.prompt_ids) + self.max_sampled_tokens - 1


@dataclass(slots=True, eq=False)
class Samples:
    """A request's unfinished sequences. Creating 65,536 at once would take a third of a second."""

    request: GenerateRequest
    make: Callable[[int], Sequence]
    """Sample index -> a new sequence."""
    num_to_create: int
    """Waiting samples without a sequence, the last ones; 0 once the request is cancelled."""
    sequences: dict[Sequence, None] = field(default_factory=dict)
    """Sequences that were created and have not finished, in order of their index."""
    added_s: float = field(default_factory=time.monotonic)
    """When the request arrived, by time.monotonic."""
    is_cancelled: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether any of its sequences waits."""
        if self.num_to_create > 0:
            return True
        for sequence in self.sequences:  # noqa: SIM110  (a generator would take twice as long)
            if sequence.phase is Phase.WAITING:
                return True
        return False

    def create(self) -> Sequence:
        """The next sequence. Precondition: num_to_create is not 0."""
        sequence = self.make(self.request.num_sequences - self.num_to_create)
        self.num_to_create -= 1
        self.sequences[sequence] = None
        return sequence
