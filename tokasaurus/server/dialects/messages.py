"""/v1/messages, as Anthropic's reference documents it: blocks become the messages of a chat.

Errors have Anthropic's form, wherever in the server they are answered."""

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import orjson
from fastapi import APIRouter, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.dialects.client_tools import CLIENT_TOOLS
from tokasaurus.server.endpoint import RoutedEndpoint, count_prompt_tokens
from tokasaurus.server.errors import ApiError, InvalidRequest, shorten
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, example_body
from tokasaurus.server.prepare.chat import chat_of, draft_chat
from tokasaurus.server.prepare.field_table import FieldTable
from tokasaurus.server.prepare.requests import Draft, Origin
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.chat import ChatForm, ChatMessage, TemplateFields, named_here
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    StrictObject,
    Text,
    by_type,
    not_implemented,
    typed_object,
    value_error,
)
from tokasaurus.server.protocol.grammar_fields import GrammarSource, parse_flat_format
from tokasaurus.server.protocol.known_fields import with_known_fields
from tokasaurus.server.protocol.sampling_fields import StopStrings
from tokasaurus.server.protocol.tools import (
    MAX_TOOLS,
    FunctionName,
    MessageToolCall,
    Tool,
    ToolChoice,
    ToolExtras,
    is_deep,
)
from tokasaurus.server.respond.blocks import Block, BlockEvents, event, write_whole
from tokasaurus.server.respond.logprobs import TokenLogprob
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.value_words import MAX_ECHO_CHARS, MAX_TOLD
from tokasaurus.text.json_lines import write_json


# Body
class TextBlockInput(StrictObject):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    if is_deep(value):
        raise value_error("is nested too deeply")
    return value


_NotDeep = Annotated[dict[str, Any], AfterValidator(_check_depth)]


class ToolUseInput(StrictObject):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: _NotDeep
    cache_control: Any = None
    caller: Any = None
    toolset_name: Annotated[Any, Only(None)] = None


_NO_CITATIONS = Only(None, {}, {"enabled": False}, instead="answers have no citations")


def _parse_source(value: object) -> str:
    """The text of a document."""
    if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str):
        raise value_error('must be an object with a string as its "type"')
    if kind == "text":
        return PlainTextSource.model_validate(value).data
    if kind == "content":
        return ContentSource.model_validate(value).content
    raise not_implemented(
        f"is of type {kind[:MAX_ECHO_CHARS]!r}, which is not implemented: only text and content are, since the served "
        "models read text alone"
    )


def _parse_texts(value: object) -> str:
    """A string, or the texts of text blocks."""
    return value if isinstance(value, str) else join_texts(_TEXT_BLOCKS.validate_python(_listed(value)))


def _parse_result(value: object) -> str:
    """A string, or the text of blocks of text. None: there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return join_texts(_SHOWN_BLOCKS.validate_python(_listed(value)))


class PlainTextSource(StrictObject):
    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class ContentSource(StrictObject):
    type: Literal["content"]
    content: Annotated[str, PlainValidator(_parse_texts, str | list[TextBlockInput])]


class DocumentInput(StrictObject):
    """A document of text, whose title and context the model sees too."""

    type: Literal["document"]
    source: Annotated[str, PlainValidator(_parse_source, PlainTextSource | ContentSource)]
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, _NO_CITATIONS] = None
    cache_control: Any = None

    @property
    def shown(self) -> str:
        return _tagged("document", {"title": self.title, "context": self.context}, self.source)


class SearchResultInput(StrictObject):
    """What a search has found. source: where it is from, such as a URL."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[str, PlainValidator(_parse_texts, list[TextBlockInput])]
    citations: Annotated[Any, _NO_CITATIONS] = None
    cache_control: Any = None

    @property
    def shown(self) -> str:
        return _tagged("search_result", {"source": self.source, "title": self.title}, self.content)


def _tagged(tag: str, lines: Mapping[str, str | None], text: str) -> str:
    """How the model sees a document: its facts and its text, within marks."""
    facts = [f"{name}: {value}\n" for name, value in lines.items() if value]
    return f"<{tag}>\n{''.join(facts)}{chr(10) if facts else ''}{text}\n</{tag}>"


ShownAsText = TextBlockInput | DocumentInput | SearchResultInput
SHOWN_AS_TEXT = (TextBlockInput, DocumentInput, SearchResultInput)


def join_texts(blocks: Sequence[ShownAsText]) -> str:
    """Texts follow each other directly; documents are apart from what is before and behind them by an empty line."""
    texts: list[str] = []
    was_document = False
    for block in blocks:
        is_document = not isinstance(block, TextBlockInput)
        if texts and (is_document or was_document):
            texts.append("\n\n")
        texts.append(block.text if isinstance(block, TextBlockInput) else block.shown)
        was_document = is_document
    return "".join(texts)


class ToolResultInput(StrictObject):
    """What a tool returned: text, documents and search results. is_error: no effect, since templates do not show it."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[str, PlainValidator(_parse_result, str | list[ShownAsText] | None)] = ""
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Annotated[Any, Only(None)] = None


class ThinkingInput(StrictObject):
    """Reasoning of the model. signature: no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: Any = None


class RedactedThinkingInput(StrictObject):
    """No effect: it cannot be read."""

    type: Literal["redacted_thinking"]
    data: str


BlockInput = ShownAsText | ToolUseInput | ToolResultInput | ThinkingInput | RedactedThinkingInput
_BLOCK_MODELS: Mapping[str, type[BlockInput]] = by_type(
    *SHOWN_AS_TEXT, ToolUseInput, ToolResultInput, ThinkingInput, RedactedThinkingInput
)


def _parse_block(value: object, models: Mapping[str, type[BlockInput]] = _BLOCK_MODELS) -> BlockInput:
    value, kind = typed_object(value)
    if kind not in models:
        here = "" if kind not in _BLOCK_MODELS else " here"
        raise not_implemented(
            f"is of type {kind[:MAX_ECHO_CHARS]!r}, which is not implemented{here}: only blocks of type "
            f"{', '.join(models)} are"
        )
    return models[kind].model_validate(value)


def _blocks(*models: type[BlockInput]) -> Any:
    """Validator of a list of such blocks."""
    by_kind = by_type(*models)
    block = Annotated[Any, PlainValidator(lambda value: _parse_block(value, by_kind))]
    return TypeAdapter(Annotated[list[block], Field(fail_fast=True)])


_Block = Annotated[BlockInput, PlainValidator(lambda value: _parse_block(value), BlockInput)]
_TEXT_BLOCKS: TypeAdapter[list[TextBlockInput]] = _blocks(TextBlockInput)
_SHOWN_BLOCKS: TypeAdapter[list[ShownAsText]] = _blocks(*SHOWN_AS_TEXT)


def _listed(value: object) -> object:
    """A list of blocks: a string is a text block, unless it is empty."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise value_error("must be a string or a list of blocks")
    return value


Blocks = Annotated[
    Annotated[list[_Block], Field(fail_fast=True)],
    BeforeValidator(_listed, json_schema_input_type=str | list[_Block]),
]
_OF_ASSISTANT = (TextBlockInput, ToolUseInput, ThinkingInput, RedactedThinkingInput)
_OF_USER = (*SHOWN_AS_TEXT, ToolResultInput)
_OF_ROLES: Mapping[str, tuple[type[BlockInput], ...]] = {
    "user": _OF_USER,
    "assistant": _OF_ASSISTANT,
    "system": (TextBlockInput,),
}


class MessageInput(StrictObject):
    role: Literal["user", "assistant", "system"]
    content: Blocks
    clear_at: Annotated[Any, Only(None, "never")] = None
    output_config: Annotated[Any, Only(None, {})] = None

    @model_validator(mode="after")
    def _check_blocks(self) -> "MessageInput":
        for index, block in enumerate(self.content):
            if not isinstance(block, _OF_ROLES[self.role]):
                raise value_error(
                    f"has a block of type {block.type} in content[{index}], which does not go with the role {self.role}"
                )
        return self


def _parse_system(value: object) -> str:
    """A string, or the texts of its blocks, joined by empty lines."""
    if value is None or isinstance(value, str):
        return value or ""
    return "\n\n".join(block.text for block in _TEXT_BLOCKS.validate_python(_listed(value)))


class MessagesTool(ToolExtras):
    """A function. strict: as in chat; null: false."""

    name: FunctionName
    input_schema: _NotDeep
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    allowed_callers: Any = None

    def chat_tool(self) -> Tool:
        return Tool.of(self.name, self.description, self.input_schema, self.strict)


class DefinedTool(ToolExtras):
    """A tool that Anthropic's reference defines and the client runs, see CLIENT_TOOLS. strict: as of other tools.
    max_characters: no effect, since the client shortens what it shows."""

    type: str
    name: str
    strict: bool | None = None
    allowed_callers: Any = None
    max_characters: int | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        expected = CLIENT_TOOLS[info.data["type"]].name
        if name != expected:
            raise value_error(f"must be {expected!r}, the name of tools of the type {info.data['type']}")
        return name

    def chat_tool(self) -> Tool:
        defined = CLIENT_TOOLS[self.type]
        return Tool.of(self.name, defined.description, dict(defined.parameters), self.strict)


def _parse_tool(value: object) -> MessagesTool | DefinedTool:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "custom":
        if kind in CLIENT_TOOLS:
            return DefinedTool.model_validate(value)
        raise not_implemented(
            f"is of type {kind[:MAX_ECHO_CHARS]!r}, which is not implemented: only tools that the client runs are, "
            f"which have an input_schema or one of the types {', '.join(CLIENT_TOOLS)}"
        )
    return MessagesTool.model_validate(value)


_Tool = Annotated[MessagesTool | DefinedTool, PlainValidator(_parse_tool, MessagesTool | DefinedTool)]
MessagesTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), NullMeans([])]


class MessagesToolChoice(StrictObject):
    """auto: the model decides. any: at least one call. tool: a call of the tool `name`. none: no call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "MessagesToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise value_error('must have a name if, and only if, its type is "tool"')
        return self

    def chat_choice(self) -> ToolChoice:
        if self.name is not None:
            return ToolChoice("named", (self.name,))
        if self.type == "any":
            return ToolChoice("required")
        return ToolChoice("none" if self.type == "none" else "auto")


class ThinkingConfig(StrictObject):
    """type: enabled and disabled set the template's variable enable_thinking; adaptive leaves it to the template.
    display: "omitted" leaves the reasoning out of the answer. budget_tokens: no effect. block_binding: no effect, since
    no signature is checked."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, WHOLE_FLOATS] = None
    display: Literal["summarized", "omitted"] | None = None
    block_binding: dict[str, Any] | None = None


def _parse_output_format(value: object) -> GrammarSource | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise value_error('must have "json_schema" as its "type"')
    # the API has no field for it: its structured outputs always follow the schema
    return parse_flat_format(value, "output_config.format", name="output", strict=True)


class OutputFormat(StrictObject):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictObject):
    """effort: as the chat field reasoning_effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[GrammarSource | None, PlainValidator(_parse_output_format, OutputFormat | None)] = None
    task_budget: Annotated[Any, Only(None, instead="max_tokens limits an answer")] = None


_CLEARS_THINKING = "clear_thinking_20251015"


def _parse_context_management(value: object) -> None:
    """Raises unless all edits are of thinking, which Anthropic's agents send by default."""
    edits = value.get("edits", []) if isinstance(value, dict) else []
    if value is not None and not (isinstance(value, dict) and value.keys() <= {"edits"} and isinstance(edits, list)):
        raise value_error("must be an object with a list of edits")
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str):
            raise value_error("must have edits with a string as their type")
        if kind != _CLEARS_THINKING:
            raise not_implemented(
                f"has the edit {kind[:MAX_ECHO_CHARS]!r}, which is not implemented: only {_CLEARS_THINKING} is"
            )


class ContextEdit(BaseModel):
    """No effect: the chat template decides which earlier reasoning the model sees."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(StrictObject):
    edits: list[ContextEdit] = Field(default_factory=list)


class MessagesMetadata(StrictObject):
    """user_id: no effect."""

    user_id: str | None = None


def _parse_fallbacks(value: object) -> None:
    if value not in (None, "default") and not isinstance(value, list):
        raise value_error('must be "default" or a list')


class _ConversationFields(ChatForm):
    """system: the system message: a string, or text blocks, which are joined by empty lines.
    thinking, output_config: see there.
    cache_control: no effect, since prompts are cached without it.
    speed, service_tier, inference_geo: no effect: there is one of each.
    fallbacks: no effect, since no answer is declined.
    """

    thread: Annotated[Any, Only(None, instead="no conversation is kept: send all of its messages")] = None
    messages: Annotated[list[MessageInput], Field(min_length=1, fail_fast=True)]
    system: Annotated[str, PlainValidator(_parse_system, str | list[TextBlockInput] | None)] = ""
    tools: MessagesTools = Field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: Annotated[OutputConfig, NullMeans(OutputConfig())] = Field(default_factory=OutputConfig)
    cache_control: Any = None
    metadata: MessagesMetadata | None = None  # type: ignore[assignment]  # OpenAI's is another
    speed: Literal["standard", "fast"] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    fallbacks: Annotated[Any, PlainValidator(_parse_fallbacks, Literal["default"] | list[Any] | None)] = None
    container: Annotated[Any, Only(None)] = None
    mcp_servers: Annotated[Any, Only(None, [])] = None
    context_management: Annotated[None, PlainValidator(_parse_context_management, ContextManagement | None)] = None
    billing_policy: Annotated[
        Any, Only(None, {"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"})
    ] = None
    diagnostics: Annotated[Any, Only(None)] = None
    fallback_credit_token: Annotated[Any, Only(None)] = None


_NO_COMPACTION = "conversations are not summarised: ask for a summary in a message"


@with_known_fields("chat")
class MessagesRequest(_ConversationFields):
    """max_tokens: most new tokens. If the model's context has less room, the answer may end with the stop reason
    "model_context_window_exceeded".
    stop_sequences: as the chat field stop.
    """

    max_tokens: Annotated[int, Field(ge=1), WHOLE_FLOATS]
    stop_sequences: StopStrings = ()

    compaction: Annotated[Any, Only(None, instead=_NO_COMPACTION)] = None
    stop: Annotated[tuple[()], named_here("stop_sequences")] = ()
    response_format: Annotated[None, named_here("output_config.format")] = None

    @property
    def stops(self) -> tuple[tuple[str, ...], str]:
        return self.stop_sequences, "stop_sequences"


@with_known_fields("chat")
class CountTokensRequest(_ConversationFields):
    """The body of a message, of which only what makes the prompt counts."""

    compaction: Any = None


# Preparation
def draft_message(body: MessagesRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The request of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    with _FIELDS.naming():
        chat = chat_of(body, _FIELDS.values(body))
        draft = draft_chat(chat, model, limits, origin, "msg_", max_tokens=body.max_tokens)
    return replace(draft, prepared=replace(draft.prepared, repeated={"max_tokens": body.max_tokens}))


class _Part(NamedTuple):
    """A block, and where the body has it."""

    message: int
    position: int
    block: BlockInput

    @property
    def place(self) -> str:
        return f"messages[{self.message}].content[{self.position}]"


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role."""

    role: Literal["user", "assistant", "system"]
    parts: list[_Part]
    last_message: int

    @property
    def place(self) -> str:
        return f"messages[{self.last_message}].content"

    @property
    def is_empty(self) -> bool:
        """There is nothing but empty texts."""
        return all(isinstance(part.block, TextBlockInput) and not part.block.text for part in self.parts)


def _combine(messages: Sequence[MessageInput]) -> list[_Turn]:
    """The turns of the conversation: consecutive messages of the user, or of the assistant, are one.

    Raises InvalidRequest for a message without content. Only the last one may have none, if it is the assistant's.
    Texts of the assistant may be empty, since answers have such."""
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        is_assistant = message.role == "assistant"
        if not message.content and not (is_assistant and index == len(messages) - 1):
            param = f"messages[{index}].content"
            raise InvalidRequest(f"{param} must not be empty: only a last message of the assistant may be", param)
        parts = [_Part(index, position, block) for position, block in enumerate(message.content)]
        if not is_assistant:
            for part in parts:
                if isinstance(part.block, TextBlockInput) and not part.block.text:
                    raise InvalidRequest(f"{part.place}.text must not be empty", f"{part.place}.text")
        if turns and message.role == turns[-1].role != "system":
            turns[-1].parts += parts
            turns[-1].last_message = index
        else:
            turns.append(_Turn(message.role, parts, index))
    return turns


def _turns(body: _ConversationFields) -> list[_Turn]:
    """The turns that the chat template sees."""
    turns = _combine(body.messages)
    if _may_continue(turns[-1], body) and turns[-1].is_empty:
        turns.pop()
    return turns


def _continues(body: _ConversationFields) -> bool | None:
    """Whether the answer continues the last turn; None as in chat. Raises InvalidRequest."""
    last = _combine(body.messages)[-1]
    if not _may_continue(last, body) or last.is_empty:
        return body.continue_final_message
    _check_start(last, body)
    return True


def _may_continue(last: _Turn, body: _ConversationFields) -> bool:
    return last.role == "assistant" and body.continue_final_message is None and not _is_asked_for_start(body)


def _is_asked_for_start(body: TemplateFields) -> bool:
    """The body says itself, by fields of chat, how the prompt ends."""
    names = {"add_generation_prompt", "continue_final_message"}
    return body.add_generation_prompt is not None or not names.isdisjoint(body.apply_chat_template_overrides)


def _check_start(turn: _Turn, body: _ConversationFields) -> None:
    """Raises InvalidRequest unless an answer may continue this turn of the assistant."""
    first, last = turn.parts[0].block, turn.parts[-1].block
    if body.output_config.format is not None:
        raise InvalidRequest(
            f"output_config.format describes a whole answer, and the answer would continue {turn.place}: leave one of "
            "them out",
            "output_config.format",
        )
    if isinstance(last, _THOUGHTS):
        raise InvalidRequest(
            f"{turn.place} must not end with a block of type {last.type}: the answer continues a text", turn.place
        )
    if body.thinking is not None and body.thinking.type == "enabled" and not isinstance(first, _THOUGHTS):
        raise InvalidRequest(
            f"{turn.place} must begin with a block of type thinking, since thinking is enabled and the answer "
            "continues this message",
            turn.place,
        )
    text = _text_of(turn)
    if text != text.rstrip():
        raise InvalidRequest(
            f"{turn.place} must not end with white space, since the answer continues this message", turn.place
        )


_THOUGHTS = (ThinkingInput, RedactedThinkingInput)


def _to_messages(system: str, turns: Sequence[_Turn]) -> list[ChatMessage]:
    """The messages of the chat. Raises InvalidRequest."""
    written = [ChatMessage(role="system", content=system)] if system else []
    unanswered: set[str] = set()
    for turn in turns:
        if unanswered and turn.role != "user":
            raise _missing_result(unanswered, turn)
        if turn.role == "assistant":
            message, unanswered = _of_assistant(turn)
            written.append(message)
            continue
        written += _results(turn, unanswered)
        if unanswered:
            raise _missing_result(unanswered, turn)
        if text := _text_of(turn):
            written.append(ChatMessage(role=turn.role, content=text))
    if unanswered:
        raise _missing_result(unanswered, turns[-1])
    if not written:
        raise InvalidRequest("messages must have a message with content", "messages")
    return written


def _of_assistant(turn: _Turn) -> tuple[ChatMessage, set[str]]:
    """(the message, the ids of its calls)."""
    blocks = [part.block for part in turn.parts if isinstance(part.block, ToolUseInput)]
    calls = [MessageToolCall.of(block.id, block.name, block.input) for block in blocks]
    ids = {call.id for call in calls}
    if len(ids) < len(calls):
        raise InvalidRequest(f"{turn.place} has several blocks of type tool_use with one id", turn.place)
    thoughts = [part.block.thinking for part in turn.parts if isinstance(part.block, ThinkingInput)]
    message = ChatMessage(
        role="assistant",
        content=_text_of(turn),
        tool_calls=calls,
        reasoning_content="".join(thoughts) or None,
    )
    return message, ids


def _results(turn: _Turn, unanswered: set[str]) -> list[ChatMessage]:
    """The messages with the results of tools. unanswered: ids of the calls before; those with a result are removed.

    Raises InvalidRequest for a result without a call, and for one behind other blocks."""
    written: list[ChatMessage] = []
    for number, part in enumerate(turn.parts):
        block = part.block
        if not isinstance(block, ToolResultInput):
            continue
        if len(written) < number:
            reason = f"{part.place} is of type tool_result, which must come before all other blocks"
            raise InvalidRequest(reason, part.place)
        if block.tool_use_id not in unanswered:
            asked = shorten(block.tool_use_id)
            reason = f"{part.place} has the tool_use_id {asked!r}, which no block of the message before has, or which "
            raise InvalidRequest(f"{reason}has a result already", part.place)
        unanswered.remove(block.tool_use_id)
        written.append(ChatMessage(role="tool", content=block.content, tool_call_id=block.tool_use_id))
    return written


def _missing_result(ids: Collection[str], turn: _Turn) -> InvalidRequest:
    """turn: the one that should have them."""
    shown = ", ".join(repr(shorten(id_)) for id_ in sorted(ids)[:MAX_TOLD])
    more = f" and {len(ids) - MAX_TOLD} others" if len(ids) > MAX_TOLD else ""
    return InvalidRequest(
        f"{turn.place}: each tool_use needs a tool_result in the message that follows: there is none for {shown}{more}",
        turn.place,
    )


def _text_of(turn: _Turn) -> str:
    """Texts and documents. Messages of the user are apart by an empty line; those of the assistant continue each
    other."""
    if len(turn.parts) == 1 and isinstance(block := turn.parts[0].block, TextBlockInput):
        return block.text  # as most turns are
    messages = [
        join_texts([part.block for part in parts if isinstance(part.block, SHOWN_AS_TEXT)])
        for _, parts in itertools.groupby(turn.parts, key=lambda part: part.message)
    ]
    return ("" if turn.role == "assistant" else "\n\n").join(filter(None, messages))


def _enable_thinking(body: _ConversationFields) -> bool | None:
    thinking = body.thinking
    return body.enable_thinking if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"


_FIELDS = FieldTable[_ConversationFields](
    continue_final_message=("continue_final_message", _continues),
    messages=("messages", lambda body: _to_messages(body.system, _turns(body))),
    max_tokens=("max_tokens", lambda _: None),  # the context may leave fewer than the `max_tokens` of the body
    stop=("stop_sequences", lambda body: body.stops[0]),
    metadata=("metadata", lambda _: None),
    tools=("tools", lambda body: [tool.chat_tool() for tool in body.tools]),
    tool_choice=("tool_choice", lambda body: body.tool_choice and body.tool_choice.chat_choice()),
    parallel_tool_calls=(
        "parallel_tool_calls",
        lambda body: body.parallel_tool_calls and not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
    ),
    response_format="output_config.format",
    enable_thinking=("enable_thinking", _enable_thinking),
    include_reasoning=(
        "include_reasoning",
        lambda body: body.include_reasoning and not (body.thinking and body.thinking.display == "omitted"),
    ),
    reasoning_effort=("reasoning_effort", lambda body: body.output_config.effort or body.reasoning_effort),
)
"""Fields of the chat body."""


# Answer
@dataclass(frozen=True, slots=True)
class TextBlock:
    text: str
    citations: None = None
    type: Literal["text"] = "text"


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Reasoning of the answer, as the model wrote it. signature: empty, since nothing checks it."""

    thinking: str
    signature: str = ""
    type: Literal["thinking"] = "thinking"


WrittenInput = Annotated[
    orjson.Fragment,
    PlainValidator(lambda value: value),
    PlainSerializer(lambda value: value, return_type=dict[str, Any]),
]


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    """A call. id: repeated by the block with the tool's result. input: of a call that was cut, what is complete."""

    id: str
    name: str
    input: WrittenInput
    type: Literal["tool_use"] = "tool_use"


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


@dataclass(frozen=True, slots=True)
class ThinkingDetails:
    thinking_tokens: int


@dataclass(frozen=True, slots=True)
class MessageUsage:
    """input_tokens: of the prompt, without the cached ones. cache_creation_input_tokens: 0, since Anthropic's field
    counts what is billed. service_tier, speed, inference_geo: the same for all."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation_input_tokens: Literal[0] = 0
    service_tier: Literal["standard"] = "standard"
    speed: Literal["standard"] = "standard"
    inference_geo: Literal["not_available"] = "not_available"


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "pause_turn"
]


@dataclass(frozen=True, slots=True)
class MessageObject:
    """The answer. stop_reason: "pause_turn" if a trainer aborted the request."""

    id: str
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


_NO_INPUT = orjson.Fragment(b"{}")


class MessageEvents(BlockEvents):
    """The events of one message."""

    def whole(self) -> dict[str, Any]:
        return self._message([_content(block) for block in self.blocks])

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return event("error", error={"type": error_type(error.status), "message": error.message})

    def _message(self, content: list[ContentBlock]) -> dict[str, Any]:
        answer = MessageObject(
            id=self._prepared.response_id,
            model=self._prepared.adapter_name or self._model.name,
            content=content,
            stop_reason=self._stop_reason(),
            stop_sequence=None if self.finish_reason is None else self.stop_string,
            usage=_usage(self.usage),
        )
        return self._with_weights(answer)

    def _stop_reason(self) -> StopReason | None:
        match self.finish_reason:
            case None:
                return None
            case "length":
                (request,) = self._prepared.requests
                has_room = request.max_new_tokens == self._prepared.repeated["max_tokens"]
                return "max_tokens" if has_room else "model_context_window_exceeded"
            case "abort":
                return "pause_turn"
        if self.has_calls:
            return "tool_use"
        return "end_turn" if self.stop_string is None else "stop_sequence"

    def _write_start(self) -> None:
        self._events.append(event("message_start", message=self._message([])))

    def _write_block_start(self, block: Block) -> None:
        shown = ToolUseBlock(block.call_id, block.name, _NO_INPUT) if block.kind == "call" else _content(block)
        self._events.append(event("content_block_start", index=block.index, content_block=shown))

    def _write_block_delta(self, block: Block, text: str, _logprobs: list[TokenLogprob]) -> None:
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
        self._events.append(event("content_block_delta", index=block.index, delta=delta))

    def _write_block_end(self, block: Block) -> None:
        self._events.append(event("content_block_stop", index=block.index))

    def _write_end(self) -> None:
        end = self._message([])
        delta = {name: end[name] for name in ("stop_reason", "stop_sequence")}
        self._events.append(event("message_delta", delta=delta, usage=end["usage"]))
        self._events.append(event("message_stop"))


def _content(block: Block) -> ContentBlock:
    match block.kind:
        case "text":
            return TextBlock(block.text)
        case "reasoning":
            return ThinkingBlock(block.text)
        case "call":
            return ToolUseBlock(block.call_id, block.name, _write_input(block.text))


def _write_input(arguments: str) -> orjson.Fragment:
    """The JSON text of a call's arguments as the JSON of an object: of text that was cut, what is complete."""
    try:
        value: object = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        try:
            value = from_json(arguments, allow_partial=True)  # as Anthropic's client reads the deltas
        except ValueError:
            value = None
    if not isinstance(value, dict):
        return _NO_INPUT
    try:  # not orjson: it does not write integers above 64 bits
        return orjson.Fragment(json.dumps(value, allow_nan=False).encode())
    except (ValueError, RecursionError):
        return _NO_INPUT


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        usage.prompt_tokens - cached,
        cached,
        usage.completion_tokens,
        ThinkingDetails(usage.completion_tokens_details.reasoning_tokens),
    )


# Errors
@dataclass(frozen=True, slots=True)
class MessagesErrorObject:
    """details: for clients that react to them; left out if there are none."""

    type: str
    message: str
    details: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MessagesError:
    """The body of every response with status 400 or above."""

    error: MessagesErrorObject
    type: Literal["error"] = "error"


ERROR_DETAILS: Mapping[str, dict[str, Any]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""Details of errors, by the field that they are about. Anthropic's client sends a refused request again without."""

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_type(status: int) -> str:
    """Anthropic's name for an error of this status."""
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


_ROUTE = "/v1/messages"
# Also with several slashes, and without /v1.
_URL = re.compile(rb"(?:https?://[^/]*)?(?:/+v1)*/+messages(?=[/?#]|$)")


def is_for_messages(url: bytes) -> bool:
    """Whether a request with this URL is for /v1/messages or a path below it, however that is written."""
    return _URL.match(url) is not None


def write_messages_error(status: int, message: str, param: str | None = None) -> bytes:
    """param: the field that the error is about."""
    error = {"type": error_type(status), "message": message}
    details = ERROR_DETAILS.get(param or "")
    return write_json({"type": "error", "error": error if details is None else error | {"details": details}})


class MessagesErrorsMiddleware:
    """Rewrites OpenAI's error object to Anthropic's in answers of /v1/messages and the paths below it.

    Must be outside of all that answers errors, and inside of what finds the path of the route. Errors within a stream
    are not its concern: their answer has status 200.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{_ROUTE}/"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        content = b""

        async def rewrite(message: Message) -> None:
            nonlocal start, content
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None:
                await send(message)
                return
            content += message.get("body", b"")
            if not message.get("more_body", False):
                content = _rewritten(content, start)
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(content))
                await send(start)
                await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, rewrite)


def _rewritten(content: bytes, start: Message) -> bytes:
    """content: of the answer. It is returned as it is if it has no error object."""
    headers = Headers(raw=start["headers"])
    if not headers.get("content-type", "").startswith("application/json"):
        return content
    error = orjson.loads(content).get("error")
    if not isinstance(error, dict) or "message" not in error:
        return content
    return write_messages_error(cast(int, start["status"]), error["message"], error.get("param"))


# Routes
_CONVERSATION = [{"role": "user", "content": "What do whales eat?"}]
ENDPOINT = RoutedEndpoint(
    body_model=MessagesRequest,
    draft=draft_message,
    build=partial(write_whole, MessageEvents),
    stream=MessageEvents,
    renders_template=True,
    name="create_message",
    description="Answer a conversation given in Anthropic's form.",
    operation="chat",
    answer_model=MessageObject,
    error_model=MessagesError,
    example={"messages": _CONVERSATION, "max_tokens": 100},
)

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])


@dataclass(frozen=True, slots=True)
class TokenCount:
    input_tokens: int


@router.post(
    "/v1/messages/count_tokens",
    responses=answers(TokenCount, *BODY_ERRORS, 404, 429, 503, errors=MessagesError),
    openapi_extra=example_body({"messages": _CONVERSATION}),
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The tokens of the prompt that a message with these fields has."""
    count = TokenCount(await count_prompt_tokens(request, body, _FIELDS))
    return Response(write_json(count), media_type="application/json")
