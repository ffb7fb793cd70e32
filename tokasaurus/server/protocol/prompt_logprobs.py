"""What the model says of a prompt's tokens, in the shape of vLLM's `prompt_logprobs`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptTokenLogprob:
    """rank: 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per token of the prompt: by token id, that token and the likeliest at its place. Null for the first.
PromptTokenLogprobs = list[dict[str, PromptTokenLogprob] | None]
