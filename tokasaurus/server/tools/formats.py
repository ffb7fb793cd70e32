"""Formats in which models write tool calls, and which of them a chat template uses. See docs/api.md, "Tools"."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokasaurus.text.token_decoder import TokenizerError
from tokasaurus.text.tokenizer import ChatTemplateError, ChatTemplateTooSlow, RenderChat, Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A call is a JSON object {"name": …, arguments_key: …} between `start` and `end`, which may be empty."""

    name: str
    """The value of tool_call_format that selects this format."""
    start: str
    end: str
    separator: str
    """Written between calls."""
    arguments_key: str
    ignored: str
    """Characters that are dropped between calls and after the last."""

    @property
    def start_mark(self) -> str:
        """The text that marks the beginning of a call."""
        return self.start.strip() or "{"

    @property
    def end_mark(self) -> str:
        return self.end.strip()

    def opening(self, name: str) -> str:
        """The text of a call between `start` and the arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    def write(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """A call as models are trained to write it. arguments: a text, which may not be JSON, is written as it is."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return f"{self.start}{self.opening(name)}{text}}}{self.end}"


HERMES = ToolCallFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments", " \t\n\r")
LLAMA3 = ToolCallFormat("llama3", "", "", "; ", "parameters", " \t\n\r;")
FORMATS = {format_.name: format_ for format_ in (HERMES, LLAMA3)}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a model's chat template supports tools."""

    format: ToolCallFormat | None
    """None if the template writes calls in no known format."""
    in_template: bool
    """Whether the template shows the tools."""
    needs_list: bool = False
    """Whether the template shows the calls in messages only if it gets a list of tools, even an empty one: some models
    have a separate template for tool use."""
    takes_objects: bool = True
    """Whether the template shows arguments of calls that are objects. If not, it needs their JSON text."""
    takes_text: bool = True
    """Whether the template shows arguments of calls that are a text, as it is or as a JSON string."""


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
_CUT_ARGUMENTS = '{"word": "tree'
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": _TOOL_NAME, "arguments": _ARGUMENTS}},
    ],
}


def find_tool_support(tokenizer: Tokenizer, format_name: str | None) -> ToolSupport:
    """`tool_support_of` the model's own template. Raises TokenizerError if it does not finish."""
    try:
        return tool_support_of(tokenizer.render_chat, format_name)
    except ChatTemplateTooSlow as error:
        raise TokenizerError(f"the chat template in {tokenizer.directory} cannot be used: {error}") from None


def tool_support_of(render: RenderChat, format_name: str | None) -> ToolSupport:
    """Detected by rendering a tool and a call. format_name: overrides the detected format.

    Raises ChatTemplateTooSlow."""
    chosen = None if format_name is None else FORMATS[format_name]
    shown = _render(render, [_QUESTION], [_TOOL])
    if not shown or shown == _render(render, [_QUESTION], None):
        return ToolSupport(chosen or HERMES, in_template=False)
    if chosen is None:
        called = _without_spaces(_render(render, [_QUESTION, _CALL], [_TOOL]))
        written = (format_ for format_ in FORMATS.values() if _is_written(format_, called))
        chosen = next(written, None)
    shows_call, shows_call_with_list = (
        _TOOL_NAME in _render(render, [_QUESTION, _CALL], no_tools) for no_tools in (None, list[Any]())
    )
    takes_objects, takes_text = (_shows(render, arguments) for arguments in (_ARGUMENTS, _CUT_ARGUMENTS))
    return ToolSupport(
        chosen,
        in_template=True,
        needs_list=shows_call_with_list and not shows_call,
        takes_objects=takes_objects or not takes_text,
        takes_text=takes_text,
    )


def _shows(render: RenderChat, arguments: Mapping[str, Any] | str) -> bool:
    """Whether the template shows a call's arguments."""
    call = {"id": "call00000", "type": "function", "function": {"name": _TOOL_NAME, "arguments": arguments}}
    rendered = _render(render, [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], [_TOOL])
    return _ARGUMENTS["word"] in rendered  # a text may be escaped


def _render(render: RenderChat, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The rendered prompt; "" if the template refuses the messages or the tools."""
    try:
        return render(messages, add_generation_prompt=False, tools=tools)
    except ChatTemplateTooSlow:  # it would not finish for a client's messages either
        raise
    except ChatTemplateError:
        return ""


def _is_written(format_: ToolCallFormat, rendered: str) -> bool:
    return _without_spaces(format_.write(_TOOL_NAME, _ARGUMENTS)) in rendered


def _without_spaces(text: str) -> str:
    return "".join(text.split())
