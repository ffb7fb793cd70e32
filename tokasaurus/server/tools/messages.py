"""Calls of tools in OpenAI's shapes: those of an answer, and of one that is streamed."""

import uuid

from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.protocol.chat import AssistantMessage, CallingMessage, ChatFinishReason
from tokasaurus.server.protocol.chunks import (
    ArgumentsFragment,
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
    reader = CallReader(rules)
    pieces = [*reader.add(text), *reader.finish()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    if reader.num_calls == 0:
        return AssistantMessage(content), finish_reason
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallFragment):
            if piece.name is not None:
                names.append(piece.name)
                arguments.append([])
            arguments[piece.index].append(piece.arguments)
    calls = [
        ToolCall(_new_id(), ToolCallFunction(name, "".join(parts)))
        for name, parts in zip(names, arguments, strict=True)
    ]
    return CallingMessage(content or None, calls), _finish_reason(finish_reason, rules)


class CallStream:
    """One sequence of a streamed answer: its new text → deltas, which put together are the message of the whole."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._reader = CallReader(rules)
        self._has_content = False

    def add(self, text: str, is_last: bool) -> list[CallDelta]:
        pieces = self._reader.add(text)
        if is_last:
            pieces += self._reader.finish()
        deltas: list[CallDelta] = []
        for piece in pieces:
            if isinstance(piece, str):
                self._has_content = True
                deltas.append(ContentDelta(piece))
            else:
                deltas += _call_deltas(piece)
        if is_last and not deltas:
            # an answer without calls has content, though it be empty
            has_nothing = self._reader.num_calls == 0 and not self._has_content
            deltas.append(ContentDelta("") if has_nothing else EmptyDelta())
        return deltas

    def finish_reason(self, finish_reason: FinishReason) -> ChatFinishReason:
        return _finish_reason(finish_reason, self._rules) if self._reader.num_calls else finish_reason


def _call_deltas(piece: CallFragment) -> list[CallDelta]:
    """One call to a delta: clients put together what has the same index in different deltas, not in one."""
    deltas: list[CallDelta] = []
    if piece.name is not None:
        start = ToolCallStart(piece.index, _new_id(), ToolCallFunction(piece.name, ""))
        deltas.append(ToolCallsDelta([start]))
    deltas.append(ToolCallsDelta([ToolCallFragment(piece.index, ArgumentsFragment(piece.arguments))]))
    return deltas


def _finish_reason(finish_reason: FinishReason, rules: CallRules) -> ChatFinishReason:
    """Of an answer with calls, as OpenAI's: where the client named the function, its call is no reason."""
    return "tool_calls" if finish_reason == "stop" and not rules.is_named else finish_reason


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
