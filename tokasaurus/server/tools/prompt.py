"""Messages and tools of a body → the chat template's input. Tools unknown to the template are described in text."""

import json
from collections.abc import Sequence
from typing import Any

from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.protocol.chat import ChatMessage
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.tools.formats import HERMES, ToolCallFormat, ToolSupport

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
        return [_as_dict(message, support) for message in messages], definitions or no_tools
    format_ = support.format or HERMES
    written = _write_messages(messages, format_)
    if definitions:
        text = _describe(definitions, format_)
        if written[0]["role"] == "system":
            written[0]["content"] += f"\n\n{text}"
        else:
            written.insert(0, {"role": "system", "content": text})
    return written, None


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


def _as_dict(message: ChatMessage, support: ToolSupport) -> dict[str, Any]:
    """A message as the template expects it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content, **_reasoning(message)}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, support)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


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
            calls = [format_.write(call.function.name, call.function.arguments) for call in message.tool_calls]
            content = f"{content}\n" if content else ""
            content += format_.separator.join(calls)
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
