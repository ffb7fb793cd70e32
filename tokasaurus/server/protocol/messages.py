"""Bodies and answers of /v1/messages and /v1/messages/count_tokens, as Anthropic's reference documents them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
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
from pydantic_core import PydanticCustomError

from tokasaurus.server.protocol.chat_forms import ChatForm, named_here
from tokasaurus.server.protocol.client_tools import CLIENT_TOOLS
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    StrictObject,
    Text,
    not_implemented,
    value_error,
)
from tokasaurus.server.protocol.grammar_fields import GrammarSource, parse_response_format
from tokasaurus.server.protocol.known_fields import with_known_fields
from tokasaurus.server.protocol.sampling_fields import StopStrings
from tokasaurus.server.protocol.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolChoice,
    ToolExtras,
    is_deep,
)
from tokasaurus.server.value_words import MAX_ECHO_CHARS


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
_BLOCK_MODELS: Mapping[str, type[BlockInput]] = {
    "text": TextBlockInput,
    "document": DocumentInput,
    "search_result": SearchResultInput,
    "tool_use": ToolUseInput,
    "tool_result": ToolResultInput,
    "thinking": ThinkingInput,
    "redacted_thinking": RedactedThinkingInput,
}


def _parse_block(value: object, models: Mapping[str, type[BlockInput]] = _BLOCK_MODELS) -> BlockInput:
    if not isinstance(value, dict):
        raise value_error("must be an object")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise value_error("must have a string as its type")
    if kind not in models:
        here = "" if kind not in _BLOCK_MODELS else " here"
        raise not_implemented(
            f"is of type {kind[:MAX_ECHO_CHARS]!r}, which is not implemented{here}: only blocks of type "
            f"{', '.join(models)} are"
        )
    return models[kind].model_validate(value)


def _blocks(*models: type[BlockInput]) -> Any:
    """Validator of a list of such blocks."""
    by_kind = {kind: model for kind, model in _BLOCK_MODELS.items() if model in models}
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
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


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
        function = FunctionDefinition.model_construct(
            name=self.name,
            description=defined.description,
            parameters=dict(defined.parameters),
            strict=self.strict,
        )
        return Tool.model_construct(type="function", function=function)


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


_FORMAT_PARAM = "output_config.format"


def _parse_output_format(value: object) -> GrammarSource | None:
    nested = value
    if isinstance(value, dict) and value.get("type") == "json_schema":
        inner = {name: field for name, field in value.items() if name != "type"}
        # the API has no field for it: its structured outputs always follow the schema
        nested = {"type": "json_schema", "json_schema": {"name": "output", "strict": True, **inner}}
    elif value is not None:
        raise value_error('must have "json_schema" as its "type"')
    try:
        return parse_response_format(nested, _FORMAT_PARAM)
    except PydanticCustomError as error:
        message = error.message().replace("json_schema.", "")
        raise PydanticCustomError(error.type, "{message}", {"message": message}) from None


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


@dataclass(frozen=True, slots=True)
class TokenCount:
    input_tokens: int


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
