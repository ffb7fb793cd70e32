"""Deltas of one sequence → what is new of its choice. No server here; it detokenizes."""

import sys
from collections import deque
from dataclasses import dataclass

from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.respond.logprobs import ScoredToken, TokenOffsets, score_tokens
from tokasaurus.server.respond.whole import num_exempt_characters, without_end_token
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.stop_strings import find_first_stop, held_back_length


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice.

    token_ids: as sampled, though their text may be held back. scored: tokens whose text begins to be shown; None where
    log-probabilities were not asked.
    """

    text: str
    finish_reason: FinishReason | None
    token_ids: list[int]
    scored: list[ScoredToken] | None


class StreamedSequence:
    """One sequence, of which deltas come: text and tokens that may still turn out to be a stop string are held back."""

    def __init__(self, request: GenerateRequest, model: ServedModel, scores_end: bool) -> None:
        """scores_end: whether the token that ends the text is one of the scored."""
        self.so_far = FinishedSequence()
        self._request = request
        self._model = model
        self._scores_end = scores_end
        self._detokenizer = make_detokenizer(model.tokenizer)
        self._offsets = TokenOffsets(model.tokenizer)
        self._held_text = ""
        self._held_tokens: deque[ScoredToken] = deque()
        self._num_characters = 0
        self._num_exempt = 0 if request.min_tokens == 0 else None
        self._has_stopped = False

    def add(self, delta: SequenceDelta) -> Piece:
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
        assert delta.logprobs is not None, "the engine returns log-probabilities where they are asked"
        if self._scores_end:
            token_ids = delta.token_ids
        self._held_tokens += score_tokens(token_ids, delta.logprobs, delta.top, self._offsets)
        return Piece(text, finish_reason, delta.token_ids, self._take_tokens(finish_reason))

    def _take_text(self, new_text: str, is_last: bool) -> str:
        """What of the text held back and the new text can be shown. Whatever follows a stop string never is."""
        if self._has_stopped:
            return ""
        stops, text = self._request.stop_strings, self._held_text + new_text
        stop = find_first_stop(text, stops, self._exempt_characters() - self._num_characters) if stops else None
        if stop is not None:
            self._has_stopped = True
            return text[: stop[0]]
        num_shown = len(text) - (held_back_length(text, stops) if stops and not is_last else 0)
        self._held_text = text[num_shown:]
        return text[:num_shown]

    def _exempt_characters(self) -> int:
        """At the start of the whole text, in which no stop string counts: all, until the fewest tokens are there."""
        token_ids = self.so_far.token_ids
        if self._num_exempt is None and len(token_ids) >= self._request.min_tokens:
            self._num_exempt = num_exempt_characters(token_ids, self._request, self._model)
        return sys.maxsize if self._num_exempt is None else self._num_exempt

    def _take_tokens(self, finish_reason: FinishReason | None) -> list[ScoredToken]:
        """The tokens whose text has begun to be shown; at the end, unless a stop string cut it, all."""
        shows_all = finish_reason is not None and not self._has_stopped
        taken = []
        while self._held_tokens and (shows_all or self._held_tokens[0].offset < self._num_characters):
            taken.append(self._held_tokens.popleft())
        return taken
