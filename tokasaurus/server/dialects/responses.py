"""/v1/responses, as OpenAI's reference documents it: items become the messages of a chat. Nothing is stored."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Request
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
)
from starlette.responses import Response

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.endpoint import RoutedEndpoint, count_prompt_tokens
from tokasaurus.server.errors import ApiError, InvalidRequest, NotFound, shorten
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses, example_body
from tokasaurus.server.prepare.chat import chat_of, draft_chat
from tokasaurus.server.prepare.field_table import FieldTable
from tokasaurus.server.prepare.requests import Draft, Origin, Prepared, asked_sampling
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.chat import (
    AskedReasoningEffort,
    ChatForm,
    ChatMessage,
    ChatTokenLogprob,
    PartExtras,
    named_here,
)
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
from tokasaurus.server.protocol.grammar_fields import (
    GrammarSource,
    PlainFormat,
    parse_flat_format,
)
from tokasaurus.server.protocol.known_fields import with_known_fields
from tokasaurus.server.protocol.sampling_fields import Metadata, StreamOptions
from tokasaurus.server.protocol.tools import (
    MAX_TOOLS,
    CallArguments,
    FunctionDefinition,
    MessageToolCall,
    Tool,
    ToolChoice,
    is_deep,
)
from tokasaurus.server.respond.blocks import Block, BlockEvents, event, write_whole
from tokasaurus.server.respond.logprobs import TokenLogprob, build_chat_logprobs
from tokasaurus.server.respond.whole import token_names, write_list
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.value_words import MAX_ECHO_CHARS
from tokasaurus.text.json_lines import write_json

# Body
ItemStatus = Literal["in_progress", "completed", "incomplete"]
AskedStatus = ItemStatus | None

# Parts and items of OpenAI's models and tools that are not served here.
_OTHER_PARTS = frozenset({"input_image", "input_file", "input_audio", "image_url", "computer_screenshot"})
_OTHER_ITEMS = frozenset(
    (
        *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction"),
        *("compaction_trigger", "computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output"),
        *("shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call"),
    )
)


class InputText(PartExtras):
    type: Literal["input_text", "text"]
    text: str


class OutputTextPart(PartExtras):
    """parsed: added by OpenAI's client; no effect."""

    type: Literal["output_text"]
    text: str
    parsed: Any = None


class RefusalPart(PartExtras):
    type: Literal["refusal"]
    refusal: str


_PART_MODELS: Mapping[str, type[InputText | OutputTextPart | RefusalPart]] = by_type(
    InputText, OutputTextPart, RefusalPart
)


def _parse_part(value: object) -> str:
    """The text of a part."""
    value, kind = typed_object(value)
    if kind in _OTHER_PARTS:
        raise not_implemented(f"is of type {kind}, which is not implemented: the served models read text alone")
    if kind not in _PART_MODELS:
        raise value_error(f"must be of type {', '.join(_PART_MODELS)}")
    part = _PART_MODELS[kind].model_validate(value)
    return part.refusal if isinstance(part, RefusalPart) else part.text


_Part = Annotated[str, PlainValidator(_parse_part, InputText | OutputTextPart | RefusalPart)]
_PARTS = TypeAdapter(Annotated[list[_Part], Field(fail_fast=True)])


def _parse_content(value: object) -> str:
    """A string, or the concatenated texts of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise value_error("must be a string or a list of text parts")
    return "".join(_PARTS.validate_python(value))


ItemContent = Annotated[str, PlainValidator(_parse_content, str | list[InputText | OutputTextPart | RefusalPart])]

_MessageRoles = Literal["system", "developer", "user", "assistant"]


def _parse_role(value: object) -> str:
    if value not in get_args(_MessageRoles):
        raise value_error('must be "system", "developer", "user" or "assistant"')
    return "system" if value == "developer" else str(value)


class MessageItem(StrictObject):
    """A message, with or without `"type": "message"`. id, status, phase: of an answer that is sent back; no effect."""

    role: Annotated[str, PlainValidator(_parse_role, _MessageRoles)]
    content: ItemContent
    type: Literal["message"] | None = None
    id: str | None = None
    status: AskedStatus = None
    phase: Any = None


_Async = Annotated[Any, Only(None, False), Field(alias="async", validation_alias=AliasChoices("async", "async_"))]
"""By either name: `model_dump()` of OpenAI's client writes `async_`, and agents send such items back."""


class FunctionCallItem(StrictObject):
    """A call that the model made. id, status, parsed_arguments, caller: no effect."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: CallArguments
    id: str | None = None
    status: AskedStatus = None
    parsed_arguments: Any = None
    caller: Any = None
    namespace: Annotated[Any, Only(None)] = None
    async_: _Async = None


class FunctionCallOutputItem(StrictObject):
    """What a function returned. id, status, name, caller: no effect."""

    type: Literal["function_call_output"]
    call_id: Text
    output: ItemContent
    id: str | None = None
    status: AskedStatus = None
    name: str | None = None
    caller: Any = None
    namespace: Annotated[Any, Only(None)] = None


class SummaryPart(StrictObject):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictObject):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningInputItem(StrictObject):
    """Reasoning of the model. id, status, summary, encrypted_content: no effect; only `content` is read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryPart], Field(fail_fast=True), NullMeans([])] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], Field(fail_fast=True), NullMeans([])] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: AskedStatus = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningInputItem
_ITEM_MODELS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    **by_type(FunctionCallItem, FunctionCallOutputItem, ReasoningInputItem),
}


_NOT_STORED = (
    "nothing is stored here: send all items of the conversation. Clients do so by an option: "
    "providerOptions: {openai: {store: false}} in Vercel's AI SDK, default_options={\"store\": False} in Microsoft's "
    "Agent Framework, store=false in others"
)
"""To be read after a semicolon, or after "and"."""


def _parse_item(value: object) -> InputItem:
    if not isinstance(value, dict):
        raise value_error("must be an object")
    kind = value.get("type")
    if kind is None and "role" in value:
        kind = "message"
    if kind == "item_reference" or (kind is None and value.keys() == {"id"}):
        raise not_implemented(f"is a reference to a stored item, and {_NOT_STORED}")
    if not isinstance(kind, str):
        raise value_error("must have a role, or a type")
    if kind in _OTHER_ITEMS:
        raise not_implemented(f"is of type {kind}, which is not implemented")
    if kind not in _ITEM_MODELS:
        raise value_error(f"has the unknown type {kind[:MAX_ECHO_CHARS]!r}")
    return _ITEM_MODELS[kind].model_validate(value)


_Item = Annotated[InputItem, PlainValidator(_parse_item, InputItem)]


def _listed(value: object) -> object:
    """A list of items: a string is the message of a user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise value_error("must be a string or a list of items")
    return value


InputItems = Annotated[
    Annotated[list[_Item], Field(min_length=1, fail_fast=True)],
    BeforeValidator(_listed, json_schema_input_type=str | Annotated[list[_Item], Field(min_length=1)]),
]


class ResponsesTool(FunctionDefinition):
    """A function. strict: as in chat; null: false."""

    type: Literal["function"]
    allowed_callers: Annotated[Any, Only(None, ["direct"])] = None
    async_: _Async = None


def _parse_tool(value: object) -> ResponsesTool:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
        raise not_implemented(
            f"is of type {kind[:MAX_ECHO_CHARS]}, which is not implemented: only functions are, which the client runs"
        )
    return ResponsesTool.model_validate(value)


_Tool = Annotated[ResponsesTool, PlainValidator(_parse_tool, ResponsesTool)]
ResponsesTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), NullMeans([])]


def _parse_tool_choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "name": str(name), **more} if not more:
            return ToolChoice("named", (name,))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools), **more} if (
            tools and not more
        ):
            return ToolChoice(mode, tuple(_allowed_name(tool) for tool in tools))
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise not_implemented(f"asks for {kind[:MAX_ECHO_CHARS]}, which is not implemented: only functions are")
    raise value_error(
        'must be "none", "auto", "required", an object that names a function, or one with the allowed tools'
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
        case {"type": str(kind)} if kind != "function":
            raise not_implemented(f"allows {kind[:MAX_ECHO_CHARS]}, which is not implemented: only functions are")
    raise value_error("must contain allowed tools that name a function each")


class NamedFunctionChoice(StrictObject):
    """The model must call this function."""

    type: Literal["function"]
    name: str


class AllowedFunctionName(BaseModel):
    type: Literal["function"]
    name: str


class AllowedFunctionsChoice(StrictObject):
    """The model may or must call some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunctionName], Field(min_length=1)]


ResponsesToolChoice = Annotated[
    ToolChoice | None,
    PlainValidator(
        _parse_tool_choice,
        Literal["none", "auto", "required"] | NamedFunctionChoice | AllowedFunctionsChoice | None,
    ),
]


def write_tool_choice(choice: ToolChoice | None) -> object:
    """The choice as answers repeat it."""
    if choice is None:
        return "auto"
    if choice.names is None:
        return choice.mode
    if choice.mode == "named":
        return {"type": "function", "name": choice.names[0]}
    tools = [{"type": "function", "name": name} for name in choice.names]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format that the text must have."""

    grammar: GrammarSource | None = None
    """None for any text."""
    asked: Mapping[str, Any] | None = None
    """The format as the body has it; None: the body has none."""


def _parse_text_format(value: object) -> TextFormat:
    """The chat field response_format in another form: what json_schema has there is beside the type here."""
    if value is None:
        return TextFormat()
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise value_error('must have "text", "json_object" or "json_schema" as its "type"')
    grammar = parse_flat_format(value, "text.format")
    if is_deep(value):  # the answer repeats it
        raise value_error("is nested too deeply")
    return TextFormat(grammar, value)


class JsonSchemaTextFormat(StrictObject):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class TextConfig(StrictObject):
    """verbosity: no effect."""

    format: Annotated[TextFormat, PlainValidator(_parse_text_format, PlainFormat | JsonSchemaTextFormat | None)] = (
        Field(default_factory=TextFormat)
    )
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(StrictObject):
    """effort: as the chat field reasoning_effort. The other fields have no effect: reasoning is returned as it is, and
    not summarised."""

    effort: AskedReasoningEffort = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesStreamOptions(StreamOptions):
    """include_usage: no effect, since the last event has the usage."""

    continuous_usage_stats: Annotated[Any, Only(None, False)] = None


@with_known_fields("chat")
class ResponsesRequest(ChatForm):
    """input: a string, the message of a user, or a list of items: messages, function calls and their outputs, and
    reasoning.
    instructions: the first system message.
    include: "message.output_text.logprobs" returns log-probabilities, as top_logprobs above 0 does; the others have no
    effect, since there is nothing that they could add.
    max_tool_calls: no effect, since it does not count calls of functions.
    client_metadata: no effect; Codex sends it.
    truncation: no effect: input that is longer than the context is refused. truncate_prompt_tokens keeps its end.
    image: no effect, since there are no images.
    Fields of chat that OpenAI's /v1/responses lacks, such as stop, seed and top_k, mean the same here.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input: InputItems
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    top_logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    include: Annotated[list[Includable], Field(max_length=64), NullMeans([])] = Field(default_factory=list)
    text: Annotated[TextConfig, NullMeans(TextConfig())] = Field(default_factory=TextConfig)
    tools: ResponsesTools = Field(default_factory=list)
    tool_choice: ResponsesToolChoice = None
    reasoning: Annotated[ReasoningConfig, NullMeans(ReasoningConfig())] = Field(default_factory=ReasoningConfig)
    max_tool_calls: Annotated[int | None, WHOLE_FLOATS] = None
    client_metadata: Metadata = None
    truncation: Literal["auto", "disabled"] | None = None
    image: dict[str, Any] | None = None
    stream_options: ResponsesStreamOptions | None = None

    access_programs: Annotated[Any, Only(None, {"cyber": "standard"})] = None
    previous_response_id: Annotated[Any, Only(None, instead=_NOT_STORED)] = None
    conversation: Annotated[Any, Only(None, instead=_NOT_STORED)] = None
    background: Annotated[Any, Only(None, False, instead="no answer is kept until it is asked for")] = None
    background_options: Annotated[Any, Only(None)] = None
    prompt: Annotated[Any, Only(None)] = None
    context_management: Annotated[Any, Only(None, [])] = None

    max_tokens: Annotated[None, named_here("max_output_tokens")] = None
    response_format: Annotated[None, named_here("text.format")] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include


class CountInputRequest(ResponsesRequest):
    """The body of a response, of which only what makes the prompt counts."""

    personality: Annotated[Any, Only(None, instead="describe it in the instructions")] = None


# Preparation
def draft_response(body: ResponsesRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The request of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    with _FIELDS.naming():
        draft = draft_chat(chat_of(body, _FIELDS.values(body)), model, limits, origin, "resp_")
    return replace(draft, prepared=replace(draft.prepared, repeated=repeated_fields(body, model)))


@dataclass(slots=True)
class _Turn:
    """One message of the assistant, as items list its parts: reasoning, texts and calls."""

    texts: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    ends_with_text: bool = False

    def messages(self) -> list[ChatMessage]:
        """One, or none of reasoning without text, such as an encrypted one."""
        if not self.texts and not self.calls and not any(self.reasoning):
            return []
        message = ChatMessage(
            role="assistant",
            content="".join(self.texts),
            tool_calls=self.calls,
            reasoning_content="".join(self.reasoning) or None,
        )
        return [message]


def to_messages(instructions: str | None, items: Sequence[InputItem]) -> list[ChatMessage]:
    """The messages of the chat. System messages at the beginning become one, since many templates allow only one.

    Items of the assistant that follow each other become one message, as chat answers have it, unless a text follows
    directly after a text, or reasoning begins. Raises InvalidRequest.
    """
    messages: list[ChatMessage] = []
    system = [] if instructions is None else [instructions]
    turn: _Turn | None = None
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role == "system" and not messages and turn is None:
            system.append(item.content)
            continue
        is_text = isinstance(item, MessageItem) and item.role == "assistant"
        goes_on = isinstance(item, FunctionCallItem) or (is_text and not (turn and turn.ends_with_text))
        if turn is not None and not goes_on:
            messages += turn.messages()
            turn = None
        if isinstance(item, FunctionCallItem):
            turn = turn or _Turn()
            turn.calls.append(MessageToolCall.of(item.call_id, item.name, item.arguments))
            turn.ends_with_text = False
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem):
            if item.call_id not in call_ids:
                param = f"input[{index}].call_id"
                raise InvalidRequest(f"{param} matches no earlier function call", param)
            messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningInputItem):
            turn = _Turn(reasoning=[part.text for part in item.content])
        elif isinstance(item, MessageItem) and is_text:
            turn = turn or _Turn()
            turn.texts.append(item.content)
            turn.ends_with_text = True
        elif isinstance(item, MessageItem):
            messages.append(ChatMessage(role=item.role, content=item.content))
    if turn is not None:
        messages += turn.messages()
    if system:
        messages.insert(0, ChatMessage(role="system", content="\n\n".join(system)))
    if not messages:
        raise InvalidRequest("input must contain a message", "input")
    return messages


_FIELDS = FieldTable[ResponsesRequest](
    messages=("input", lambda body: to_messages(body.instructions, body.input)),
    max_completion_tokens="max_output_tokens",
    response_format=("text.format", lambda body: body.text.format.grammar),
    logprobs=("logprobs", lambda body: body.wants_logprobs),
    tools=(
        "tools",
        lambda body: [Tool.of(tool.name, tool.description, tool.parameters, tool.strict) for tool in body.tools],
    ),
    reasoning_effort=(
        "reasoning_effort",
        lambda body: body.reasoning_effort if body.reasoning.effort is None else body.reasoning.effort,
    ),
)
"""Fields of the chat body."""


def repeated_fields(body: ResponsesRequest, model: ServedModel) -> Mapping[str, Any]:
    """Fields of ResponseObject that repeat the body, or the defaults that applied."""
    asked_format = body.text.format.asked
    sampling = asked_sampling(body, model)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if asked_format is None else asked_format, "verbosity": "medium"},
        "tool_choice": write_tool_choice(body.tool_choice),
        "tools": [_written_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "user": body.user,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
    }


def _written_tool(tool: ResponsesTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


# Answer
# A list, of which the long ones are written beforehand, in slices.
WrittenLogprobs = Annotated[
    Any,
    PlainValidator(lambda value: value),
    PlainSerializer(lambda value: value, return_type=list[ChatTokenLogprob]),
]


@dataclass(frozen=True, slots=True)
class OutputText:
    """logprobs: empty if not requested."""

    text: str
    logprobs: WrittenLogprobs
    annotations: tuple[()] = ()
    type: Literal["output_text"] = "output_text"


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A text of the answer."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


@dataclass(frozen=True, slots=True)
class OutputFunctionCall:
    """A call. arguments: JSON text as generated. call_id: repeated by the item with the function's output."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"] = "function_call"


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


@dataclass(frozen=True, slots=True)
class OutputReasoning:
    """Reasoning of the answer, as the model wrote it."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()
    type: Literal["reasoning"] = "reasoning"


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


@dataclass(frozen=True, slots=True)
class ResponseInputDetails:
    """cached_tokens: as in chat. cache_write_tokens: 0, since OpenAI's field counts what is billed."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


@dataclass(frozen=True, slots=True)
class ResponseOutputDetails:
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


@dataclass(frozen=True, slots=True)
class IncompleteDetails:
    reason: Literal["max_output_tokens"] = "max_output_tokens"


@dataclass(frozen=True, slots=True)
class ResponseFailure:
    """Why a stream failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The answer. Fields that are not described repeat the body, or say what was done where that is always the same:
    nothing is stored or truncated, and there is one service tier.

    incomplete_details: set if the answer was cut by max_output_tokens or by the context's length.
    usage: null until the answer is complete.
    """

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    completed_at: int | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseEvents(BlockEvents):
    """The events of one response, with `sequence_number` from 0. Each block is an item."""

    def __init__(self, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        super().__init__(prepared, model, options)
        self._created = int(time.time())
        self._names = token_names(prepared, model)
        self._items: list[OutputItem] = []  # that are complete
        self._logprobs: list[ChatTokenLogprob] = []  # of the text block that is open
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        if self.finish_reason is None:
            return self._response("in_progress")
        if self.finish_reason == "length":
            return self._response("incomplete")
        return self._response("cancelled" if self.finish_reason == "abort" else "completed")

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""
        self._event("error", code=error.code, message=error.message, param=error.param)
        code: Any = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.status == 429:
            code = "rate_limit_exceeded"
        self._event("response.failed", response=self._response("failed", ResponseFailure(code, error.message)))
        events, self._events = self._events, []
        return b"".join(events)

    def _response(self, status: ResponseStatus, error: ResponseFailure | None = None) -> dict[str, Any]:
        is_over = self.finish_reason is not None
        answer = ResponseObject(
            id=self._prepared.response_id,
            created_at=self._created,
            model=self._prepared.adapter_name or self._model.name,
            status=status,
            output=list(self._items),
            usage=_usage(self.usage) if is_over else None,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            completed_at=int(time.time()) if status == "completed" else None,
            **self._prepared.repeated,
        )
        return self._with_weights(answer)

    def _event(self, kind: str, **content: object) -> None:
        self._events.append(event(kind, sequence_number=self._num_events, **content))
        self._num_events += 1

    def _write_start(self) -> None:
        self._event("response.created", response=self._response("in_progress"))
        self._event("response.in_progress", response=self._response("in_progress"))

    def _write_block_start(self, block: Block) -> None:
        item: OutputItem
        match block.kind:
            case "text":
                item = OutputMessage(_item_id(block), "in_progress", [])
            case "call":
                item = OutputFunctionCall(_item_id(block), "in_progress", block.call_id, block.name, "")
            case "reasoning":
                item = OutputReasoning(_item_id(block), "in_progress", [])
        self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = OutputText("", []) if block.kind == "text" else ReasoningText("")
            self._event("response.content_part.added", **_place(block), part=part)

    def _write_block_delta(self, block: Block, text: str, logprobs: list[TokenLogprob]) -> None:
        match block.kind:
            case "text":
                shown = _event_logprobs(self._add_logprobs(logprobs))
                self._event("response.output_text.delta", **_place(block), delta=text, logprobs=shown)
            case "call":
                self._event("response.function_call_arguments.delta", **_item_place(block), delta=text)
            case "reasoning":
                self._event("response.reasoning_text.delta", **_place(block), delta=text)

    def _write_block_end(self, block: Block) -> None:
        logprobs = self._logprobs
        item = self._end_item(block)
        match item:
            case OutputMessage():
                shown = _event_logprobs(logprobs)
                self._event("response.output_text.done", **_place(block), text=block.text, logprobs=shown)
                self._event("response.content_part.done", **_place(block), part=item.content[0])
            case OutputFunctionCall():
                place = _item_place(block)
                self._event("response.function_call_arguments.done", **place, arguments=item.arguments)
            case OutputReasoning():
                self._event("response.reasoning_text.done", **_place(block), text=block.text)
                self._event("response.content_part.done", **_place(block), part=item.content[0])
        self._event("response.output_item.done", output_index=block.index, item=item)

    def _write_end(self) -> None:
        kind = "response.completed" if self.finish_reason == "stop" else "response.incomplete"
        self._event(kind, response=self.whole())

    def _add_logprobs(self, tokens: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        """The entries of the open text block's next tokens."""
        added = build_chat_logprobs(tokens, self._names).content
        self._logprobs += added
        return added

    def _end_item(self, block: Block) -> OutputItem:
        """Completes the block's item."""
        logprobs, self._logprobs = self._logprobs, []
        status: ItemStatus = "incomplete" if block.is_cut else "completed"
        item: OutputItem
        match block.kind:
            case "text":
                item = OutputMessage(_item_id(block), status, [OutputText(block.text, write_list(logprobs))])
            case "call":
                item = OutputFunctionCall(_item_id(block), status, block.call_id, block.name, block.text)
            case "reasoning":
                item = OutputReasoning(_item_id(block), status, [ReasoningText(block.text)])
        self._items.append(item)
        return item


class WholeResponse(ResponseEvents):
    """Completes the items, and writes no events."""

    def _write_start(self) -> None: ...

    def _write_block_start(self, block: Block) -> None: ...

    def _write_block_delta(self, _block: Block, _text: str, logprobs: list[TokenLogprob]) -> None:
        self._add_logprobs(logprobs)

    def _write_block_end(self, block: Block) -> None:
        self._end_item(block)

    def _write_end(self) -> None: ...


def _event_logprobs(entries: Sequence[ChatTokenLogprob]) -> Any:
    """Logprobs in the form of events: without the tokens' bytes."""
    shown = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs],
        }
        for entry in entries
    ]
    return write_list(shown)


def _item_id(block: Block) -> str:
    return f"{_ID_PREFIXES[block.kind]}_{block.key}"


def _item_place(block: Block) -> dict[str, Any]:
    return {"item_id": _item_id(block), "output_index": block.index}


def _place(block: Block) -> dict[str, Any]:
    """Fields that tell the place of the only part of the block's item."""
    return {**_item_place(block), "content_index": 0}


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        ResponseInputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        ResponseOutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )


# Errors and routes
class ResponseNotStored(NotFound, code="response_not_found"):
    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"there is no response {shorten(response_id)!r}: this server stores no responses, so send the whole "
            "conversation as input of each request",
            "response_id",
        )


ENDPOINT = RoutedEndpoint(
    body_model=ResponsesRequest,
    draft=draft_response,
    build=partial(write_whole, WholeResponse),
    stream=ResponseEvents,
    renders_template=True,
    name="create_response",
    description="Answer a conversation given as items. Nothing is stored.",
    operation="chat",
    answer_model=ResponseObject,
    example={"input": "What do whales eat?", "max_output_tokens": 100},
)

router = APIRouter(route_class=JsonBodyRoute, tags=["generation"])


@dataclass(frozen=True, slots=True)
class InputTokens:
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


@router.post(
    "/v1/responses/input_tokens",
    responses=answers(InputTokens, *BODY_ERRORS, 404, 429, 503),
    openapi_extra=example_body({"input": "What do whales eat?"}),
)
async def input_tokens(request: Request, body: CountInputRequest) -> Response:
    """The tokens of the prompt that a response with these fields has."""
    count = InputTokens(await count_prompt_tokens(request, body, _FIELDS))
    return Response(write_json(count), media_type="application/json")


_NOTHING_STORED = {**error_responses(404)}


@router.get("/v1/responses/{response_id}", summary="Retrieve Response", responses=_NOTHING_STORED)
@router.delete("/v1/responses/{response_id}", summary="Delete Response", responses=_NOTHING_STORED)
@router.post("/v1/responses/{response_id}/cancel", summary="Cancel Response", responses=_NOTHING_STORED)
@router.get("/v1/responses/{response_id}/input_items", summary="List Input Items", responses=_NOTHING_STORED)
async def find_response(response_id: str) -> Response:
    """There is none: responses are not stored."""
    raise ResponseNotStored(response_id)
