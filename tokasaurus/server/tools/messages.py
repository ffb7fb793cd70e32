"""Tool calls in OpenAI's response formats, for whole and streamed answers."""

import uuid

from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.protocol.chat import (
    ArgumentsFragment,
    AssistantMessage,
    CallingMessage,
    ChatFinishReason,
    ContentDelta,
    EmptyDelta,
    ToolCallFragment,
    ToolCallsDelta,
    ToolCallStart,
)
from tokasaurus.server.protocol.tools import ToolCall, ToolCallFunction
from tokasaurus.server.tools.parser import CallFragment, CallReader, CallRules

CallDelta = ContentDelta | ToolCallsDelta | EmptyDelta


def build_message(
    text: str, finish_reason: FinishReason, rules: CallRules
) -> tuple[AssistantMessage | CallingMessage, ChatFinishReason]:
    """The message of one sequence, and its finish reason."""
    reader = CallReader(rules)
    output = [*reader.add(text), *reader.finish()]
    content = "".join(item for item in output if isinstance(item, str))
    if reader.num_calls == 0:
        return AssistantMessage(None if rules.is_forced else content), finish_reason
    names: list[str] = []
    arguments: list[list[str]] = []
    for item in output:
        if isinstance(item, CallFragment):
            if item.name is not None:
                names.append(item.name)
                arguments.append([])
            arguments[item.index].append(item.arguments)
    calls = [
        ToolCall(_new_id(), ToolCallFunction(name, "".join(parts)))
        for name, parts in zip(names, arguments, strict=True)
    ]
    return CallingMessage(content or None, calls), _finish_reason(finish_reason, rules)


class CallStream:
    """Turns the new text of one streamed sequence into deltas, which together make up the message of a whole answer."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._reader = CallReader(rules)
        self._has_content = False

    def add(self, text: str, is_last: bool) -> list[CallDelta]:
        """The deltas for more text; at least one if `is_last`."""
        output = self._reader.add(text)
        if is_last:
            output += self._reader.finish()
        deltas: list[CallDelta] = []
        for item in output:
            if isinstance(item, str):
                self._has_content = True
                deltas.append(ContentDelta(item))
            else:
                deltas += _call_deltas(item)
        if is_last and not deltas:
            # an answer without calls has content, even if it is empty, unless its calls were forced
            needs_content = self._reader.num_calls == 0 and not self._has_content and not self._rules.is_forced
            deltas.append(ContentDelta("") if needs_content else EmptyDelta())
        return deltas

    def finish_reason(self, finish_reason: FinishReason) -> ChatFinishReason:
        """The choice's finish reason, after the last text has been added."""
        return _finish_reason(finish_reason, self._rules) if self._reader.num_calls else finish_reason


def _call_deltas(fragment: CallFragment) -> list[CallDelta]:
    """Each delta contains one fragment: clients join fragments of one index across deltas, not within a delta."""
    deltas: list[CallDelta] = []
    if fragment.name is not None:
        start = ToolCallStart(fragment.index, _new_id(), ToolCallFunction(fragment.name, ""))
        deltas.append(ToolCallsDelta([start]))
    deltas.append(ToolCallsDelta([ToolCallFragment(fragment.index, ArgumentsFragment(fragment.arguments))]))
    return deltas


def _finish_reason(finish_reason: FinishReason, rules: CallRules) -> ChatFinishReason:
    """The finish reason of an answer with calls. As at OpenAI, it stays "stop" if the client named the function."""
    return "tool_calls" if finish_reason == "stop" and not rules.is_named else finish_reason


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
