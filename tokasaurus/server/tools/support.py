"""How a chat template supports tools: found by rendering tools, calls and results with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokasaurus.server.tools.formats import FORMATS, HERMES, ToolCallFormat
from tokasaurus.text.token_decoder import TokenizerError
from tokasaurus.text.tokenizer import ChatTemplateError, ChatTemplateTooSlow, RenderChat, Tokenizer


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a model's chat template supports tools."""

    format: ToolCallFormat | None
    """None if the template writes calls in no known format."""
    in_template: bool
    """Whether the template shows the tools."""
    in_system_message: bool = False
    """Whether it shows them as a JSON text that is the field `tools` of the system message."""
    shows_calls: bool = True
    """Whether it shows `tool_calls` of messages. If not, they are written into the content."""
    result_role: str = "tool"
    """The role of messages that it shows as results of calls."""
    needs_list: bool = False
    """Whether the template shows the calls in messages only if it gets a list of tools, even an empty one: some models
    have a separate template for tool use."""
    takes_objects: bool = True
    """Whether the template shows arguments of calls that are objects. If not, it needs their JSON text."""
    takes_text: bool = True
    """Whether the template shows arguments of calls that are a text, as it is or as a JSON string."""
    takes_long_ids: bool = True
    """Whether ids of calls may have more than nine characters."""


NO_TOOLS_IN_TEMPLATE = ToolSupport(HERMES, in_template=False)

_QUESTION = {"role": "user", "content": "?"}
_TOOL_NAME = "look_up"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "?",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "?"}}},
    },
}
_WORD = "tree"
_ARGUMENTS = {"word": _WORD}
_CUT_ARGUMENTS = f'{{"word": "{_WORD}'
_ID = "call00000"
_LONG_ID = "call_0123456789abcdefghijklmn"
# How templates write the id of a call, which calls are recognised without.
_WRITTEN_IDS = ('"tool_call_id":"0",', f',"id":"{_ID}"', f"[CALL_ID]{_ID}")
# The first is everyone's, the others are the names that templates without `tool_calls` have for results.
_RESULT_ROLES = ("tool", "observation", "tool_response")
_METADATA = {"role": "assistant", "metadata": _TOOL_NAME, "content": f'{{"word": "{_WORD}"}}'}
_CALL_BY_ROLE = {"role": "assistant_tool_call", "content": _WORD}


def find_tool_support(tokenizer: Tokenizer, format_name: str | None) -> ToolSupport:
    """`tool_support_of` the model's own template. Raises TokenizerError if it does not finish."""
    try:
        return tool_support_of(tokenizer.render_chat, format_name)
    except ChatTemplateTooSlow as error:
        raise TokenizerError(f"the chat template in {tokenizer.directory} cannot be used: {error}") from None


def tool_support_of(render: RenderChat, format_name: str | None) -> ToolSupport:
    """Detected by rendering a tool, a call and a result. format_name: overrides the detected format.

    Raises ChatTemplateTooSlow."""
    chosen = None if format_name is None else FORMATS[format_name]
    shown = _render(render, [_QUESTION], [_TOOL])
    if not shown or shown == _render(render, [_QUESTION], None):
        if _shows_tools_of_system_message(render):
            return ToolSupport(
                chosen or FORMATS["phi4_mini"],
                in_template=True,
                in_system_message=True,
                shows_calls=False,
                result_role=_result_role(render),
            )
        return ToolSupport(chosen or HERMES, in_template=False)
    called = next(
        (text for text in (_render(render, [_QUESTION, call], [_TOOL]) for call in _calls()) if _WORD in text), ""
    )
    shows_calls = called != ""
    if chosen is None:
        chosen = _format_in(called) if shows_calls else _asked_format(render, shown)
    shows_call, shows_call_with_list = (
        any(_TOOL_NAME in _render(render, [_QUESTION, message], no_tools) for message in _calls())
        for no_tools in (None, list[Any]())
    )
    takes_objects, takes_text = (_shows(render, _call(arguments)) for arguments in (_ARGUMENTS, _CUT_ARGUMENTS))
    shown_arguments = _ARGUMENTS if takes_objects else _CUT_ARGUMENTS
    return ToolSupport(
        chosen,
        in_template=True,
        shows_calls=shows_calls,
        result_role="tool" if shows_calls else _result_role(render),
        needs_list=shows_call_with_list and not shows_call,
        takes_objects=takes_objects or not takes_text,
        takes_text=takes_text or not shows_calls,
        takes_long_ids=not shows_calls or _shows(render, _call(shown_arguments, id_=_LONG_ID)),
    )


def _call(arguments: Mapping[str, Any] | str, id_: str = _ID) -> dict[str, Any]:
    call = {"id": id_, "type": "function", "function": {"name": _TOOL_NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _calls() -> list[dict[str, Any]]:
    """A message with a call, in the forms that templates may need."""
    return [_call(_ARGUMENTS), _call(f'{{"word": "{_WORD}"}}')]


def _shows(render: RenderChat, message: dict[str, Any]) -> bool:
    """Whether the template shows a call's arguments."""
    return _WORD in _render(render, [_QUESTION, message], [_TOOL])  # a text may be escaped


def _shows_tools_of_system_message(render: RenderChat) -> bool:
    system = {"role": "system", "content": "?", "tools": f"[{_TOOL_NAME}]"}
    return _TOOL_NAME in _render(render, [system, _QUESTION], None)


def _result_role(render: RenderChat) -> str:
    for role in _RESULT_ROLES:
        result = {"role": role, "content": _WORD, "tool_call_id": _ID, "name": _TOOL_NAME}
        answer = {"role": "assistant", "content": "?"}
        if _WORD in _render(render, [_QUESTION, answer, result], [_TOOL]):
            return role
    return "user"


def _format_in(called: str) -> ToolCallFormat | None:
    """The format in which the call is written."""
    text = _bare(called)
    written = (format_ for format_ in FORMATS.values() if _bare(format_.write(_TOOL_NAME, _ARGUMENTS)) in text)
    return next((format_ for format_ in written if not format_.as_metadata), None)


def _asked_format(render: RenderChat, shown: str) -> ToolCallFormat | None:
    """The format of a template that shows no calls. shown: what it writes about tools."""
    if _bare(_TOOL_NAME + _METADATA["content"]) in _bare(_render(render, [_QUESTION, _METADATA], [_TOOL])):
        return next(format_ for format_ in FORMATS.values() if format_.as_metadata)
    texts = [_bare(shown), _bare(_render(render, [_QUESTION, _CALL_BY_ROLE], [_TOOL]))]
    asked = (format_ for format_ in FORMATS.values() if format_.asked_by)
    return next((format_ for format_ in asked if any(format_.asked_by in text for text in texts)), None)


def _render(render: RenderChat, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The rendered prompt; "" if the template refuses the messages or the tools."""
    try:
        return render(messages, add_generation_prompt=False, tools=tools)
    except ChatTemplateTooSlow:  # it would not finish for a client's messages either
        raise
    except ChatTemplateError:
        return ""


def _bare(text: str) -> str:
    """Without what templates write differently: white space, quotation marks, ids."""
    text = "".join(text.split()).replace("'", '"')
    for written in _WRITTEN_IDS:
        text = text.replace(written, "")
    return text
