"""Tools in chat bodies: function definitions, the tool choice, and tool calls in messages."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, field_validator
from pydantic_core import PydanticCustomError

from tokasaurus.server.protocol.fields import NullMeans, StrictObject, not_implemented, value_error
from tokasaurus.text.exact_json import loads

MAX_TOOLS = 1024
_MAX_DEPTH = 200
# OpenAI's, and the inner characters that other servers allow: spaces, and separators of namespaces.
_NAME_PATTERN = "^[a-zA-Z0-9_-]([a-zA-Z0-9_ .:/-]{0,62}[a-zA-Z0-9_-])?$"


def _only_functions() -> PydanticCustomError:
    return not_implemented("is not implemented beyond functions")


def _parse_type(value: object) -> str:
    if value == "custom":
        raise _only_functions()
    if value != "function":
        raise value_error('must be "function"')
    return "function"


FunctionType = Annotated[str, PlainValidator(_parse_type, Literal["function"])]


def is_deep(value: object) -> bool:
    """Whether it is nested deeper than real schemas: templates and encoders would exhaust the stack."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return False
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
    return bool(level)


class ToolExtras(StrictObject):
    """What clients add to tools and functions; without effect. The model does not see it."""

    annotations: Any = None
    cache_control: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    id: Any = None
    input_examples: Any = None
    metadata: Any = None
    output_schema: Any = None
    outputSchema: Any = None
    response: Any = None
    return_: Annotated[Any, Field(alias="return")] = None
    returns: Any = None
    title: Any = None


FunctionName = Annotated[str, Field(pattern=_NAME_PATTERN)]


class FunctionDefinition(ToolExtras):
    """parameters: a JSON schema of an object; null: the function has no parameters.
    strict: arguments match the schema even if the model decides by itself whether to call; a schema that cannot be
    followed is refused.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_depth(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if is_deep(parameters):
            raise value_error("is nested too deeply")
        return parameters


class Tool(ToolExtras):
    """strict: no effect here; it belongs into `function`."""

    type: FunctionType
    function: FunctionDefinition
    strict: Any = None

    @staticmethod
    def of(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> "Tool":
        """A function, from values that have been validated."""
        function = FunctionDefinition.model_construct(
            name=name, description=description, parameters=parameters, strict=strict
        )
        return Tool.model_construct(type="function", function=function)


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), NullMeans([])]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call."""

    mode: Literal["none", "auto", "required", "named"]
    """none: no call. auto: the model decides. required: at least one call. named: a call of the function in `names`."""
    names: tuple[str, ...] | None = None
    """Functions that may be called; None: all."""


def _parse_choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **more_inside}, **more}:
            if not more and not more_inside:
                return ToolChoice("named", (name,))
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools), **more_inside}, **more}:
            if mode in ("auto", "required") and tools and not more and not more_inside:
                return ToolChoice(mode, tuple(_allowed_name(tool) for tool in tools))
        case {"type": "custom"}:
            raise _only_functions()
    raise value_error(
        'must be "none", "auto", "required", an object that names a function, or one with the allowed tools'
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "custom"}:
            raise _only_functions()
    raise value_error("must contain allowed tools that name a function each")


class NamedFunction(StrictObject):
    name: str


class NamedToolChoice(StrictObject):
    """The model must call this function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunction(BaseModel):
    name: str


class AllowedTool(BaseModel):
    type: Literal["function"]
    function: AllowedFunction


class AllowedTools(StrictObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


class AllowedToolsChoice(StrictObject):
    """The model may or must call some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(_parse_choice, Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None),
]


def _parse_arguments(value: object) -> dict[str, Any] | str:
    """Arguments of a tool call in a message as a dict, the form chat templates expect; {} for blank text.

    Text that is not a JSON object remains text: of a call that was cut, or in which the model made a mistake.
    """
    if not isinstance(value, str):
        raise value_error("must be a string")
    if not value.strip():
        return {}
    try:
        arguments = loads(value)
    except ValueError:
        return value
    return arguments if isinstance(arguments, dict) and not is_deep(arguments) else value


CallArguments = Annotated[dict[str, Any] | str, PlainValidator(_parse_arguments, str)]


class CalledFunction(StrictObject):
    """arguments: a dict, or the text if it is not the JSON of an object.
    parsed_arguments, provider_specific_fields: added by OpenAI's client and litellm; no effect.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: CallArguments
    parsed_arguments: Any = None
    provider_specific_fields: Any = None


class MessageToolCall(StrictObject):
    """A tool call as a response contains it, so that clients can send it back.

    id: repeated as tool_call_id in the tool message with the result.
    index: the call's index in a stream; no effect.
    cache_control, extra_content, provider_specific_fields: added by clients; no effect.
    """

    id: Annotated[str, Field(min_length=1)]
    type: FunctionType
    function: CalledFunction
    index: int | None = None
    cache_control: Any = None
    extra_content: Any = None
    provider_specific_fields: Any = None

    @staticmethod
    def of(call_id: str, name: str, arguments: dict[str, Any] | str) -> "MessageToolCall":
        """A call, from values that have been validated."""
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        return MessageToolCall.model_construct(id=call_id, type="function", function=function)


@dataclass(frozen=True, slots=True)
class ToolCallFunction:
    """arguments: JSON text as generated."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in a response."""

    id: str
    function: ToolCallFunction
    type: Literal["function"] = "function"
