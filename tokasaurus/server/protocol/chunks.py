"""Choices in the chunks of a streamed answer, as OpenAI's reference documents them."""

from dataclasses import dataclass
from typing import Literal

from tokasaurus.server.protocol.chat import ChatFinishReason, ChatLogprobs
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.server.protocol.tools import ToolCallFunction


@dataclass(frozen=True, slots=True)
class CompletionChunkChoice:
    """text, logprobs: what is new. finish_reason: on the last chunk of the choice alone."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class CompletionChunkChoiceWithIds(CompletionChunkChoice):
    """With return_token_ids. token_ids: what is new. prompt_token_ids: on the first chunk of the choice alone."""

    token_ids: list[int]
    prompt_token_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class RoleDelta:
    """The first of each choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ContentDelta:
    content: str


@dataclass(frozen=True, slots=True)
class ArgumentsFragment:
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallFragment:
    """The arguments of the answer's call of this index go on."""

    index: int
    function: ArgumentsFragment


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The first of a call, without arguments."""

    index: int
    id: str
    function: ToolCallFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ToolCallsDelta:
    tool_calls: list[ToolCallStart | ToolCallFragment]


@dataclass(frozen=True, slots=True)
class EmptyDelta:
    """Nothing new but what stands beside it."""


@dataclass(frozen=True, slots=True)
class ChatChunkChoice:
    """delta, logprobs: what is new. finish_reason: on the last chunk of the choice alone."""

    index: int
    delta: RoleDelta | ContentDelta | ToolCallsDelta | EmptyDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@dataclass(frozen=True, slots=True)
class ChatChunkChoiceWithIds(ChatChunkChoice):
    """With return_token_ids. token_ids: what is new."""

    token_ids: list[int]
