"""Tools → the grammar of an answer whose calls must be valid, in llguidance's dialect of Lark.

`CallReader` reads every call that these grammars allow.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokasaurus.server.errors import InvalidRequest, Unsupported
from tokasaurus.server.protocol.exact_schema import SchemaError, exact_schema
from tokasaurus.server.protocol.grammar_fields import SHORT_ESCAPES, GrammarSource
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.tools.parser import CallRules

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
# The layout of json.dumps, which chat templates use and models are trained on. Free white space could go on forever.
_LAYOUT: dict[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"
_FUNCTION = re.compile(r"function_(\d+): ")


def write_forced_calls(tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int]) -> GrammarSource:
    """The answer is one call, or several if `rules.parallel`, and nothing else; arguments match their schemas.

    Keywords that cannot be followed are refused for strict tools, and left out for others.
    added_tokens: texts that the tokenizer has as single added tokens, with their ids. Where the grammar demands such a
    text, it names the token, or the text would be spelled in ordinary tokens. Raises InvalidRequest.
    """
    return _source(["start: calls", *_calls(tools, rules, added_tokens, all_strict=True)], "tools")


def write_calls_or_json(
    tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int], content: GrammarSource
) -> GrammarSource:
    """The answer is either content that matches a JSON schema, or calls; arguments of strict tools match their schemas.

    added_tokens: as in `write_forced_calls`. Raises InvalidRequest, and Unsupported if the format has no start mark,
    since only a mark tells a call from JSON content.
    """
    if not rules.format.start:
        raise Unsupported(
            f"{content.param} with tools needs tool_choice none, or a model whose tool calls begin with a mark",
            content.param,
        )
    lines = ["start: calls | content", f"content: %json {content.text}"]
    return _source([*lines, *_calls(tools, rules, added_tokens, all_strict=False)], content.param)


def write_free_calls(tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int]) -> GrammarSource:
    """The answer is text, with or without calls; arguments of strict tools match their schemas.

    A call is recognised by its start mark, however it is spelled, or by its brace and name if the format has no mark.
    added_tokens: as in `write_forced_calls`. Raises InvalidRequest.
    """
    format_ = rules.format
    mark = format_.start.strip()
    openings = {index: json.dumps(format_.opening(tool.function.name)) for index, tool in _callable(tools, rules)}
    if mark:
        start = f"start_mark {json.dumps(format_.start.removeprefix(mark))}"
        lines = [f"start_mark[lazy]: TEXT {json.dumps(mark)}"]
    else:
        start = ""
        lines = [f"start_{index}[lazy]: TEXT {opening}" for index, opening in openings.items()]
        openings = {index: f"start_{index}" for index in openings}
    answer = "start: call* TEXT" if rules.parallel else "start: call | TEXT"
    call = f"call: {start} function {_mark(format_.end, added_tokens)}"
    return _source([answer, call, _TEXT, *lines, *_functions(tools, openings, all_strict=False)], "tools")


def _calls(tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int], all_strict: bool) -> list[str]:
    """The rule `calls`, one call or several if `rules.parallel`, and the rules that it uses."""
    format_ = rules.format
    lines = ["calls: call (separator call)*" if rules.parallel else "calls: call"]
    if rules.parallel:
        lines.append(f"separator: {json.dumps(format_.separator)}")
    lines.append(f"call: {_mark(format_.start, added_tokens)} function {_mark(format_.end, added_tokens)}")
    openings = {index: json.dumps(format_.opening(tool.function.name)) for index, tool in _callable(tools, rules)}
    return [*lines, *_functions(tools, openings, all_strict)]


def _callable(tools: Sequence[Tool], rules: CallRules) -> list[tuple[int, Tool]]:
    """(index in `tools`, tool) of each tool that the rules allow."""
    return [(index, tool) for index, tool in enumerate(tools) if tool.function.name in rules.names]


def _functions(tools: Sequence[Tool], openings: dict[int, str], all_strict: bool) -> list[str]:
    """The rule `function` and one rule per tool. openings: what precedes the arguments, by the index of the tool."""
    lines = [f"function: {' | '.join(f'function_{index}' for index in openings)}"]
    for index, opening in openings.items():
        schema = _ANY_ARGUMENTS
        if all_strict or tools[index].function.strict:
            schema = _arguments_schema(index, tools[index])
        lines.append(f'function_{index}: {opening} %json {_with_layout(schema)} "}}"')
    return lines


def _arguments_schema(index: int, tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, with the type object even if the tool gives no type.

    Raises InvalidRequest, and Unsupported for what cannot be followed if the tool is strict."""
    schema = _NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
    type_ = schema.get("type", "object")
    param = f"tools[{index}].function.parameters"
    if type_ != "object" and not (isinstance(type_, list) and "object" in type_):
        raise InvalidRequest(f"{param} must have the type object", param)
    if "x-guidance" in schema:
        raise Unsupported(f"{param}: x-guidance is not implemented", param)
    try:
        return exact_schema(schema | {"type": "object"}, is_strict=bool(tool.function.strict))
    except SchemaError as error:
        raise Unsupported(f"{param} {error}", param) from None


def _with_layout(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, with the options that fix the layout of the arguments."""
    text = json.dumps(schema, ensure_ascii=False)
    layout = _LAYOUT
    if r"\u00" not in text and "\x7f" not in text:
        # So that no property name can occur twice with different escapes. Control characters need the long escapes.
        layout = layout | {"json_allowed_escapes": SHORT_ESCAPES}
    return json.dumps({**schema, "x-guidance": layout}, ensure_ascii=False)


def _mark(text: str, tokens: Mapping[str, int]) -> str:
    """A start or end mark with the white space around it, as part of a rule."""
    mark = text.strip()
    if mark not in tokens:
        return json.dumps(text) if text else ""
    before, _, after = text.partition(mark)
    token = f"<[{tokens[mark]}]>"
    return " ".join(part for part in (before and json.dumps(before), token, after and json.dumps(after)) if part)


def _source(lines: list[str], param: str) -> GrammarSource:
    functions = {number: match[1] for number, line in enumerate(lines, 1) if (match := _FUNCTION.match(line))}
    line_params = {number: f"tools[{index}].function.parameters" for number, index in functions.items()}
    return GrammarSource("lark", "\n".join(lines), param, line_params)
