"""Deltas of sequences → the events of a streamed answer. Detokenizes; knows no server.

The chunks of a choice, joined, are equal to the choice of the whole answer.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.server.errors import ApiError, error_response
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import Usage, WeightSpan
from tokasaurus.server.protocol.chat import (
    ChatChunkChoice,
    ChatChunkChoiceWithIds,
    ChatFinishReason,
    ContentDelta,
    EmptyDelta,
    RoleDelta,
)
from tokasaurus.server.protocol.completions import (
    CompletionChunkChoice,
    CompletionChunkChoiceWithIds,
    CompletionLogprobs,
)
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.choice import (
    Choice,
    ChoiceDelta,
    MessageDelta,
    MessageStream,
    UsageCounter,
    weight_spans,
)
from tokasaurus.server.respond.logprobs import build_chat_logprobs, build_completion_logprobs
from tokasaurus.server.respond.whole import build_echo, token_names, write_experts
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json

ChunkChoice = CompletionChunkChoice | ChatChunkChoice


class AnswerEvents(ABC):
    """Turns the deltas of one body's sequences into the server-sent events of its answer."""

    @property
    def num_unsent_first(self) -> int:
        """Events that must be sent before the first `events`, which otherwise returns them with its own."""
        return 0

    def first_events(self, _count: int) -> bytes:
        """The next `count` events that come before any text."""
        return b""

    def shows_prompts(self, _deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        """Whether the events for these deltas contain prompts: their text or their ids."""
        return False

    @abstractmethod
    def events(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        """The events for new deltas; empty if nothing can be sent yet. deltas: (request index, delta)."""

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""
        return error_event(error)


class AnswerStream(AnswerEvents):
    """The events of OpenAI's completions: chunks, each with deltas of choices.

    With `include_usage` every chunk has a `usage` field: null, except in an additional last chunk without choices. With
    `continuous_usage_stats` each chunk has the usage of the answer so far.
    """

    object_name: str
    """The `object` field of every chunk."""

    def __init__(self, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        self._prepared = prepared
        self._model = model
        self._options = options
        self._names = token_names(prepared, model)
        self._head: dict[str, Any] = {
            "id": prepared.response_id,
            "object": self.object_name,
            "created": int(time.time()),
            "model": prepared.adapter_name or model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        # By request index and sequence index, from the first delta to the last: one body may have 65,536 sequences.
        self._choices: dict[tuple[int, int], Choice] = {}
        self._usage = UsageCounter(prepared)
        self._num_sent_first = 0

    def events(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        """The events for new deltas; empty if nothing can be sent yet. deltas: (request index, delta)."""
        added = [
            (self._choice_index(request_index, delta), *self._add(request_index, delta))
            for request_index, delta in self._ready(deltas)
        ]
        usage = self._usage.usage() if self._options.continuous_usage_stats else None
        events: list[bytes] = []
        shows_ids = self._prepared.return_token_ids
        for index, delta, last_fields in added:
            has_text = delta.text != "" or delta.has_reasoning
            if has_text or delta.logprobs or delta.finish_reason is not None or (shows_ids and delta.token_ids):
                choices = self._chunk_choices(index, delta)
                events += [self._event([choice], usage) for choice in (choices[:-1] if last_fields else choices)]
                if last_fields:
                    events.append(self._last_event(choices[-1], last_fields, usage))
        if not events:
            return b""
        return self.first_events(self.num_unsent_first) + b"".join(events)

    @property
    def num_unsent_first(self) -> int:
        """Chunks that must be sent before the first `events`, which otherwise returns them with its own."""
        return self._num_first_choices() - self._num_sent_first

    def first_events(self, count: int) -> bytes:
        """The next `count` chunks that come before any text. The OpenAI client needs them in the order of choices."""
        if count == 0:
            return b""
        usage = self._usage.usage() if self._options.continuous_usage_stats else None
        extra = self._first_fields()
        first, self._num_sent_first = self._num_sent_first, self._num_sent_first + count
        indices = range(first, self._num_sent_first)
        return b"".join([self._event([choice], usage, extra) for choice in self._first_choices(indices)])

    @abstractmethod
    def shows_prompts(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        """Whether the events for these deltas contain prompts: their text or their ids."""

    def end(self) -> bytes:
        """The events after the last delta."""
        events = [self._event([], self._usage.usage())] if self._options.include_usage else []
        return b"".join([*events, b"data: [DONE]\n\n"])

    def _ready(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> Sequence[tuple[int, SequenceDelta]]:
        """The deltas to process now: these, except any that must wait, and earlier ones whose wait is over."""
        return deltas

    def _add(self, request_index: int, delta: SequenceDelta) -> tuple[ChoiceDelta, dict[str, Any]]:
        """What the delta adds to its choice; if it is the last, also what the choice has further: with the flag rl, the
        weights of all tokens, and experts if they are asked for."""
        self._usage.add(request_index, delta.sequence_index, delta)
        key = (request_index, delta.sequence_index)
        choice = self._choices.pop(key, None)
        if choice is None:
            choice = Choice(self._prepared.requests[request_index], self._prepared, self._model)
        if delta.finish_reason is None:
            self._choices[key] = choice
        added, last_fields = choice.add(delta), dict[str, Any]()
        self._usage.add_reasoning(added.num_reasoning_tokens)
        if delta.finish_reason is not None and self._model.rl:
            last_fields["weight_versions"] = weight_spans(delta.weight_versions, choice.num_tokens)
        if delta.finish_reason is not None and self._prepared.experts_from is not None:
            last_fields["routed_experts"] = write_experts(delta.experts, self._prepared.experts_from)
        return added, last_fields

    def _choice_index(self, request_index: int, delta: SequenceDelta) -> int:
        # All requests of a body have the same n.
        return request_index * self._prepared.requests[0].num_sequences + delta.sequence_index

    def _event(
        self, choices: list[object], usage: Usage | None, extra: Mapping[str, object] = MappingProxyType({})
    ) -> bytes:
        chunk = {**self._head, "choices": choices, **extra}
        if self._options.include_usage or self._options.continuous_usage_stats:
            chunk["usage"] = usage
        return b"data: %b\n\n" % write_json(chunk)

    def _last_event(self, choice: ChunkChoice, last_fields: dict[str, Any], usage: Usage | None) -> bytes:
        """The last chunk of a choice, with further fields."""
        shown = {field.name: getattr(choice, field.name) for field in fields(choice)} | last_fields
        spans: list[WeightSpan] = last_fields.get("weight_versions", [])
        return self._event([shown], usage, {"weight_version": spans[-1].version} if spans else {})

    def _num_first_choices(self) -> int:
        """Number of choices that are sent before any text, each in a chunk of its own."""
        return 0

    def _first_choices(self, _indices: range) -> Sequence[object]:
        """The choices with these indices as they are sent before any text."""
        return []

    def _first_fields(self) -> Mapping[str, object]:
        """Extra fields of the chunks with `_first_choices`."""
        return {}

    @abstractmethod
    def _chunk_choices(self, index: int, delta: ChoiceDelta) -> Sequence[ChunkChoice]:
        """The delta of one choice as choices of chunks, each sent in a chunk of its own."""


class CompletionStream(AnswerStream):
    object_name = "text_completion"

    def __init__(self, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        super().__init__(prepared, model, options)
        self._num_samples = prepared.requests[0].num_sequences  # all requests of a body have the same n
        self._begun: set[int] = set()  # choices that have been sent at least one chunk
        self._echoes: dict[int, tuple[str, CompletionLogprobs | None]] = {}  # by request index
        self._waiting: dict[int, list[SequenceDelta]] = {}  # by request index, until its echo is known

    def shows_prompts(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        if not self._prepared.echoes and not self._prepared.return_token_ids:
            return False
        return any(self._choice_index(request_index, delta) not in self._begun for request_index, delta in deltas)

    def _ready(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> Sequence[tuple[int, SequenceDelta]]:
        """Deltas wait for their request's echo: its logprobs arrive with sequence 0, which others may precede."""
        if not self._prepared.echoes:
            return deltas
        ready = []
        for request_index, delta in deltas:
            if request_index not in self._echoes:
                if self._prepared.requests[request_index].want_prompt_logprobs and delta.prompt_logprobs is None:
                    self._waiting.setdefault(request_index, []).append(delta)
                    continue
                self._echoes[request_index] = build_echo(
                    request_index, self._prepared, delta.prompt_logprobs, self._model
                )
                ready += [(request_index, earlier) for earlier in self._waiting.pop(request_index, [])]
            ready.append((request_index, delta))
        return ready

    def _chunk_choices(self, index: int, delta: ChoiceDelta) -> list[CompletionChunkChoice]:
        request_index = index // self._num_samples
        echo, echo_logprobs = self._echoes.get(request_index, ("", None))
        chunks = []
        if self._prepared.echoes and index not in self._begun:
            chunks.append(self._chunk(index, ChoiceDelta(echo, None, [], None), echo_logprobs))
        logprobs = None
        if delta.logprobs is not None:
            logprobs = build_completion_logprobs(delta.logprobs, self._names, len(echo))
        return [*chunks, self._chunk(index, delta, logprobs)]

    def _chunk(self, index: int, delta: ChoiceDelta, logprobs: CompletionLogprobs | None) -> CompletionChunkChoice:
        is_first = index not in self._begun
        self._begun.add(index)
        if not self._prepared.return_token_ids:
            return CompletionChunkChoice(index, delta.text, logprobs, delta.finish_reason)
        request = self._prepared.requests[index // self._num_samples]
        prompt_ids = request.prompt_ids.tolist() if is_first else None
        return CompletionChunkChoiceWithIds(
            index, delta.text, logprobs, delta.finish_reason, delta.token_ids, prompt_ids
        )


class ChatStream(AnswerStream):
    object_name = "chat.completion.chunk"

    def __init__(self, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        super().__init__(prepared, model, options)
        self._messages: dict[int, MessageStream] = {}  # by choice, as `_choices`
        self._is_plain = MessageStream.starts_with_content(prepared)
        self._role = RoleDelta(content=prepared.content_start or ("" if self._is_plain else None))

    def shows_prompts(self, _deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        return self._prepared.return_token_ids and self.num_unsent_first > 0

    def _num_first_choices(self) -> int:
        # One for every choice, in order: the OpenAI client accepts a choice only after all choices of smaller index.
        return self._prepared.requests[0].num_sequences

    def _first_choices(self, indices: range) -> list[ChatChunkChoice]:
        return [ChatChunkChoice(index, self._role, None, None) for index in indices]

    def _first_fields(self) -> Mapping[str, object]:
        if not self._prepared.return_token_ids:
            return {}
        return {"prompt_token_ids": self._prepared.requests[0].prompt_ids.tolist()}

    def _chunk_choices(self, index: int, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        logprobs = None if delta.logprobs is None else build_chat_logprobs(delta.logprobs, self._names)
        contents: list[MessageDelta] = [ContentDelta(delta.text)]
        finish_reason: ChatFinishReason | None = delta.finish_reason
        if not self._is_plain:
            message = self._messages.pop(index, None) or MessageStream(self._prepared)
            if delta.finish_reason is None:
                self._messages[index] = message
            contents = message.add(delta)
            if delta.finish_reason is not None:
                finish_reason = message.finish_reason(delta.finish_reason)
            elif not contents and (delta.logprobs or self._prepared.return_token_ids):
                contents = [EmptyDelta()]
        choices: list[ChatChunkChoice] = []
        for number, content in enumerate(contents):
            # logprobs and token ids go into the first chunk, the finish reason into the last
            chunk_logprobs = logprobs if number == 0 else None
            reason = finish_reason if number == len(contents) - 1 else None
            if self._prepared.return_token_ids:
                token_ids = delta.token_ids if number == 0 else []
                choices.append(ChatChunkChoiceWithIds(index, content, chunk_logprobs, reason, token_ids))
            else:
                choices.append(ChatChunkChoice(index, content, chunk_logprobs, reason))
        return choices


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails; no [DONE] follows."""
    return b"data: %b\n\n" % bytes(error_response(error).body)
