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
from tokasaurus.server.tools.formats import ToolCallFormat
from tokasaurus.server.tools.parser import CallRules

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
# The layout of json.dumps, which chat templates use and models are trained on. Free white space could go on forever.
_LAYOUT: dict[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"
_FUNCTION = re.compile(r"function_(\d+)(?:_\w+)?: ")
# Keywords of arguments that named arguments can follow, and those that say nothing about them.
_NAMED = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_ANNOTATIONS = frozenset(("title", "description", "$schema", "$id", "default", "examples", "x-guidance"))
_ARGUMENT_NAME = re.compile(r"[\w.+-]+")


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
    if not rules.format.start_mark:
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
    openings = _openings(tools, rules, added_tokens)
    if format_.start_mark:
        start = f"start_mark {_literal(format_.before, format_, added_tokens)}"
        lines = [f"start_mark[lazy]: TEXT {json.dumps(format_.start_mark)}"]
    else:
        start = ""
        text = "TEXT" if format_.name_key else '(TEXT "\\n")?'  # a name is one at the start of a line
        lines = [f"start_{index}[lazy]: {text} {opening}" for index, opening in openings.items()]
        openings = {index: f"start_{index}" for index in openings}
    answer = "start: call* TEXT" if rules.parallel else "start: call | TEXT"
    function = "function"
    if format_.is_list and rules.parallel:
        function = f"function ({json.dumps(format_.separator)} function)*"
    call = f"call: {start} {function} {_literal(format_.end, format_, added_tokens)}"
    functions = _functions(tools, rules, openings, added_tokens, all_strict=False)
    return _source([answer, call, _TEXT, *lines, *functions], "tools")


def _calls(tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int], all_strict: bool) -> list[str]:
    """The rule `calls`, one call or several if `rules.parallel`, and the rules that it uses."""
    format_ = rules.format
    start, end = (_literal(text, format_, added_tokens) for text in (format_.start, format_.end))
    call = "function" if format_.is_list else "call"
    calls = f"{call} ({json.dumps(format_.separator)} {call})*" if rules.parallel else call
    lines = (
        [f"calls: {start} {calls} {end}"] if format_.is_list else [f"calls: {calls}", f"call: {start} function {end}"]
    )
    openings = _openings(tools, rules, added_tokens)
    return [*lines, *_functions(tools, rules, openings, added_tokens, all_strict)]


def _openings(tools: Sequence[Tool], rules: CallRules, added_tokens: Mapping[str, int]) -> dict[int, str]:
    """What precedes the arguments of each tool that the rules allow, by the tool's index."""
    return {
        index: _literal(rules.format.opening(tool.function.name), rules.format, added_tokens)
        for index, tool in enumerate(tools)
        if tool.function.name in rules.names
    }


def _functions(
    tools: Sequence[Tool],
    rules: CallRules,
    openings: Mapping[int, str],
    added_tokens: Mapping[str, int],
    all_strict: bool,
) -> list[str]:
    """The rule `function` and the rules of each tool. openings: what precedes the arguments, by the tool's index.

    Raises Unsupported."""
    format_ = rules.format
    if format_.syntax == "gemma":
        raise Unsupported(
            f"the model writes calls in the format {format_.name}, which no grammar can force on them: strict tools, "
            "and a tool_choice that demands a call, are not implemented for it",
            "tool_choice" if all_strict else "tools",
        )
    lines = [f"function: {' | '.join(f'function_{index}' for index in openings)}"]
    ending = _literal(format_.ending, format_, added_tokens)
    for index, opening in openings.items():
        schema = _ANY_ARGUMENTS
        is_strict = all_strict or tools[index].function.strict
        if is_strict:
            schema = _arguments_schema(index, tools[index])
        if format_.syntax == "python":
            lines += _named_arguments(index, schema, opening, bool(tools[index].function.strict))
        else:
            lines.append(f"function_{index}: {opening} %json {_with_layout(schema)} {ending}")
    return lines


def _named_arguments(index: int, schema: Mapping[str, Any], opening: str, is_strict: bool) -> list[str]:
    """Rules of a call with named arguments, in the order of the schema. Raises Unsupported for what they cannot follow
    if the tool is strict."""
    param, rule = f"tools[{index}].function.parameters", f"function_{index}"
    other = next((key for key in schema if key not in _NAMED and key not in _ANNOTATIONS), None)
    if other is not None and is_strict:
        raise Unsupported(f"{param} contains {other}, which named arguments of calls cannot follow", param)
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in properties:
        if not _ARGUMENT_NAME.fullmatch(name):
            raise Unsupported(f"{param} has the property {name!r}, which cannot be a named argument", param)
    if not properties and schema.get("additionalProperties", True) is not False:
        value = f"/[A-Za-z_][A-Za-z0-9_]*=/ %json {_with_layout({})}"
        return [f'{rule}: {opening} "(" ({rule}_item (", " {rule}_item)*)? ")"', f"{rule}_item: {value}"]
    lines = [f'{rule}: {opening} "(" {rule}_first_0 ")"']
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for number, (name, value) in enumerate(properties.items()):
        item, more = f"{rule}_item_{number}", f"{rule}_more_{number + 1}"
        first, behind = f"{item} {more}", f'", " {item} {more}'
        if name not in schema.get("required", ()):
            first, behind = f"{first} | {rule}_first_{number + 1}", f"{behind} | {more}"
        inner = {"not": {}} if value is False else {} if value is True else value
        lines += [
            f"{item}: {json.dumps(f'{name}=')} %json {_with_layout({**inner, **definitions})}",
            f"{rule}_first_{number}: {first}",
            f"{rule}_more_{number}: {behind}",
        ]
    return [*lines, *(f'{rule}_{kind}_{len(properties)}: ""' for kind in ("first", "more"))]


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


def _literal(text: str, format_: ToolCallFormat, tokens: Mapping[str, int]) -> str:
    """A text of the format as part of a rule; its marks are tokens if the tokenizer has them."""
    marks = [mark for mark in format_.marks if mark in tokens]
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


def _source(lines: list[str], param: str) -> GrammarSource:
    functions = {number: match[1] for number, line in enumerate(lines, 1) if (match := _FUNCTION.match(line))}
    line_params = {number: f"tools[{index}].function.parameters" for number, index in functions.items()}
    return GrammarSource("lark", "\n".join(lines), param, line_params)
