"""Choices in the chunks of a stream, as OpenAI's reference documents them."""

from dataclasses import dataclass
from typing import Literal

from tokasaurus.server.protocol.chat import ChatFinishReason, ChatLogprobs
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.server.protocol.tools import ToolCallFunction


@dataclass(frozen=True, slots=True)
class CompletionChunkChoice:
    """text, logprobs: new since the previous chunk. finish_reason: only on the last chunk of the choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class CompletionChunkChoiceWithIds(CompletionChunkChoice):
    """Returned with return_token_ids. token_ids: new since the previous chunk. prompt_token_ids: only on the choice's
    first chunk."""

    token_ids: list[int]
    prompt_token_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class RoleDelta:
    """The first delta of each choice."""

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
    """The next fragment of the arguments of the tool call with this index."""

    index: int
    function: ArgumentsFragment


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The first delta of a tool call, without arguments."""

    index: int
    id: str
    function: ToolCallFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ToolCallsDelta:
    tool_calls: list[ToolCallStart | ToolCallFragment]


@dataclass(frozen=True, slots=True)
class EmptyDelta:
    """No new text: the chunk carries only a finish_reason, logprobs or token ids."""


@dataclass(frozen=True, slots=True)
class ChatChunkChoice:
    """delta, logprobs: new since the previous chunk. finish_reason: only on the last chunk of the choice."""

    index: int
    delta: RoleDelta | ContentDelta | ToolCallsDelta | EmptyDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@dataclass(frozen=True, slots=True)
class ChatChunkChoiceWithIds(ChatChunkChoice):
    """Returned with return_token_ids. token_ids: new since the previous chunk."""

    token_ids: list[int]
