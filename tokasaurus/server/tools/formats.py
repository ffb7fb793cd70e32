"""How models write calls of tools, and which of these ways a chat template has. See docs/api.md, "Tools"."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokasaurus.text.tokenizer import ChatTemplateError, Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A call is a JSON object {"name": …, arguments_key: …} between `start` and `end`, which may be empty.

    separator: stands between calls. ignored: characters that may stand there, and behind the last.
    """

    name: str
    start: str
    end: str
    separator: str
    arguments_key: str
    ignored: str

    @property
    def start_mark(self) -> str:
        """What a call is known by."""
        return self.start.strip() or "{"

    @property
    def end_mark(self) -> str:
        return self.end.strip()

    def opening(self, name: str) -> str:
        """What stands before the arguments of a call, but for `start`."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model is taught to write it."""
        return f"{self.start}{self.opening(name)}{json.dumps(arguments, ensure_ascii=False)}}}{self.end}"


HERMES = ToolCallFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments", " \t\n\r")
LLAMA3 = ToolCallFormat("llama3", "", "", "; ", "parameters", " \t\n\r;")
FORMATS = {format_.name: format_ for format_ in (HERMES, LLAMA3)}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a model's chat template knows of tools.

    format: None where the template writes calls in none that is known. in_template: whether it shows the tools.
    needs_list: calls in messages are shown only where there is a list of tools, be it empty, since there is a template
    of its own for that.
    """

    format: ToolCallFormat | None
    in_template: bool
    needs_list: bool = False


NO_TOOLS_IN_TEMPLATE = ToolSupport(HERMES, in_template=False)

_QUESTION = {"role": "user", "content": "?"}
_TOOL_NAME = "look_up"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "?",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_ARGUMENTS = {"word": "tree"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": _TOOL_NAME, "arguments": _ARGUMENTS}},
    ],
}


def find_tool_support(tokenizer: Tokenizer, format_name: str | None) -> ToolSupport:
    """By what the template makes of a tool and a call. format_name: is taken in place of what is found."""
    chosen = None if format_name is None else FORMATS[format_name]
    shown = _render(tokenizer, [_QUESTION], [_TOOL])
    if not shown or shown == _render(tokenizer, [_QUESTION], None):
        return ToolSupport(chosen or HERMES, in_template=False)
    if chosen is None:
        called = _without_spaces(_render(tokenizer, [_QUESTION, _CALL], [_TOOL]))
        written = (format_ for format_ in FORMATS.values() if _is_written(format_, called))
        chosen = next(written, None)
    shows_call, shows_call_with_list = (
        _TOOL_NAME in _render(tokenizer, [_QUESTION, _CALL], no_tools) for no_tools in (None, list[Any]())
    )
    return ToolSupport(chosen, in_template=True, needs_list=shows_call_with_list and not shows_call)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Nothing where the template refuses them."""
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)
    except ChatTemplateError:
        return ""


def _is_written(format_: ToolCallFormat, rendered: str) -> bool:
    return _without_spaces(format_.write(_TOOL_NAME, _ARGUMENTS)) in rendered


def _without_spaces(text: str) -> str:
    return "".join(text.split())
