"""One sequence: what it was asked, what it holds while it runs, and what it keeps when it is preempted."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode
from tokasaurus.manager.state.grammar_matcher import GrammarMatcher
from tokasaurus.manager.state.top_logprobs import KeptTop
from tokasaurus.messages.generation import GenerateRequest, PromptLogprobs
from tokasaurus.text.stop_strings import StopMatcher


class Phase(Enum):
    """Where a sequence is. DRAINING: every step it may need is sent, the last results are not back."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DRAINING = 3
    FINISHED = 4


@dataclass(slots=True)
class Prompt:
    """What is prefilled before the next token is sampled: token_ids, int32 [P], and the same as bytes.

    One object serves all samples of a prompt, so that the same prompt is known without a comparison.
    """

    token_ids: NDArray[np.int32]
    token_bytes: bytes

    def __len__(self) -> int:
        return len(self.token_ids)


def make_prompt(token_ids: NDArray[np.int32]) -> Prompt:
    return Prompt(token_ids, token_ids.tobytes())


@dataclass(slots=True)
class TokenCounts:
    """What became of tokens: of one sequence, or of all since start.

    asked: prompt tokens, from when the sequence first starts; so asked = cached + computed where nobody was cancelled.
    cached: of them, those that it read before it had computed them itself, when it first started or when it came back.
    computed: of them, those that it computed, each once.
    recomputed: of the prompt or sampled, those that it computed again: it had had their KV before it was preempted.
    shared: of the prompt, the longest prefix that it attended to in a group. Counted when it leaves its slot, as are
    those that decode steps compute again; in the totals it is counted at once.
    """

    asked: int = 0
    cached: int = 0
    computed: int = 0
    recomputed: int = 0
    shared: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the completions that a request asks for. What changes with every step is in SlotArrays.

    prompt: the request's prompt, and after a preemption the tokens sampled before it as well.
    stop_matcher: finds its stop strings; None where it has none. stop_row: of StopTokens, for them.
    kept_token_ids, kept_logprobs: sampled before its last preemption.
    kept_top: of all that it has sampled; None where not asked.
    slot: the worker's batch slot, 0 while waiting. is_open: the worker has been told; table_is_sent:
    with all blocks of its prompt.
    node: the deepest node of the prefix tree that it holds, None while waiting.
    num_tree_blocks: the first blocks of its table that belong to the prefix tree; the others are its own.
    num_cached_tokens: prompt tokens read from the cache when it first started; None before that.
    num_kv_tokens_before: most tokens whose KV it had had when it left a slot.
    num_streamed_tokens: sampled tokens that are in deltas already; 0 where it is not streamed.
    scores_prompt: the tokens of its prompt are scored when it is prefilled: the request wants that, and it is the first
    of its sequences. prompt_logprobs: what came of it, once known; then a later prefill scores nothing.
    matching: where it is in its grammar; None where it has none, or waits for it.
    """

    request: GenerateRequest
    index: int
    prompt: Prompt
    salt: bytes
    stop_matcher: StopMatcher | None
    stop_row: int = 0
    phase: Phase = Phase.WAITING
    slot: int = 0
    is_open: bool = False
    table_is_sent: bool = False
    node: PrefixNode | None = None
    num_tree_blocks: int = 0
    num_cached_tokens: int | None = None
    num_kv_tokens_before: int = 0
    num_streamed_tokens: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)
    kept_token_ids: list[int] = field(default_factory=list)
    kept_logprobs: list[float] = field(default_factory=list)
    kept_top: KeptTop | None = None
    scores_prompt: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    grammar_matcher: GrammarMatcher | None = None

    @property
    def may_stop(self) -> bool:
        """Whether it may end before it has max_new_tokens."""
        request = self.request
        if request.max_new_tokens == 0:
            return False
        may_end_anywhere = not request.ignore_eos or self.stop_matcher is not None or self.has_grammar
        return may_end_anywhere or len(request.stop_token_ids) > 0

    @property
    def has_grammar(self) -> bool:
        return self.request.grammar != "" and self.request.max_new_tokens > 0

    @property
    def max_sampled_tokens(self) -> int:
        """The step that ends its prompt samples one even where none is wanted."""
        return max(1, self.request.max_new_tokens)

    @property
    def max_kv_tokens(self) -> int:
        """KV tokens at its longest: the KV of the last token is never needed."""
        return len(self.request.prompt_ids) + self.max_sampled_tokens - 1
