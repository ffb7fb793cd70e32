"""Prompt logprobs in a response, in the format of vLLM's `prompt_logprobs`."""

from dataclasses import dataclass
from typing import Annotated

import orjson
from pydantic import PlainValidator, WithJsonSchema


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
