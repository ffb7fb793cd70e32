"""One sequence: its prompt, its counters, its block table, and the tokens sampled so far."""

from dataclasses import dataclass, field
from enum import Enum

from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.text.stop_strings import StopMatcher


class Phase(Enum):
    """Where a sequence is. DRAINING: every step it may need is sent, the last results are not back."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DRAINING = 3
    FINISHED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the completions that a request asks for.

    One counter tells how far the steps sent so far go, because a decode step writes the KV of the token sampled by the
    step before: with P prompt tokens, `num_kv_tokens` = P means that the first token is being sampled, P + 1 that the
    second is. The KV of the last token is never needed, so `max_kv_tokens` = P + max_new_tokens - 1.

    eos_ids: tokens that end it; empty where eos is ignored.
    stop_matcher: finds its stop strings; None where it has none.
    slot: the worker's batch slot, 0 while waiting. slot_is_open: the worker has been told.
    num_covered_tokens: tokens for which the blocks of `block_table` suffice.
    token_ids, logprobs: as sampled, of the results that are back; logprobs None where not asked.
    """

    request: GenerateRequest
    index: int
    num_prompt_tokens: int
    max_kv_tokens: int
    max_blocks: int
    eos_ids: frozenset[int]
    stop_matcher: StopMatcher | None
    phase: Phase = Phase.WAITING
    slot: int = 0
    slot_is_open: bool = False
    num_kv_tokens: int = 0
    num_covered_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None


def make_sequence(
    request: GenerateRequest, index: int, page_size: int, eos_ids: frozenset[int], stop_matcher: StopMatcher | None
) -> Sequence:
    """A waiting sequence: the `index`-th of the request's. `eos_ids` are the model's."""
    num_prompt_tokens = len(request.prompt_ids)
    max_kv_tokens = num_prompt_tokens + request.max_new_tokens - 1
    return Sequence(
        request=request,
        index=index,
        num_prompt_tokens=num_prompt_tokens,
        max_kv_tokens=max_kv_tokens,
        max_blocks=-(-max_kv_tokens // page_size),
        eos_ids=frozenset() if request.ignore_eos else eos_ids,
        stop_matcher=stop_matcher,
        logprobs=[] if request.want_logprobs else None,
    )
