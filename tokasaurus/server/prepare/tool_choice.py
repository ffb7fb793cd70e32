"""A chat body's tool fields → which calls its answer may or must contain."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokasaurus.server.errors import InvalidRequest, Unsupported, shorten
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.tools import Tool, ToolChoice
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.grammar import write_calls_or_json, write_forced_calls, write_free_calls
from tokasaurus.server.tools.parser import CallRules


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one chat answer uses tools."""

    shown: Sequence[Tool] = ()
    """The tools that the prompt describes."""
    rules: CallRules | None = None
    """Which calls the answer may contain; None if all of it is content."""
    grammar: GrammarSource | None = None
    """What the whole answer must match; None for any text."""


def resolve_tools(body: ChatCompletionRequest, model: ServedModel, content: GrammarSource | None) -> ToolUse:
    """content: the grammar that the body asks for, which applies to the content. Raises InvalidRequest."""
    support = model.tools
    choice = body.tool_choice or ToolChoice("auto")
    names = check_names(body.tools)
    if not body.tools:
        if choice.mode in ("required", "named") or choice.names is not None:
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
        return ToolUse(grammar=content)
    if choice.mode == "none":
        return ToolUse(grammar=content)
    unknown = next((name for name in choice.names or () if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"tool_choice names {shorten(unknown)!r}, which is not one of the tools", "tool_choice")
    if support.format is None:
        raise InvalidRequest(
            "tools: this model's chat template writes calls in an unknown format (tool_call_format= sets one)",
            "tools",
        )
    rules = CallRules(
        support.format,
        names if choice.names is None else frozenset(choice.names),
        parallel=body.parallel_tool_calls and choice.mode != "named",
        is_named=choice.mode == "named",
        is_forced=choice.mode in ("required", "named"),
    )
    return ToolUse(body.tools, rules, _grammar(body.tools, rules, model, content))


def _grammar(
    tools: Sequence[Tool], rules: CallRules, model: ServedModel, content: GrammarSource | None
) -> GrammarSource | None:
    if content is not None and content.format != "json_schema":
        raise Unsupported(f"{content.param} can be used with tools only if tool_choice is none", content.param)
    added_tokens = {text: id_ for text, id_ in model.tokenizer.added_tokens.items() if id_ < model.vocab_size}
    if rules.is_forced:
        return write_forced_calls(tools, rules, added_tokens)  # the answer has no content to constrain
    if content is not None:
        return write_calls_or_json(tools, rules, added_tokens, content)
    if any(tool.function.strict for tool in tools):
        return write_free_calls(tools, rules, added_tokens)
    return None


def check_names(tools: Sequence[Tool]) -> frozenset[str]:
    """The functions' names. Raises InvalidRequest if one occurs twice."""
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise InvalidRequest(f"tools has two functions named {tool.function.name!r}", "tools")
        names.add(tool.function.name)
    return frozenset(names)
