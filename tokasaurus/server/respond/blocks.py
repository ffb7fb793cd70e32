"""Answers with one choice, as blocks in the order of the text: reasoning, texts and calls.

One path for whole and streamed answers: a whole answer consists of the blocks that its single delta adds up to, and a
stream tells how the same blocks begin, grow and end.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from tokasaurus.messages.generation import FinishReason, SequenceDelta
from tokasaurus.random_ids import random_id
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import Usage, WeightSpan
from tokasaurus.server.protocol.chat import ContentDelta, ReasoningDelta, ToolCallsDelta, ToolCallStart
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.choice import Choice, MessageStream, UsageCounter, weight_spans
from tokasaurus.server.respond.logprobs import TokenLogprob
from tokasaurus.server.respond.stream import AnswerEvents
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of the answer that is of one kind."""

    kind: BlockKind
    index: int
    """Number of the block in the answer."""
    call_id: str = ""
    """Id of a tool call; empty for other blocks."""
    name: str = ""
    """Function of a tool call; empty for other blocks."""
    texts: list[str] = field(default_factory=list)
    """The block's text, delta by delta; for a tool call, its arguments."""
    is_cut: bool = False
    """Whether the answer ended within the block because of its length."""
    key: str = field(default_factory=random_id)
    """Random, for ids."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockEvents(AnswerEvents):
    """The events of an answer's blocks. Subclasses write them."""

    def __init__(self, prepared: Prepared, model: ServedModel, _options: StreamOptions) -> None:
        (request,) = prepared.requests
        self._prepared = prepared
        self._model = model
        self.blocks: list[Block] = []
        """All blocks so far."""
        self.finish_reason: FinishReason | None = None
        self.weights: list[WeightSpan] | None = None
        """The weights that all tokens are from; with the flag rl, after the last delta."""
        self._choice = Choice(request, prepared, model)
        self._deltas = MessageStream(prepared)
        self._counter = UsageCounter(prepared)
        self._unplaced: list[TokenLogprob] = []  # tokens whose text has not been added to a block
        self._num_characters = 0  # of text blocks
        self.has_calls = False
        """Whether a call has begun."""
        self._is_open = False
        self._has_begun = False
        self._events: list[bytes] = []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer so far, as on the wire."""

    def _with_weights(self, answer: Any) -> dict[str, Any]:
        """The answer as on the wire, with the weights that its tokens are from once they are known."""
        shown = {field.name: getattr(answer, field.name) for field in fields(answer)}
        if self.weights is not None:
            shown |= {"weight_version": self.weights[-1].version, "weight_versions": self.weights}
        return shown

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._choice.stop_string

    @property
    def usage(self) -> Usage:
        """Usage of the answer so far."""
        return self._counter.usage()

    def events(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        for _, delta in deltas:
            self.add(delta)
        events, self._events = self._events, []
        return b"".join(events)

    def end(self) -> bytes:
        return b""

    def add(self, delta: SequenceDelta | FinishedSequence) -> None:
        """Adds the next tokens. A FinishedSequence is the only delta of its answer."""
        self._counter.add(0, 0, delta)
        added = self._choice.add(delta)
        self._counter.add_reasoning(added.num_reasoning_tokens)
        is_last = added.finish_reason is not None
        if added.logprobs is not None and not self.has_calls:
            self._unplaced += added.logprobs
        for content in self._deltas.add(added):
            if isinstance(content, ReasoningDelta):
                self._enter("reasoning")
                self._extend(content.reasoning)
            elif isinstance(content, ContentDelta):
                if content.content or (is_last and not self.blocks):
                    self._enter("text")
                    self._extend(content.content)
            elif isinstance(content, ToolCallsDelta):
                for fragment in content.tool_calls:
                    if isinstance(fragment, ToolCallStart):
                        self._enter("call", fragment.id, fragment.function.name)
                    elif fragment.function.arguments:
                        self._extend(fragment.function.arguments)
        if added.finish_reason is not None:
            self._finish(added.finish_reason, delta)

    def _enter(self, kind: BlockKind, call_id: str = "", name: str = "") -> None:
        """Begins a block, unless a text goes on."""
        if self._is_open and kind != "call" and self.blocks[-1].kind == kind:
            return
        self._leave()
        if kind == "call":
            self.has_calls = True
            self._unplaced = []
        self._begin()
        self.blocks.append(Block(kind, len(self.blocks), call_id, name))
        self._is_open = True
        self._write_block_start(self.blocks[-1])

    def _extend(self, text: str) -> None:
        block = self.blocks[-1]
        block.texts.append(text)
        logprobs: list[TokenLogprob] = []
        if block.kind == "text":
            self._num_characters += len(text)
            start = self._choice.content_start or 0
            first, end = (
                bisect_left(self._unplaced, offset, key=attrgetter("offset"))
                for offset in (start, start + self._num_characters)
            )
            logprobs, self._unplaced = self._unplaced[first:end], self._unplaced[end:]
        self._write_delta(block, text, logprobs)

    def _write_delta(self, block: Block, text: str, logprobs: list[TokenLogprob]) -> None:
        if text or logprobs:
            self._write_block_delta(block, text, logprobs)

    def _leave(self) -> None:
        """Ends the block that is open."""
        if self._is_open:
            self._is_open = False
            self._write_block_end(self.blocks[-1])

    def _finish(self, finish_reason: FinishReason, delta: SequenceDelta | FinishedSequence) -> None:
        is_of_text = self._choice.content_start is not None or self._prepared.reasoning is None
        if self._is_open and self.blocks[-1].kind == "text" and not self.has_calls and is_of_text:
            # Tokens without text, such as special ones, at the end.
            rest, self._unplaced = self._unplaced, []
            self._write_delta(self.blocks[-1], "", rest)
        if self.blocks:
            self.blocks[-1].is_cut = finish_reason == "length"
        self._leave()
        self._begin()
        self.finish_reason = finish_reason
        if self._model.rl:
            self.weights = weight_spans(delta.weight_versions, self._choice.num_tokens)
        self._write_end()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write_start()

    @abstractmethod
    def _write_start(self) -> None:
        """Write what comes before the first block."""

    @abstractmethod
    def _write_block_start(self, block: Block) -> None:
        """The block is empty."""

    @abstractmethod
    def _write_block_delta(self, block: Block, text: str, logprobs: list[TokenLogprob]) -> None:
        """The block has grown by this text.

        logprobs: tokens whose text begins in a text block, if requested. Of an answer with calls, only in the text
        before the first: behind it, the text of calls and of marks is not told from other text."""

    @abstractmethod
    def _write_block_end(self, block: Block) -> None:
        """The block is complete."""

    @abstractmethod
    def _write_end(self) -> None:
        """All blocks are complete, and `finish_reason` is set."""


def write_whole(
    make: Callable[[Prepared, ServedModel, StreamOptions], BlockEvents],
    prepared: Prepared,
    results: Sequence[Sequence[FinishedSequence]],
    model: ServedModel,
) -> Answer:
    """The whole answer to a body, which has one sequence."""
    events = make(prepared, model, StreamOptions())
    ((sequence,),) = results
    events.add(sequence)
    return Answer(write_json(events.whole()), events.usage)


def event(kind: str, **content: object) -> bytes:
    """A server-sent event with its kind in both places."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), write_json({"type": kind, **content}))
