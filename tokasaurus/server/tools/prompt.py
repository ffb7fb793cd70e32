"""Messages and tools of a body → the chat template's input. Tools unknown to the template are described in text."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.protocol.chat import ChatMessage
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.tools.formats import HERMES, ToolCallFormat
from tokasaurus.server.tools.support import ToolSupport
from tokasaurus.text.template_text import concatenated, template_text

_NO_PARAMETERS = {"type": "object", "properties": {}}


def template_input(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], support: ToolSupport
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools) for the template. Raises InvalidRequest."""
    _check_call_ids(messages)
    definitions = [_definition(tool) for tool in tools]
    if support.in_template:
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        no_tools: list[dict[str, Any]] | None = [] if has_calls and support.needs_list else None
        shown = [part for message in messages for part in _as_dicts(message, support)]
        if not support.in_system_message:
            return shown, definitions or no_tools
        if definitions:
            _system_message(shown)["tools"] = json.dumps(
                [definition["function"] for definition in definitions], ensure_ascii=False
            )
        return shown, None
    format_ = support.format or HERMES
    written = _write_messages(messages, format_)
    if definitions:
        text = _describe(definitions, format_)
        system = _system_message(written)
        system["content"] = f"{system['content']}\n\n{text}" if system["content"] else text
    return written, None


def _system_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The first message, which becomes a system message if it is none."""
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    return messages[0]


def _check_call_ids(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest for a tool result without a call: most templates show no ids, so the model would take it
    for the result of another call."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls)
        if message.tool_call_id is not None and message.tool_call_id not in known:
            param = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{param} matches no earlier tool call", param)


def _definition(tool: Tool) -> dict[str, Any]:
    """The part of a tool that the model sees."""
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = _NO_PARAMETERS if function.parameters is None else function.parameters
    return {"type": "function", "function": shown}


def _as_dicts(message: ChatMessage, support: ToolSupport) -> list[dict[str, Any]]:
    """A message as the template expects it: one, or one for each part that it shows."""
    role = support.result_role if message.role == "tool" else message.role
    shown: dict[str, Any] = {"role": role, "content": message.content, **_reasoning(message)}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = _call_id(message.tool_call_id, support)
    if not message.tool_calls:
        return [shown]
    if not support.shows_calls:
        return _with_written_calls(shown, message, support.format or HERMES)
    shown["tool_calls"] = [
        {
            "id": _call_id(call.id, support),
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, support)},
        }
        for call in message.tool_calls
    ]
    return [shown]


def _with_written_calls(shown: dict[str, Any], message: ChatMessage, format_: ToolCallFormat) -> list[dict[str, Any]]:
    """A message whose calls the template does not show: they follow its content."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    if format_.as_metadata:
        parts = [shown] if message.content else []
        for name, arguments in calls:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts.append({"role": "assistant", "metadata": name, "content": text})
        return parts
    # The marks are the server's, so that they become the model's tokens. The rest is the client's.
    pieces = [template_text(text) if is_mark else text for text, is_mark in format_.parts(calls)]
    return [shown | {"content": concatenated([message.content or "", *pieces])}]


def _call_id(id_: str, support: ToolSupport) -> str:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    if support.takes_long_ids:
        return id_
    return hashlib.sha256(id_.encode(errors="surrogatepass")).hexdigest()[:9]


def _reasoning(message: ChatMessage) -> dict[str, str]:
    """The message's reasoning under the names that templates know."""
    text = message.reasoning_text
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _arguments(arguments: dict[str, Any] | str, support: ToolSupport) -> dict[str, Any] | str:
    """A call's arguments in a form that the template can show."""
    if isinstance(arguments, str):
        return arguments if support.takes_text else {"arguments": arguments}
    return arguments if support.takes_objects else json.dumps(arguments, ensure_ascii=False)


def _write_messages(messages: Sequence[ChatMessage], format_: ToolCallFormat) -> list[dict[str, Any]]:
    """Messages without tool fields: calls become part of the content, consecutive results one user message."""
    written: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.role == "tool"
        content = f"<tool_response>\n{message.content}\n</tool_response>" if is_result else message.content
        if message.tool_calls:
            content = f"{content}\n" if content else ""
            content += format_.write_all((call.function.name, call.function.arguments) for call in message.tool_calls)
        if is_result and was_result:
            written[-1]["content"] += f"\n{content}"
        else:
            role = "user" if is_result else message.role
            written.append({"role": role, "content": content, **_reasoning(message)})
            if message.name is not None and not is_result:
                written[-1]["name"] = message.name
        was_result = is_result
    return written


def _describe(definitions: Sequence[dict[str, Any]], format_: ToolCallFormat) -> str:
    lines = [json.dumps(definition["function"], ensure_ascii=False) for definition in definitions]
    example = format_.write("name of the function", {"name of a parameter": "its value"})
    return "\n".join(
        [
            "You can call these functions, each given as a JSON object with its parameters:",
            *lines,
            "",
            "To call one, write a JSON object in exactly this form, and nothing behind it:",
            example,
        ]
    )
