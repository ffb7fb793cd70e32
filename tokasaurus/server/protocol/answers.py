"""What all answers may contain: token counts, and prompt logprobs in the format of vLLM's `prompt_logprobs`."""

from dataclasses import dataclass
from typing import Annotated

import orjson
from pydantic import PlainSerializer, PlainValidator


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
class CompletionTokensDetails:
    """reasoning_tokens: over all choices, the tokens of reasoning and of its marks. 0 for completions."""

    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt once, for any n. completion_tokens: over all choices, including eos."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails(0)


@dataclass(frozen=True, slots=True)
class PromptTokenLogprob:
    """rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per prompt token: that token and the most likely ones at its position, by token id. Null for the first.
PromptTokenLogprobs = list[dict[str, PromptTokenLogprob] | None]

# Serialised JSON: a response may have millions of entries, which would take gigabytes as objects.
WrittenPromptLogprobs = Annotated[
    orjson.Fragment,
    PlainValidator(lambda value: value),
    PlainSerializer(lambda value: value, return_type=PromptTokenLogprobs),
]


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` of a completion, end excluded, are from the weights with this name."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """weight_version: the name of the weights of all replicas."""

    weight_version: str
