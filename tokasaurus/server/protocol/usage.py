"""Token counts of one response."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """cached_tokens: prompt tokens, counted once per prompt, that none of its sequences computed; their KV came from an
    earlier request or from another prompt of this one.

    The other fields are our extensions. They are sums over all sequences, which ask for n times the prompt tokens.
    computed_tokens: prompt tokens computed, each counted once even if computed again after preemption. The rest were
    read from the cache or computed for another sequence.
    shared_tokens: prompt tokens attended to in a group with other sequences in any step.
    recomputed_tokens: prompt and completion tokens computed again after preemption.
    """

    cached_tokens: int
    computed_tokens: int
    shared_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt once, for any n. completion_tokens: over all choices, including eos."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
