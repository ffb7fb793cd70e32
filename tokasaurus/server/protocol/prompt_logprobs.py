"""What the model says of a prompt's tokens, in the shape of vLLM's `prompt_logprobs`."""

from dataclasses import dataclass
from typing import Annotated

import orjson
from pydantic import PlainValidator, WithJsonSchema


@dataclass(frozen=True, slots=True)
class PromptTokenLogprob:
    """rank: 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per token of the prompt: by token id, that token and the likeliest at its place. Null for the first.
PromptTokenLogprobs = list[dict[str, PromptTokenLogprob] | None]

# As JSON: an answer may have millions of entries, which as objects would take gigabytes.
WrittenPromptLogprobs = Annotated[
    orjson.Fragment,
    PlainValidator(lambda value: value),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "additionalProperties": {
                            "type": "object",
                            "properties": {
                                "logprob": {"type": "number"},
                                "rank": {"type": "integer"},
                                "decoded_token": {"type": "string"},
                            },
                            "required": ["logprob", "rank", "decoded_token"],
                        },
                    },
                    {"type": "null"},
                ]
            },
        }
    ),
]
