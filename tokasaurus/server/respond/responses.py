"""Answers of /v1/responses, whole and as events: both are made of the same items."""

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.errors import ApiError
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.chat import ChatTokenLogprob
from tokasaurus.server.protocol.responses import (
    IncompleteDetails,
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseInputDetails,
    ResponseObject,
    ResponseOutputDetails,
    ResponseStatus,
    ResponseUsage,
)
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import Block, BlockEvents
from tokasaurus.server.respond.logprobs import TokenLogprob, build_chat_logprobs
from tokasaurus.server.respond.whole import Answer, token_names, write_list
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json

_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseEvents(BlockEvents):
    """The events of one response, with `sequence_number` from 0. Each block is an item."""

    def __init__(self, prepared: Prepared, model: ServedModel, _options: StreamOptions) -> None:
        super().__init__(prepared, model)
        self._created = int(time.time())
        self._names = token_names(prepared, model)
        self._items: list[OutputItem] = []  # that are complete
        self._logprobs: list[ChatTokenLogprob] = []  # of the text block that is open
        self._num_events = 0

    def response(self) -> dict[str, Any]:
        """The response so far, as on the wire."""
        if self.finish_reason is None:
            return self._response("in_progress")
        if self.finish_reason == "length":
            return self._response("incomplete")
        return self._response("cancelled" if self.finish_reason == "abort" else "completed")

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""
        self._event("error", code=error.code, message=error.message, param=error.param)
        code: Any = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.status == 429:
            code = "rate_limit_exceeded"
        self._event("response.failed", response=self._response("failed", ResponseFailure(code, error.message)))
        events, self._events = self._events, []
        return b"".join(events)

    def _response(self, status: ResponseStatus, error: ResponseFailure | None = None) -> dict[str, Any]:
        is_over = self.finish_reason is not None
        answer = ResponseObject(
            id=self._prepared.response_id,
            created_at=self._created,
            model=self._model.name,
            status=status,
            output=list(self._items),
            usage=_usage(self.usage) if is_over else None,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            completed_at=int(time.time()) if status == "completed" else None,
            **self._prepared.repeated,
        )
        shown = {field.name: getattr(answer, field.name) for field in fields(answer)}
        if self.weights is not None:
            shown |= {"weight_version": self.weights[-1].version, "weight_versions": self.weights}
        return shown

    def _event(self, kind: str, **content: object) -> None:
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), write_json(event)))

    def _write_start(self) -> None:
        self._event("response.created", response=self._response("in_progress"))
        self._event("response.in_progress", response=self._response("in_progress"))

    def _write_block_start(self, block: Block) -> None:
        item: OutputItem
        match block.kind:
            case "text":
                item = OutputMessage(_item_id(block), "in_progress", [])
            case "call":
                item = OutputFunctionCall(_item_id(block), "in_progress", block.call_id, block.name, "")
            case "reasoning":
                item = OutputReasoning(_item_id(block), "in_progress", [])
        self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = OutputText("", []) if block.kind == "text" else ReasoningText("")
            self._event("response.content_part.added", **_place(block), part=part)

    def _write_block_delta(self, block: Block, text: str, logprobs: list[TokenLogprob]) -> None:
        match block.kind:
            case "text":
                shown = _event_logprobs(self._add_logprobs(logprobs))
                self._event("response.output_text.delta", **_place(block), delta=text, logprobs=shown)
            case "call":
                self._event("response.function_call_arguments.delta", **_item_place(block), delta=text)
            case "reasoning":
                self._event("response.reasoning_text.delta", **_place(block), delta=text)

    def _write_block_end(self, block: Block) -> None:
        logprobs = self._logprobs
        item = self._end_item(block)
        match item:
            case OutputMessage():
                shown = _event_logprobs(logprobs)
                self._event("response.output_text.done", **_place(block), text=block.text, logprobs=shown)
                self._event("response.content_part.done", **_place(block), part=item.content[0])
            case OutputFunctionCall():
                place = _item_place(block)
                self._event("response.function_call_arguments.done", **place, arguments=item.arguments)
            case OutputReasoning():
                self._event("response.reasoning_text.done", **_place(block), text=block.text)
                self._event("response.content_part.done", **_place(block), part=item.content[0])
        self._event("response.output_item.done", output_index=block.index, item=item)

    def _write_end(self) -> None:
        kind = "response.completed" if self.finish_reason == "stop" else "response.incomplete"
        self._event(kind, response=self.response())

    def _add_logprobs(self, tokens: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        """The entries of the open text block's next tokens."""
        added = build_chat_logprobs(tokens, self._names).content
        self._logprobs += added
        return added

    def _end_item(self, block: Block) -> OutputItem:
        """Completes the block's item."""
        logprobs, self._logprobs = self._logprobs, []
        status: ItemStatus = "incomplete" if block.is_cut else "completed"
        item: OutputItem
        match block.kind:
            case "text":
                item = OutputMessage(_item_id(block), status, [OutputText(block.text, write_list(logprobs))])
            case "call":
                item = OutputFunctionCall(_item_id(block), status, block.call_id, block.name, block.text)
            case "reasoning":
                item = OutputReasoning(_item_id(block), status, [ReasoningText(block.text)])
        self._items.append(item)
        return item


class _WholeResponse(ResponseEvents):
    """Completes the items, and writes no events."""

    def _write_start(self) -> None: ...

    def _write_block_start(self, block: Block) -> None: ...

    def _write_block_delta(self, _block: Block, _text: str, logprobs: list[TokenLogprob]) -> None:
        self._add_logprobs(logprobs)

    def _write_block_end(self, block: Block) -> None:
        self._end_item(block)

    def _write_end(self) -> None: ...


def write_response(prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    """The whole answer to a body, which has one sequence."""
    whole = _WholeResponse(prepared, model, StreamOptions())
    ((sequence,),) = results
    whole.add(sequence)
    return Answer(write_json(whole.response()), whole.usage)


def _event_logprobs(entries: Sequence[ChatTokenLogprob]) -> Any:
    """Logprobs in the form of events: without the tokens' bytes."""
    shown = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs],
        }
        for entry in entries
    ]
    return write_list(shown)


def _item_id(block: Block) -> str:
    return f"{_ID_PREFIXES[block.kind]}_{block.key}"


def _item_place(block: Block) -> dict[str, Any]:
    return {"item_id": _item_id(block), "output_index": block.index}


def _place(block: Block) -> dict[str, Any]:
    """Fields that tell the place of the only part of the block's item."""
    return {**_item_place(block), "content_index": 0}


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        ResponseInputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        ResponseOutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )
