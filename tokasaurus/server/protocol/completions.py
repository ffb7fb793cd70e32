"""Bodies of /v1/completions, and choices in the chunks of its streams, as OpenAI's reference documents them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.protocol.answers import Usage, WrittenPromptLogprobs
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, NullMeans, Text, TokenId, as_integers, value_error
from tokasaurus.server.protocol.known_fields import with_known_fields
from tokasaurus.server.protocol.sampling_fields import SamplingFields

Prompt = str | list[int]


def _wrong_prompt() -> PydanticCustomError:
    return value_error("must be a string, a list of token ids, a list of strings or a list of lists of token ids")


def _parse_prompts(value: object) -> list[Prompt]:
    """Normalise the four forms that OpenAI allows to a list of prompts, all strings or all lists of token ids."""
    prompts: list[Prompt]
    if isinstance(value, str):
        prompts = [value]
    elif not isinstance(value, list):
        raise _wrong_prompt()
    elif _is_token_ids(value):
        prompts = [as_integers(value)]
    elif all(isinstance(item, str) for item in value):
        prompts = value
    elif all(_is_token_ids(item) for item in value):
        prompts = list(map(as_integers, value))
    else:
        raise _wrong_prompt()
    if not all(prompts):
        raise value_error("must not be empty")
    return prompts


def _is_token_ids(value: object) -> bool:
    """Refuses bool, a subclass of int."""
    if not isinstance(value, list):
        return False
    types = set(map(type, value))
    return types <= {int} or (types <= {int, float} and set(map(type, as_integers(value))) <= {int})


_TokenIds = Annotated[list[TokenId], Field(min_length=1)]
_PromptList = Annotated[list[Text], Field(min_length=1)] | Annotated[list[_TokenIds], Field(min_length=1)]

Prompts = Annotated[list[Prompt], PlainValidator(_parse_prompts, Text | _TokenIds | _PromptList)]


def _as_number(value: object) -> object:
    """1 for true, null for false: how clients that know the field of chat ask."""
    return (1 if value else None) if isinstance(value, bool) else value


_NumberOrTruth = BeforeValidator(_as_number, json_schema_input_type=Annotated[int, Field(ge=0)] | bool | None)


@with_known_fields("completions")
class CompletionRequest(SamplingFields):
    """prompt: one or more prompts.
    logprobs: return the log-probability of each sampled token and of this many most likely tokens; true is 1, false
    none.
    echo: put the prompt's text, and with logprobs its tokens, before the completion.
    max_tokens: may be 0 with echo.
    ignore_eos (our extension): generate max_tokens tokens even if the model samples eos.
    """

    prompt: Prompts
    logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS, _NumberOrTruth] = None
    echo: Annotated[bool, NullMeans(False)] = False
    max_tokens: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None

    @property
    def num_sequences(self) -> int:
        return self.n * len(self.prompt)


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """Four lists of equal length, one entry per token.

    token_logprobs: null for the first token of an echoed prompt.
    top_logprobs: by token text, including the sampled token, which is alone at logprobs=0; the entry is null for the
    first token of an echoed prompt.
    text_offset: in characters of the choice's `text`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ExtendedCompletionChoice(CompletionChoice):
    """Returned with return_token_ids or prompt_logprobs; fields not requested are null. token_ids: as sampled."""

    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: WrittenPromptLogprobs | None


@dataclass(frozen=True, slots=True)
class Completion:
    """choices: ordered by prompt, then by sample."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice | ExtendedCompletionChoice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class CompletionChunkChoice:
    """text, logprobs: new since the previous chunk. finish_reason: only on the last chunk of the choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class CompletionChunkChoiceWithIds(CompletionChunkChoice):
    """Returned with return_token_ids. token_ids: new since the previous chunk. prompt_token_ids: only on the choice's
    first chunk."""

    token_ids: list[int]
    prompt_token_ids: list[int] | None
