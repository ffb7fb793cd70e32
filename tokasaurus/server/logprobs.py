"""Log-probabilities of the chosen and the likeliest tokens in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokasaurus.messages.generation import TopLogprobs
from tokasaurus.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a choice. offset: see TokenOffsets. top: (id, log-probability) of the likeliest tokens at its place,
    falling; None where not asked."""

    token_id: int
    logprob: float
    offset: int
    top: list[tuple[int, float]] | None


class TokenOffsets:
    """Where each token's text starts in `tokenizer.decode` of all, in characters; never falls.

    A token that continues a character which an earlier one began starts where that character is. A special token,
    which is not part of the text, starts where the next one does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        """Of the next token."""
        offset = self._num_characters
        if token_id not in self._tokenizer.special_ids:
            self._num_characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def score_tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None, offsets: TokenOffsets
) -> list[ScoredToken]:
    """The next tokens of a choice, whose earlier ones `offsets` knows. logprobs and top may be of more tokens, which
    follow these."""
    count = len(token_ids)
    tops: Sequence[list[tuple[int, float]] | None] = [None] * count
    if top is not None:
        pairs = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
        tops = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return [
        ScoredToken(token_id, logprob, offsets.next(token_id), likeliest)
        for token_id, logprob, likeliest in zip(token_ids, logprobs[:count], tops[:count], strict=True)
    ]


def build_completion_logprobs(
    scored: Sequence[ScoredToken], asks_top: bool, tokenizer: Tokenizer
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token.token_id) for token in scored],
        token_logprobs=[token.logprob for token in scored],
        top_logprobs=[_by_text(token, tokenizer) for token in scored] if asks_top else None,
        text_offset=[token.offset for token in scored],
    )


def _by_text(token: ScoredToken, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI has it, the chosen one; of several that read alike, the likeliest."""
    by_text: dict[str, float] = {}
    for token_id, logprob in [*(token.top or ()), (token.token_id, token.logprob)]:
        text = tokenizer.token_text(token_id)
        by_text[text] = max(logprob, by_text.get(text, logprob))
    return by_text


def build_chat_logprobs(scored: Sequence[ScoredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                *(tokenizer.token_text(token.token_id), token.logprob, list(tokenizer.token_bytes(token.token_id))),
                top_logprobs=[
                    ChatTopLogprob(tokenizer.token_text(token_id), logprob, list(tokenizer.token_bytes(token_id)))
                    for token_id, logprob in token.top or ()
                ],
            )
            for token in scored
        ]
    )
