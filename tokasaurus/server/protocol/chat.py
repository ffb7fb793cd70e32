"""Bodies of /v1/chat/completions, and choices in the chunks of its streams, as OpenAI's reference documents them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.protocol.answers import Usage, WrittenPromptLogprobs
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    StrictObject,
    missing,
    not_implemented,
    value_error,
)
from tokasaurus.server.protocol.known_fields import with_known_fields
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.protocol.tools import MessageToolCall, ToolCall, ToolCallFunction, ToolChoiceField, Tools

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _parse_reasoning_effort(value: object) -> object:
    if value is not None and value not in get_args(ReasoningEffort):
        *others, last = [f'"{effort}"' for effort in get_args(ReasoningEffort)]
        raise value_error(f"must be {', '.join(others)} or {last}")
    return value


AskedReasoningEffort = Annotated[
    ReasoningEffort | None, PlainValidator(_parse_reasoning_effort, ReasoningEffort | None)
]

MAX_TEMPLATE_CHARS = 65_536
TemplateVariables = Annotated[dict[str, Any], NullMeans({})]


class TemplateFields(StrictObject):
    """add_generation_prompt: end the prompt with the start of an assistant message; null: yes, unless
    continue_final_message is set.
    continue_final_message: leave the final message open, so that the model continues it.
    chat_template_kwargs: variables of the template, such as enable_thinking.
    chat_template: in place of the model's own, with the flag request_chat_template; "" is null.
    enable_thinking: this variable, for templates that know it.
    reasoning_effort: this variable, for templates that know it; in templates that know enable_thinking, "none" turns
    reasoning off and the others turn it on. Variables in chat_template_kwargs win.
    apply_chat_template_overrides: all of the above but chat_template in one object.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = Field(default={})
    chat_template: Annotated[str | None, Field(max_length=MAX_TEMPLATE_CHARS)] = None
    apply_chat_template_overrides: TemplateVariables = Field(default={})
    enable_thinking: bool | None = None
    reasoning_effort: AskedReasoningEffort = None


def _parse_content(value: object, info: ValidationInfo) -> str:
    """A string, or the concatenated texts of its parts. Null or absent: "", which only an assistant message may have.

    OpenAI answers with null content for tool calls, refusals and cut answers, and clients send these messages back. The
    text of a refusal takes the place of null.
    """
    if isinstance(value, str):
        return value
    if value is None:
        if _has_role(info, "assistant"):
            return info.data.get("refusal") or ""
        raise missing()
    if not isinstance(value, list):
        raise value_error("must be a string or a list of text parts")
    return "".join(_parse_part(part) for part in value)


def _has_role(info: ValidationInfo, role: str) -> bool:
    """Whether the message has this role, or a wrong one that may stand for it."""
    return "role" not in info.data or info.data["role"] == role


# The type of a part → the field with its text. "input_text" and "output_text" are those of /v1/responses.
_MAX_KEY_CHARS = 40  # of an unknown key, in an error
_PART_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def _parse_part(part: object) -> str:
    if not isinstance(part, dict):
        raise value_error("must be a string or a list of text parts")
    type_ = part.get("type", "text")
    name = _PART_TEXTS.get(type_) if isinstance(type_, str) else None
    if name is None:
        raise not_implemented("contains a part that is not text, which is not implemented")
    text = part.get(name)
    if "type" not in part or not isinstance(text, str):
        raise value_error(f'must contain parts with a "type" and a string as "{name}"')
    unknown = next((key for key in part if key not in ("type", name) and key not in PartExtras.model_fields), None)
    if unknown is not None:
        raise value_error(f"contains a part with the unknown field {str(unknown)[:_MAX_KEY_CHARS]!r}")
    return text


class PartExtras(StrictObject):
    """What clients add to parts; without effect."""

    id: Any = None
    annotations: Any = None
    cache_control: Any = None
    citations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class TextPart(PartExtras):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(PartExtras):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[str, PlainValidator(_parse_content, str | list[TextPart | RefusalPart] | None)]
_Roles = Literal["system", "developer", "user", "assistant", "tool"]


def _parse_role(value: object) -> str:
    if value == "function":
        raise not_implemented("may not be function, an older word for tool")
    if value not in get_args(_Roles):
        raise value_error('must be "system", "developer", "user", "assistant" or "tool"')
    # OpenAI's newer name for system; chat templates know only the old one
    return "system" if value == "developer" else str(value)


Role = Annotated[str, PlainValidator(_parse_role, _Roles)]


def _parse_thinking_blocks(value: object) -> str:
    """The texts of Anthropic's thinking blocks, which litellm adds to messages; "" for null."""
    blocks = [] if value is None else value
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise value_error("must be a list of objects")
    texts = [block.get("thinking") for block in blocks]
    return "".join(text for text in texts if isinstance(text, str))  # redacted blocks have none


ThinkingBlocks = Annotated[str, PlainValidator(_parse_thinking_blocks, list[dict[str, Any]] | None)]


class ChatMessage(StrictObject):
    """One message. Accepts every field of an assistant message in a response: clients send those back unchanged.

    tool_call_id: the call that a tool message answers; only in tool messages.
    name: the participant's name, for the chat template; in tool messages, the tool's name.
    reasoning_content, reasoning, thinking_blocks: the message's reasoning, for the chat template; the first that has
    any text counts.
    refusal: the text of a message without content.
    annotations, cache_control, id, images, parsed, provider_specific_fields, reasoning_details, reasoning_signature:
    added by clients and other servers; no effect.
    """

    role: Role
    refusal: str | None = None
    annotations: Annotated[list[Any] | None, Field(fail_fast=True)] = None
    audio: Annotated[Any, Only(None)] = None
    cache_control: dict[str, Any] | None = None
    id: str | None = None
    images: Annotated[Any, Only(None, [])] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: ThinkingBlocks = ""
    reasoning_details: Any = None
    reasoning_signature: Any = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True), NullMeans([])] = Field(default_factory=list)
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None
    name: str | None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    content: Annotated[Content, Field(validate_default=True)] = None  # type: ignore[assignment]  # the validator's

    @property
    def reasoning_text(self) -> str:
        """Empty for a message without reasoning."""
        return self.reasoning_content or self.reasoning or self.thinking_blocks

    @field_validator("reasoning_content", "reasoning", "thinking_blocks")
    @classmethod
    def _check_reasoning(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text and not _has_role(info, "assistant"):
            raise value_error('goes with the role "assistant"')
        return text

    @field_validator("tool_calls")
    @classmethod
    def _check_calls(cls, calls: list[MessageToolCall], info: ValidationInfo) -> list[MessageToolCall]:
        if calls and not _has_role(info, "assistant"):
            raise value_error('goes with the role "assistant"')
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _check_call_id(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("role") == "tool":
            raise missing()
        if call_id is not None and not _has_role(info, "tool"):
            raise value_error('goes with the role "tool"')
        return call_id

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name == "" and not _has_role(info, "tool"):
            raise value_error("must not be empty")
        return name


@with_known_fields("chat")
class ChatCompletionRequest(SamplingFields, TemplateFields):
    """logprobs: return the log-probability of each sampled token.
    top_logprobs: number of most likely tokens whose log-probabilities are also returned.
    max_tokens: the older name of max_completion_tokens.
    ignore_eos (our extension): generate max_completion_tokens tokens even if the model samples eos.
    echo (vLLM's extension): the content begins with the final message, if it is the assistant's.
    separate_reasoning (SGLang's extension): split reasoning off the content, if the model has any.
    include_reasoning (vLLM's extension): return the reasoning that is split off.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    logprobs: Annotated[bool, NullMeans(False)] = False
    top_logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None

    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[bool, NullMeans(True)] = True
    echo: Annotated[bool, NullMeans(False)] = False
    separate_reasoning: Annotated[bool, NullMeans(True)] = True
    include_reasoning: Annotated[bool, NullMeans(True)] = True


ChatFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatTopLogprob:
    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True, slots=True)
class ChatTokenLogprob:
    """bytes: the token's UTF-8 bytes, possibly only part of a character."""

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
    """content: null if the answer was cut before the first of the calls that it had to make."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


@dataclass(frozen=True, slots=True)
class CallingMessage:
    """An assistant message that calls tools. content: the text that the model wrote outside the calls."""

    content: str | None
    tool_calls: list[ToolCall]
    role: Literal["assistant"] = "assistant"
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ReasoningMessage(AssistantMessage):
    """An answer of a model with reasoning. content: null also if there is nothing but reasoning.

    reasoning_content, reasoning: the same text, under the names that SGLang and DeepSeek, and vLLM, have for it; null
    if there is none, or if it is not included.
    """

    reasoning_content: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningCallingMessage(CallingMessage):
    """An assistant's message with reasoning and calls."""

    reasoning_content: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    index: int
    message: AssistantMessage | CallingMessage | ReasoningMessage | ReasoningCallingMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


@dataclass(frozen=True, slots=True)
class ChatChoiceWithIds(ChatChoice):
    """Returned with return_token_ids. token_ids: as sampled."""

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
class ExtendedChatCompletion(ChatCompletion):
    """Returned with return_token_ids or prompt_logprobs; the field that was not requested is null."""

    prompt_token_ids: list[int] | None
    prompt_logprobs: WrittenPromptLogprobs | None


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
class ReasoningDelta:
    """Both fields have the same text, as in ReasoningMessage."""

    reasoning_content: str
    reasoning: str


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
    delta: RoleDelta | ReasoningDelta | ContentDelta | ToolCallsDelta | EmptyDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@dataclass(frozen=True, slots=True)
class ChatChunkChoiceWithIds(ChatChunkChoice):
    """Returned with return_token_ids. token_ids: new since the previous chunk."""

    token_ids: list[int]


def named_here(name: str) -> PlainValidator:
    """Metadata of a field of chat that has another name in the form."""

    def check(value: object) -> None:
        if value is not None:
            raise not_implemented(f"is a field of /v1/chat/completions: here it is {name}")

    return PlainValidator(check, None)


_NO_PLACE = "the answer here has no place for it; that of /v1/chat/completions has"


class ChatForm(SamplingFields, TemplateFields):
    """A body of another form of chat. Fields of chat that the form lacks mean the same here, but for those without a
    place in its answer, which has a single choice."""

    n: Annotated[Literal[1], WHOLE_FLOATS, NullMeans(1)] = 1
    return_token_ids: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False
    prompt_logprobs: Annotated[None, Only(None, instead=_NO_PLACE)] = None
    return_routed_experts: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False
    routed_experts_prompt_start: Annotated[None, Only(None, instead=_NO_PLACE)] = None
    logprobs_in_fingerprint: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False
    echo: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False

    separate_reasoning: Annotated[bool, NullMeans(True)] = True
    include_reasoning: Annotated[bool, NullMeans(True)] = True
    parallel_tool_calls: Annotated[bool, NullMeans(True)] = True
