"""Token counts of one answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """cached_tokens: of the prompt tokens, each prompt's once, those that none of its sequences had to compute; the KV
    may stem from an earlier request or from another prompt of this one.

    The others are ours, and sums over all sequences; together these were asked n times the prompt tokens.
    computed_tokens: prompt tokens computed; those computed twice after preemption count once. All others were read from
    the cache, or computed for another sequence.
    shared_tokens: prompt tokens attended to in a group with other sequences, in any step.
    recomputed_tokens: tokens, of the prompt or the completion, that were computed again after preemption.
    """

    cached_tokens: int
    computed_tokens: int
    shared_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt once, whatever n is. completion_tokens: over all choices, eos included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
