"""Bodies of /v1/completions, as OpenAI's reference documents them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from tokasaurus.server.protocol.prompt_logprobs import WrittenPromptLogprobs
from tokasaurus.server.protocol.sampling_fields import NullMeans, Only, SamplingFields, value_error
from tokasaurus.server.protocol.usage import Usage

Prompt = str | list[int]


def _parse_prompts(value: object) -> list[Prompt]:
    """One shape for the four that OpenAI allows: a list of prompts, all of them strings or all token ids."""
    prompts: list[Prompt]
    if isinstance(value, str):
        prompts = [value]
    elif not isinstance(value, list):
        raise _wrong_prompt()
    elif set(map(type, value)) <= {int}:  # not bool, which is an int too
        prompts = [value]
    elif all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
        prompts = value
    else:
        raise _wrong_prompt()
    if not all(prompts):
        raise value_error("must not be empty")
    return prompts


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _wrong_prompt() -> PydanticCustomError:
    return value_error("must be a string, a list of token ids, a list of strings or a list of lists of token ids")


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    list[Prompt],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKEN_IDS_SCHEMA,
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields):
    """prompt: one or more prompts. logprobs: those of each chosen token and of so many of the likeliest.
    echo: the prompt's text, and with logprobs its tokens, come before the completion. max_tokens: 0 goes with echo.

    ignore_eos (an extension of ours): generate max_tokens tokens whatever the model says.
    """

    prompt: Prompts
    logprobs: Annotated[int | None, Field(ge=0)] = None
    echo: Annotated[bool, NullMeans(False)] = False
    max_tokens: Annotated[int | None, Field(ge=0)] = None

    best_of: Annotated[int | None, Field(ge=1)] = None  # must equal n
    suffix: Annotated[Any, Only(None)] = None


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """Four lists of one length, one entry per token. text_offset: in characters of the choice's `text`.
    top_logprobs: by the tokens' texts, the chosen token's included; None where only chosen ones were asked for.
    Of the first token of an echoed prompt both are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ExtendedCompletionChoice(CompletionChoice):
    """With return_token_ids or prompt_logprobs; null where not asked. token_ids: as sampled."""

    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: WrittenPromptLogprobs | None


@dataclass(frozen=True, slots=True)
class Completion:
    """choices: by prompt, then by sample."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice | ExtendedCompletionChoice]
    usage: Usage
