"""The tokens of one sequence → text, logprobs and finish reason of its choice, for whole and streamed answers."""

import sys
from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.respond.logprobs import TokenLogprob, TokenOffsets, build_token_logprobs
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.prompt_tail import PROMPT_TAIL_TOKENS
from tokasaurus.text.stop_strings import StopScanner


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a delta of the sequence adds to its choice."""

    text: str
    """New text that is safe to send."""
    finish_reason: FinishReason | None
    """Set on the last delta only."""
    token_ids: list[int]
    """The delta's tokens as sampled; their text may still be buffered."""
    logprobs: list[TokenLogprob] | None
    """With return_token_ids, one per token of `token_ids`. Otherwise tokens whose text begins in the text returned so
    far, each returned once, without all tokens from the start of a stop string on and, unless the prompt is echoed, the
    end token. None if logprobs were not requested or are in the fingerprint."""


class Choice:
    """Turns one sequence's deltas into the deltas of its choice.

    A streamed answer adds deltas as they arrive, a whole answer adds the finished sequence as its only delta. The
    results, joined, are the same. Text that may be part of a stop string is buffered, with its tokens.
    """

    def __init__(self, request: GenerateRequest, prepared: Prepared, model: ServedModel) -> None:
        """request: the one of `prepared.requests` that the sequence belongs to."""
        self._request = request
        self._model = model
        self._wants_logprobs = request.want_logprobs and not prepared.logprobs_in_fingerprint
        # Trainers read token ids and logprobs as parallel lists, and need the end token's logprob too.
        self._is_parallel_to_ids = prepared.return_token_ids
        # Evaluations, which echo their prompts, expect an entry for each token, including the last.
        self._has_end_logprobs = len(prepared.echoes) > 0
        # The text begins where the prompt's ends: its first tokens are decoded after the prompt's last.
        self._tail = model.tokenizer.prompt_tail(request.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist())
        self._detokenizer = make_detokenizer(model.tokenizer, self._tail)
        self._offsets = TokenOffsets(model.tokenizer, self._tail)
        self._stops = StopScanner(request.stop_strings)
        self._buffered_tokens: list[TokenLogprob] = []
        self._num_characters = 0
        self._first_ids: list[int] = []  # collected until there are `min_tokens`
        self._num_exempt = 0 if request.min_tokens == 0 else None
        self._has_stopped = False

    def add(self, delta: SequenceDelta | FinishedSequence) -> ChoiceDelta:
        """What the sequence's next delta adds to the choice. A FinishedSequence is the only delta of its choice."""
        is_last = delta.finish_reason is not None
        token_ids = self._without_end_token(delta.token_ids) if is_last else delta.token_ids
        decode = self._detokenizer.finish if is_last else self._detokenizer.add
        text = self._cut_text(decode(token_ids), token_ids, is_last)
        self._num_characters += len(text)
        finish_reason: FinishReason | None = "stop" if is_last and self._has_stopped else delta.finish_reason
        if not self._wants_logprobs:
            return ChoiceDelta(text, finish_reason, delta.token_ids, None)
        assert delta.logprobs is not None, "the engine returns logprobs if they are requested"
        if self._has_end_logprobs or self._is_parallel_to_ids:
            token_ids = delta.token_ids
        self._buffered_tokens += build_token_logprobs(token_ids, delta.logprobs, delta.top, self._offsets)
        return ChoiceDelta(text, finish_reason, delta.token_ids, self._remove_sent_tokens(is_last))

    def _without_end_token(self, token_ids: list[int]) -> list[int]:
        """The last delta's tokens without the eos or stop token that ended the sequence, which has no text."""
        request = self._request
        ends = request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *self._model.eos_ids)
        return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids

    def _cut_text(self, new_text: str, token_ids: list[int], is_last: bool) -> str:
        """The part of the buffered and new text that can be sent. A stop string and all text after it are dropped.

        token_ids: the tokens that `new_text` comes from.
        """
        if not self._request.stop_strings:
            return new_text
        if self._has_stopped:
            return ""
        num_exempt = self._exempt_characters(token_ids) - self._num_characters
        text, self._has_stopped = self._stops.add(new_text, num_exempt, is_last)
        return text

    def _exempt_characters(self, token_ids: list[int]) -> int:
        """Number of characters at the start of the text in which stop strings do not count.

        All of them, until there are `min_tokens` tokens. token_ids: the next tokens.
        """
        if self._num_exempt is None:
            min_tokens = self._request.min_tokens
            self._first_ids += token_ids[: min_tokens - len(self._first_ids)]
            if len(self._first_ids) == min_tokens:
                self._num_exempt = len(self._model.tokenizer.decode_after(self._tail, self._first_ids))
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
