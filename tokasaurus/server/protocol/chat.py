"""Bodies of /v1/chat/completions, as OpenAI's reference documents them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from tokasaurus.server.protocol.sampling_fields import NullMeans, Only, SamplingFields, value_error
from tokasaurus.server.protocol.template_fields import TemplateFields
from tokasaurus.server.protocol.usage import Usage


def _parse_content(value: object) -> str:
    """A string, or the texts of its parts put together."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise value_error("must be a string or a list of text parts")
    return "".join(_parse_part(part) for part in value)


def _parse_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type", "text") != "text":
        raise PydanticCustomError("not_implemented", "holds a part that is not text, which is not implemented")
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise value_error('must hold parts with just "type": "text" and a string as "text"')
    return part["text"]


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}

Content = Annotated[
    str,
    PlainValidator(_parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]


def _parse_role(value: object) -> str:
    if value in ("tool", "function"):
        raise PydanticCustomError("not_implemented", "may not be a tool's: tools are not implemented")
    if value not in ("system", "developer", "user", "assistant"):
        raise value_error('must be "system", "developer", "user" or "assistant"')
    # OpenAI's newer word for a system message; chat templates know the old one
    return "system" if value == "developer" else str(value)


Role = Annotated[
    str,
    PlainValidator(_parse_role),
    WithJsonSchema({"enum": ["system", "developer", "user", "assistant"]}),
]


class ChatMessage(BaseModel):
    """The fields besides role and content are those of an answer's message: clients send it back as it came."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Role
    content: Content
    name: Annotated[Any, Only(None)] = None
    refusal: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only(None, [])] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[Any, Only(None, [])] = None

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: object) -> object:
        """It is refused by its name; pydantic would make an error of each, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: value[name] for name in (*cls.model_fields, unknown) if name in value}


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """logprobs: the log-probability of each chosen token. top_logprobs: those of so many of the likeliest as well.
    max_tokens: the older name of max_completion_tokens.

    ignore_eos (an extension of ours): generate max_completion_tokens tokens whatever the model says.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: Annotated[bool, NullMeans(False)] = False
    top_logprobs: Annotated[int | None, Field(ge=0)] = None

    tools: Annotated[Any, Only(None, [])] = None
    tool_choice: Annotated[Any, Only(None, "none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Only(None, True, False)] = None
    functions: Annotated[Any, Only(None, [])] = None
    function_call: Annotated[Any, Only(None, "none", "auto")] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    audio: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    moderation: Annotated[Any, Only(None)] = None
    prompt_cache_options: Annotated[Any, Only(None)] = None
    prompt_cache_retention: Annotated[Any, Only(None)] = None
    verbosity: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None


@dataclass(frozen=True, slots=True)
class ChatTopLogprob:
    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True, slots=True)
class ChatTokenLogprob:
    """bytes: the token's UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    content: list[ChatTokenLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChatChoiceWithIds(ChatChoice):
    """With return_token_ids. token_ids: as sampled."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice | ChatChoiceWithIds]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ChatCompletionWithIds(ChatCompletion):
    """With return_token_ids."""

    prompt_token_ids: list[int]
