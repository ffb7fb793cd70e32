"""One path for whole and streamed answers: tokens of a sequence → its choice, and the token counts of all choices.

A choice has text, logprobs, a finish reason and, in a chat with tools, calls.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from tokasaurus.messages.commands import WeightVersions
from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.random_ids import random_id
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import CompletionTokensDetails, PromptTokensDetails, Usage, WeightSpan
from tokasaurus.server.protocol.chat import (
    ArgumentsFragment,
    AssistantMessage,
    CallingMessage,
    ChatFinishReason,
    ContentDelta,
    EmptyDelta,
    ReasoningCallingMessage,
    ReasoningDelta,
    ReasoningMessage,
    ToolCallFragment,
    ToolCallsDelta,
    ToolCallStart,
)
from tokasaurus.server.protocol.tools import ToolCall, ToolCallFunction
from tokasaurus.server.respond.logprobs import TokenLogprob, TokenOffsets, build_token_logprobs
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.parser import CallFragment, CallReader, CallRules
from tokasaurus.server.tools.reasoning import ReasoningReader, ReasoningRules
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.special_stops import SpecialStops, find_special_stops
from tokasaurus.text.stop_strings import StopScanner
from tokasaurus.text.token_decoder import PROMPT_TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a delta of the sequence adds to its choice."""

    text: str
    """New text that is safe to send, without reasoning that is split off."""
    finish_reason: FinishReason | None
    """Set on the last delta only."""
    token_ids: list[int]
    """The delta's tokens as sampled; their text may still be buffered."""
    logprobs: list[TokenLogprob] | None
    """Log-probabilities; None if they were not requested or are in the fingerprint.

    With return_token_ids, one per token of `token_ids`. Otherwise one for each token whose text begins in the text
    returned so far, each returned once, without the tokens from the start of a stop string on and, unless the prompt is
    echoed, without the end token."""
    reasoning: str = ""
    """New reasoning that is split off the text and safe to send."""
    has_reasoning: bool = False
    """Whether there is new reasoning, whether it is in `reasoning` or left out of the answer."""
    num_reasoning_tokens: int = 0
    """Tokens, of this delta or earlier ones, that have become known to be of reasoning or of its marks."""


class _ReasoningSplit:
    """Splits a choice's reasoning off its text, and counts its tokens."""

    def __init__(self, rules: ReasoningRules, offsets: TokenOffsets) -> None:
        """offsets: of the choice's tokens, from the first on."""
        self._rules = rules
        self._reader = ReasoningReader(rules.marks, rules.start)
        self._token_offsets = offsets
        self._uncounted: list[int] = []  # offsets of tokens that may be of reasoning

    def add(self, text: str, token_ids: list[int], is_last: bool) -> tuple[str, bool, str, int]:
        """(new reasoning to show, whether there is any, new content, tokens newly known to be of reasoning). text: all
        new text. token_ids: all new tokens but the end token."""
        if not self._reader.is_over or self._uncounted:
            self._uncounted += [self._token_offsets.next(token_id)[0] for token_id in token_ids]
        reasoning, content = self._reader.add(text)
        if is_last:
            rest, rest_of_content = self._reader.finish()
            reasoning, content = reasoning + rest, content + rest_of_content
        num_tokens = bisect_left(self._uncounted, self._reader.num_characters)  # offsets never decrease
        self._uncounted = [] if self._reader.is_over else self._uncounted[num_tokens:]
        if not self._rules.is_separate:
            return "", False, text, num_tokens
        return reasoning if self._rules.is_included else "", reasoning != "", content, num_tokens


class Choice:
    """Turns one sequence's deltas into the deltas of its choice.

    A streamed answer adds deltas as they arrive, a whole answer adds the finished sequence as its only delta. The
    results, joined, are the same. Text that may be part of a stop string is buffered, with its tokens.
    """

    def __init__(self, request: GenerateRequest, prepared: Prepared, model: ServedModel) -> None:
        """request: the one of `prepared.requests` that the sequence belongs to."""
        self._request = request
        self._end_ids = request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *model.eos_ids)
        self._wants_logprobs = request.want_logprobs and not prepared.logprobs_in_fingerprint
        # Trainers read token ids and logprobs as parallel lists, and need the end token's logprob too.
        self._is_parallel_to_ids = prepared.return_token_ids
        # Evaluations, which echo their prompts, expect an entry for each token, including the last.
        self._has_end_logprobs = len(prepared.echoes) > 0
        # The text begins where the prompt's ends: its first tokens are decoded after the prompt's last.
        tokenizer = model.tokenizer.with_special() if request.shows_special else model.tokenizer
        self._tokenizer = tokenizer
        self._tail = tokenizer.prompt_tail(request.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist())
        self._special_stops: SpecialStops | None = None
        if request.stop_strings:
            # Shown ones have their text, apart from the one that ends a sequence.
            marked = self._end_ids if request.shows_special else None
            self._special_stops = find_special_stops(tokenizer, request.stop_strings, marked)
        marking = None if request.shows_special else self._special_stops
        self._detokenizer = make_detokenizer(tokenizer, self._tail, marking)
        self._offsets = TokenOffsets(tokenizer, self._tail)
        self._keeps_stop = prepared.keeps_stop
        stops = request.stop_strings if self._special_stops is None else self._special_stops.stops
        self._stops = StopScanner(stops, prepared.keeps_stop)
        self._buffered_tokens: list[TokenLogprob] = []
        self._num_characters = 0
        self._reasoning: _ReasoningSplit | None = None
        if prepared.reasoning is not None:
            self._reasoning = _ReasoningSplit(prepared.reasoning, TokenOffsets(tokenizer, self._tail))
        self._first_ids: list[int] = []  # collected until there are `min_tokens`
        self._num_exempt = 0 if request.min_tokens == 0 else None
        self._decode_searched = tokenizer.decode if marking is None else marking.decode
        self._num_searched = 0
        """Characters of the text with marks that are no part of a stop string."""
        self._has_stopped = False
        self.num_tokens = 0
        """Sampled tokens of all deltas."""
        self.content_start: int | None = None
        """Where the text of the deltas begins in all text, in characters: behind the reasoning that is split off. None
        while there is none."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        if not self._has_stopped:
            return None
        found = self._stops.found
        return found if self._special_stops is None else self._special_stops.as_given(found)

    def add(self, delta: SequenceDelta | FinishedSequence) -> ChoiceDelta:
        """What the sequence's next delta adds to the choice. A FinishedSequence is the only delta of its choice."""
        is_last = delta.finish_reason is not None
        self.num_tokens += len(delta.token_ids)
        token_ids = self._without_end_token(delta.token_ids) if is_last else delta.token_ids
        decode = self._detokenizer.finish if is_last else self._detokenizer.add
        text = decode(token_ids)
        if self._request.stop_strings:
            text = self._cut_text(text + self._end_mark(delta.token_ids[len(token_ids) :]), token_ids, is_last)
        self._num_characters += len(text)
        reasoning, has_reasoning, num_reasoning_tokens = "", False, 0
        if self._reasoning is not None:
            reasoning, has_reasoning, text, num_reasoning_tokens = self._reasoning.add(text, token_ids, is_last)
        if text and self.content_start is None:
            self.content_start = self._num_characters - len(text)
        finish_reason: FinishReason | None = "stop" if is_last and self._has_stopped else delta.finish_reason
        logprobs = None
        if self._wants_logprobs:
            assert delta.logprobs is not None, "the engine returns logprobs if they are requested"
            if self._has_end_logprobs or self._is_parallel_to_ids:
                token_ids = delta.token_ids
            self._buffered_tokens += build_token_logprobs(token_ids, delta.logprobs, delta.top, self._offsets)
            logprobs = self._remove_sent_tokens(is_last)
        return ChoiceDelta(
            text,
            finish_reason,
            delta.token_ids,
            logprobs,
            reasoning=reasoning,
            has_reasoning=has_reasoning,
            num_reasoning_tokens=num_reasoning_tokens,
        )

    def _without_end_token(self, token_ids: list[int]) -> list[int]:
        """The last delta's tokens without the eos or stop token that ended the sequence, unless the text keeps it."""
        if self._keeps_stop:
            return token_ids
        return token_ids[:-1] if token_ids and token_ids[-1] in self._end_ids else token_ids

    def _end_mark(self, end_token: list[int]) -> str:
        """The mark of the token that ended the sequence, which the text lacks: a stop string may end with it."""
        special = self._special_stops
        return "" if special is None else "".join(special.marks.get(token_id, "") for token_id in end_token)

    def _cut_text(self, new_text: str, token_ids: list[int], is_last: bool) -> str:
        """The part of the buffered and new text that can be sent. A stop string, unless it is kept, and all text
        after it are dropped.

        new_text: with marks of special tokens. token_ids: the tokens that it comes from.
        """
        if self._has_stopped:
            return ""
        num_exempt = self._exempt_characters(token_ids) - self._num_searched
        text, self._has_stopped = self._stops.add(new_text, num_exempt, is_last)
        self._num_searched += len(text)
        return text if self._special_stops is None else self._special_stops.shown(text)

    def _exempt_characters(self, token_ids: list[int]) -> int:
        """Number of characters at the start of the text in which stop strings do not count.

        All of them, until there are `min_tokens` tokens. token_ids: the next tokens.
        """
        if self._num_exempt is None:
            min_tokens = self._request.min_tokens
            self._first_ids += token_ids[: min_tokens - len(self._first_ids)]
            if len(self._first_ids) == min_tokens:
                self._num_exempt = len(self._tail.text_after(self._decode_searched, self._first_ids))
        return sys.maxsize if self._num_exempt is None else self._num_exempt

    def _remove_sent_tokens(self, is_last: bool) -> list[TokenLogprob]:
        """Removes and returns the buffered tokens whose text has begun to be sent.

        All buffered tokens with return_token_ids, and after the last delta unless a stop string cut the text.
        """
        count = len(self._buffered_tokens)
        if not self._is_parallel_to_ids and (self._has_stopped or not is_last):  # offsets never decrease
            count = bisect_left(self._buffered_tokens, self._num_characters, key=attrgetter("offset"))
        sent, self._buffered_tokens = self._buffered_tokens[:count], self._buffered_tokens[count:]
        return sent


@dataclass(slots=True)
class _RequestCount:
    """One request of the body."""

    num_missing: int
    """Sequences that no delta has arrived of."""
    fewest_cached: int = sys.maxsize
    """Least number of cached tokens among the sequences that a delta has arrived of."""


class UsageCounter:
    """Counts one answer, whole or streamed."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._prompt_tokens = sum(len(request.prompt_ids) for request in prepared.requests)
        self._completion_tokens = self._cached = self._computed = self._shared = self._recomputed = 0
        self._reasoning_tokens = 0
        self._requests: dict[int, _RequestCount] = {}  # by request index, from the first delta on
        # (request index, sequence index) -> (computed, shared, recomputed) so far of an unfinished sequence
        self._counted: dict[tuple[int, int], tuple[int, int, int]] = {}

    def add(self, request_index: int, sequence_index: int, delta: SequenceDelta | FinishedSequence) -> None:
        key = (request_index, sequence_index)
        before = self._counted.pop(key, None)
        if before is None:
            self._add_cached(request_index, delta.num_cached_tokens)
            before = (0, 0, 0)
        now = (delta.num_computed_tokens, delta.num_shared_tokens, delta.num_recomputed_tokens)
        if delta.finish_reason is None:
            self._counted[key] = now
        self._completion_tokens += len(delta.token_ids)
        self._computed += now[0] - before[0]
        self._shared += now[1] - before[1]
        self._recomputed += now[2] - before[2]

    def add_reasoning(self, num_tokens: int) -> None:
        """num_tokens: of a `ChoiceDelta`."""
        self._reasoning_tokens += num_tokens

    def _add_cached(self, request_index: int, num_cached: int) -> None:
        """Count a sample's cached prompt tokens. The sample of a request with the fewest computed all that earlier
        requests had not cached. Other samples may have read some of that from the cache, which is not counted."""
        count = self._requests.get(request_index)
        if count is None:
            count = _RequestCount(self._prepared.requests[request_index].num_sequences)
            self._requests[request_index] = count
        count.num_missing -= 1
        count.fewest_cached = min(count.fewest_cached, num_cached)
        if count.num_missing == 0:
            self._cached += count.fewest_cached

    def usage(self) -> Usage:
        """The counts of all that was added."""
        details = PromptTokensDetails(self._cached, self._computed, self._shared, self._recomputed)
        total = self._prompt_tokens + self._completion_tokens
        completion_details = CompletionTokensDetails(self._reasoning_tokens)
        return Usage(self._prompt_tokens, self._completion_tokens, total, details, completion_details)


MessageDelta = ReasoningDelta | ContentDelta | ToolCallsDelta | EmptyDelta


def build_message(
    whole: ChoiceDelta, prepared: Prepared
) -> tuple[AssistantMessage | CallingMessage | ReasoningMessage | ReasoningCallingMessage, ChatFinishReason]:
    """The message of one choice, and its finish reason. whole: the only delta of the choice."""
    assert whole.finish_reason is not None, "its only delta is the last"
    content: str | None = whole.text
    calls: list[ToolCall] = []
    finish_reason: ChatFinishReason = whole.finish_reason
    if prepared.calls is not None:
        content, calls = _read_calls(whole.text, prepared.calls)
        if calls:
            finish_reason = _finish_reason(whole.finish_reason, prepared.calls)
    if prepared.reasoning is None:
        return (CallingMessage(content, calls) if calls else AssistantMessage(content)), finish_reason
    if whole.has_reasoning:
        content = content or None
    reasoning = whole.reasoning or None
    if calls:
        message = ReasoningCallingMessage(content, calls, reasoning_content=reasoning, reasoning=reasoning)
        return message, finish_reason
    return ReasoningMessage(content, reasoning_content=reasoning, reasoning=reasoning), finish_reason


def _read_calls(text: str, rules: CallRules) -> tuple[str | None, list[ToolCall]]:
    """The content and the calls of one answer. The content is null if it is empty and there are calls, or if it was cut
    before the first of the calls that it had to make."""
    reader = CallReader(rules)
    output = [*reader.add(text), *reader.finish()]
    content = "".join(item for item in output if isinstance(item, str))
    if reader.num_calls == 0:
        return None if rules.is_forced else content, []
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
    return content or None, calls


class MessageStream:
    """Turns the deltas of one streamed choice into deltas of its message, which together make up the message of a whole
    answer."""

    def __init__(self, prepared: Prepared) -> None:
        self._rules = prepared.calls
        self._reader = None if prepared.calls is None else CallReader(prepared.calls)
        self._has_reasoning = False
        self._has_content = False

    @staticmethod
    def starts_with_content(prepared: Prepared) -> bool:
        """Whether the first delta has the content "", which cannot be withdrawn. An answer with calls, or with nothing
        but reasoning, may have none."""
        return prepared.calls is None and prepared.reasoning is None

    def add(self, delta: ChoiceDelta) -> list[MessageDelta]:
        """The deltas for the choice's next delta; at least one if it is the last."""
        is_last = delta.finish_reason is not None
        deltas: list[MessageDelta] = []
        self._has_reasoning |= delta.has_reasoning
        if delta.reasoning:
            deltas.append(ReasoningDelta(delta.reasoning, delta.reasoning))
        for item in self._read(delta.text, is_last):
            if isinstance(item, str):
                self._has_content = True
                deltas.append(ContentDelta(item))
            else:
                deltas += _call_deltas(item)
        if is_last and not self._has_content and not self._may_lack_content():
            deltas.append(ContentDelta(""))
        return deltas or ([EmptyDelta()] if is_last else [])

    def _read(self, text: str, is_last: bool) -> list[str | CallFragment]:
        if self._reader is None:
            return [text] if text else []
        return [*self._reader.add(text), *(self._reader.finish() if is_last else [])]

    def _may_lack_content(self) -> bool:
        """Whether an answer without content has null as its content, and not an empty text."""
        if self._rules is not None and self._reader is not None and (self._reader.num_calls or self._rules.is_forced):
            return True
        return self._has_reasoning

    def finish_reason(self, finish_reason: FinishReason) -> ChatFinishReason:
        """The choice's finish reason, after the last delta has been added."""
        if self._rules is None or self._reader is None or self._reader.num_calls == 0:
            return finish_reason
        return _finish_reason(finish_reason, self._rules)


def _call_deltas(fragment: CallFragment) -> list[MessageDelta]:
    """Each delta contains one fragment: clients join fragments of one index across deltas, not within a delta."""
    deltas: list[MessageDelta] = []
    if fragment.name is not None:
        start = ToolCallStart(fragment.index, _new_id(), ToolCallFunction(fragment.name, ""))
        deltas.append(ToolCallsDelta([start]))
    deltas.append(ToolCallsDelta([ToolCallFragment(fragment.index, ArgumentsFragment(fragment.arguments))]))
    return deltas


def _finish_reason(finish_reason: FinishReason, rules: CallRules) -> ChatFinishReason:
    """The finish reason of an answer with calls. As at OpenAI, it stays "stop" if the client named the function."""
    return "tool_calls" if finish_reason == "stop" and not rules.is_named else finish_reason


def _new_id() -> str:
    return f"call_{random_id()[:24]}"


def weight_spans(versions: WeightVersions, num_tokens: int) -> list[WeightSpan]:
    """Spans of tokens by their weights, at least one; all have tokens, unless the completion has none.

    versions: as of SequenceDelta; the last of them may have no tokens, if the sequence was aborted just after it."""
    starts = [start for start, _ in versions]
    ends = [min(end, num_tokens) for end in (*starts[1:], num_tokens)]
    spans = [WeightSpan(version, start, end) for (start, version), end in zip(versions, ends, strict=True)]
    return [span for span in spans if span.start < span.end] or spans[-1:]


def newest_version(sequences: Sequence[FinishedSequence]) -> str:
    """Weight version of the last token of the sequence that finished last. At least one sequence is needed."""
    last = max(sequences, key=lambda sequence: sequence.end_number)
    return weight_spans(last.weight_versions, len(last.token_ids))[-1].version
