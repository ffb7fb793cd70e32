"""Deltas of one sequence → new text and tokens of its choice. Detokenizes; knows no server."""

import sys
from collections import deque
from dataclasses import dataclass

from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.respond.logprobs import TokenLogprob, TokenOffsets, build_token_logprobs
from tokasaurus.server.respond.whole import num_exempt_characters, without_end_token
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.stop_strings import find_first_stop, held_back_length


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one choice that a delta adds."""

    text: str
    """New text that is safe to send."""
    finish_reason: FinishReason | None
    """Set on the last piece only."""
    token_ids: list[int]
    """The delta's tokens as sampled; their text may still be buffered."""
    logprobs: list[TokenLogprob] | None
    """Tokens whose text begins in the text sent so far, each returned once; None if logprobs were not requested."""


class StreamedSequence:
    """Turns one sequence's deltas into pieces. Text that may be part of a stop string is buffered, with its tokens."""

    def __init__(self, request: GenerateRequest, model: ServedModel, has_end_logprobs: bool) -> None:
        """has_end_logprobs: whether logprobs are returned for the eos or stop token that ends the text."""
        self.so_far = FinishedSequence()
        self._request = request
        self._model = model
        self._has_end_logprobs = has_end_logprobs
        self._detokenizer = make_detokenizer(model.tokenizer)
        self._offsets = TokenOffsets(model.tokenizer)
        self._buffered_text = ""
        self._buffered_tokens: deque[TokenLogprob] = deque()
        self._num_characters = 0
        self._num_exempt = 0 if request.min_tokens == 0 else None
        self._has_stopped = False

    def add(self, delta: SequenceDelta) -> Piece:
        """What the sequence's next delta adds to the choice."""
        self.so_far.append(delta)
        is_last = delta.finish_reason is not None
        token_ids = without_end_token(delta.token_ids, self._request, self._model) if is_last else delta.token_ids
        text = self._detokenizer.add(token_ids)
        if is_last:
            text += self._detokenizer.finish()
        text = self._take_text(text, is_last)
        self._num_characters += len(text)
        finish_reason: FinishReason | None = "stop" if is_last and self._has_stopped else delta.finish_reason
        if not self._request.want_logprobs:
            return Piece(text, finish_reason, delta.token_ids, None)
        assert delta.logprobs is not None, "the engine returns logprobs if they are requested"
        if self._has_end_logprobs:
            token_ids = delta.token_ids
        self._buffered_tokens += build_token_logprobs(token_ids, delta.logprobs, delta.top, self._offsets)
        return Piece(text, finish_reason, delta.token_ids, self._take_tokens(finish_reason))

    def _take_text(self, new_text: str, is_last: bool) -> str:
        """The part of the buffered and new text that can be sent. A stop string and all text after it are dropped."""
        if self._has_stopped:
            return ""
        stops, text = self._request.stop_strings, self._buffered_text + new_text
        stop = find_first_stop(text, stops, self._exempt_characters() - self._num_characters) if stops else None
        if stop is not None:
            self._has_stopped = True
            return text[: stop[0]]
        num_sent = len(text) - (held_back_length(text, stops) if stops and not is_last else 0)
        self._buffered_text = text[num_sent:]
        return text[:num_sent]

    def _exempt_characters(self) -> int:
        """Number of characters at the start of the text in which stop strings do not count.

        All of them, until there are `min_tokens` tokens.
        """
        token_ids = self.so_far.token_ids
        if self._num_exempt is None and len(token_ids) >= self._request.min_tokens:
            self._num_exempt = num_exempt_characters(token_ids, self._request, self._model)
        return sys.maxsize if self._num_exempt is None else self._num_exempt

    def _take_tokens(self, finish_reason: FinishReason | None) -> list[TokenLogprob]:
        """Removes and returns the buffered tokens whose text has begun to be sent.

        At the end, all buffered tokens, unless a stop string cut the text.
        """
        takes_all = finish_reason is not None and not self._has_stopped
        taken = []
        while self._buffered_tokens and (takes_all or self._buffered_tokens[0].offset < self._num_characters):
            taken.append(self._buffered_tokens.popleft())
        return taken
