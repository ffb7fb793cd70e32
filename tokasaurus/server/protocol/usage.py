"""Token counts of one answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt once, whatever n is. completion_tokens: over all choices, eos included.

    prompt_tokens_details.cached_tokens: of the prompt tokens, each prompt's once, those that none of its sequences had
    to compute; the KV may stem from an earlier request or from another prompt of this one.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
