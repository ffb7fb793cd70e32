"""What a chat body says of tools → which calls its answer may have, or must."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokasaurus.server.call_reader import CallRules
from tokasaurus.server.errors import InvalidRequest, Unsupported, shorten
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.tools import Tool, ToolChoice
from tokasaurus.server.tool_formats import ToolSupport


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: the tools that the prompt tells of. rules: None where the answer is plain text."""

    shown: Sequence[Tool] = ()
    rules: CallRules | None = None


def resolve_tools(body: ChatCompletionRequest, support: ToolSupport) -> ToolUse:
    """Raises InvalidRequest."""
    choice = body.tool_choice or ToolChoice("auto")
    names = check_names(body.tools)
    if not body.tools:
        if choice.mode in ("required", "named") or choice.names is not None:
            raise InvalidRequest("tool_choice asks for a call, and there are no tools", "tool_choice")
        return ToolUse()
    if choice.mode == "none":
        return ToolUse()
    unknown = next((name for name in choice.names or () if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"tool_choice names {shorten(unknown)!r}, which is not one of the tools", "tool_choice")
    if support.format is None:
        raise InvalidRequest(
            "tools: this model's template writes calls in a form that is not known here (tool_call_format= sets one)",
            "tools",
        )
    if choice.mode in ("required", "named"):
        raise Unsupported(f"tool_choice is not implemented for {choice.mode} functions", "tool_choice")
    return ToolUse(
        shown=body.tools,
        rules=CallRules(
            support.format,
            names if choice.names is None else frozenset(choice.names),
            parallel=body.parallel_tool_calls,
            is_named=choice.mode == "named",
        ),
    )


def check_names(tools: Sequence[Tool]) -> frozenset[str]:
    """The functions' names. Raises InvalidRequest if one occurs twice."""
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise InvalidRequest(f"tools has two functions named {tool.function.name!r}", "tools")
        names.add(tool.function.name)
    return frozenset(names)
