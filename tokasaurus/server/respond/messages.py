"""Answers of /v1/messages, whole and as events: both are made of the same blocks."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import orjson
from pydantic_core import from_json

from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.errors import ApiError
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.messages import (
    ContentBlock,
    MessageObject,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingDetails,
    ToolUseBlock,
    error_type,
)
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import Block, BlockEvents
from tokasaurus.server.respond.logprobs import TokenLogprob
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json

_NO_INPUT = orjson.Fragment(b"{}")


class MessageEvents(BlockEvents):
    """The events of one message."""

    def __init__(self, prepared: Prepared, model: ServedModel, _options: StreamOptions) -> None:
        super().__init__(prepared, model)

    def message(self) -> dict[str, Any]:
        """The whole message, as on the wire."""
        return self._message([_content(block) for block in self.blocks])

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return _event("error", error={"type": error_type(error.status), "message": error.message})

    def _message(self, content: list[ContentBlock]) -> dict[str, Any]:
        answer = MessageObject(
            id=self._prepared.response_id,
            model=self._model.name,
            content=content,
            stop_reason=self._stop_reason(),
            stop_sequence=None if self.finish_reason is None else self.stop_string,
            usage=_usage(self.usage),
        )
        shown = {field.name: getattr(answer, field.name) for field in fields(answer)}
        if self.weights is not None:
            shown |= {"weight_version": self.weights[-1].version, "weight_versions": self.weights}
        return shown

    def _stop_reason(self) -> StopReason | None:
        match self.finish_reason:
            case None:
                return None
            case "length":
                (request,) = self._prepared.requests
                has_room = request.max_new_tokens == self._prepared.repeated["max_tokens"]
                return "max_tokens" if has_room else "model_context_window_exceeded"
            case "abort":
                return "pause_turn"
        if self.has_calls:
            return "tool_use"
        return "end_turn" if self.stop_string is None else "stop_sequence"

    def _write_start(self) -> None:
        self._events.append(_event("message_start", message=self._message([])))

    def _write_block_start(self, block: Block) -> None:
        shown = ToolUseBlock(block.call_id, block.name, _NO_INPUT) if block.kind == "call" else _content(block)
        self._events.append(_event("content_block_start", index=block.index, content_block=shown))

    def _write_block_delta(self, block: Block, text: str, _logprobs: list[TokenLogprob]) -> None:
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
        self._events.append(_event("content_block_delta", index=block.index, delta=delta))

    def _write_block_end(self, block: Block) -> None:
        self._events.append(_event("content_block_stop", index=block.index))

    def _write_end(self) -> None:
        end = self._message([])
        delta = {name: end[name] for name in ("stop_reason", "stop_sequence")}
        self._events.append(_event("message_delta", delta=delta, usage=end["usage"]))
        self._events.append(_event("message_stop"))


def write_message(prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    """The whole answer to a body, which has one sequence."""
    events = MessageEvents(prepared, model, StreamOptions())
    ((sequence,),) = results
    events.add(sequence)
    return Answer(write_json(events.message()), events.usage)


def _event(kind: str, **content: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), write_json({"type": kind, **content}))


def _content(block: Block) -> ContentBlock:
    match block.kind:
        case "text":
            return TextBlock(block.text)
        case "reasoning":
            return ThinkingBlock(block.text)
        case "call":
            return ToolUseBlock(block.call_id, block.name, _write_input(block.text))


def _write_input(arguments: str) -> orjson.Fragment:
    """The JSON text of a call's arguments as the JSON of an object: of text that was cut, what is complete."""
    try:
        value: object = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        try:
            value = from_json(arguments, allow_partial=True)  # as Anthropic's client reads the deltas
        except ValueError:
            value = None
    if not isinstance(value, dict):
        return _NO_INPUT
    try:  # not orjson: it does not write integers above 64 bits
        return orjson.Fragment(json.dumps(value, allow_nan=False).encode())
    except (ValueError, RecursionError):
        return _NO_INPUT


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        usage.prompt_tokens - cached,
        cached,
        usage.completion_tokens,
        ThinkingDetails(usage.completion_tokens_details.reasoning_tokens),
    )
