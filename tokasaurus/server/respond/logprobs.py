"""Log-probabilities of the chosen and the likeliest tokens in OpenAI's two shapes, and of prompts in vLLM's."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import PromptLogprobs, TopLogprobs
from tokasaurus.server.prepare.echo import Echo
from tokasaurus.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.server.protocol.prompt_logprobs import PromptTokenLogprob, PromptTokenLogprobs
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
    tops: Sequence[list[tuple[int, float]] | None] = (
        [None] * count if top is None else _pairs(top, top.token_ids.shape[1])
    )
    return [
        ScoredToken(token_id, logprob, offsets.next(token_id), likeliest)
        for token_id, logprob, likeliest in zip(token_ids, logprobs[:count], tops[:count], strict=True)
    ]


def _pairs(top: TopLogprobs, count: int) -> list[list[tuple[int, float]]]:
    """(id, log-probability) of the `count` likeliest tokens at each place, falling."""
    places = zip(top.token_ids[:, :count].tolist(), top.logprobs[:, :count].tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in places]


def build_completion_logprobs(
    scored: Sequence[ScoredToken], asks_top: bool, tokenizer: Tokenizer, first_offset: int = 0
) -> CompletionLogprobs:
    """first_offset: where the completion begins in the text of its choice."""
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token.token_id) for token in scored],
        token_logprobs=[token.logprob for token in scored],
        top_logprobs=[_by_text(token, tokenizer) for token in scored] if asks_top else None,
        text_offset=[first_offset + token.offset for token in scored],
    )


def build_echo_logprobs(
    echo: Echo, prompt_ids: NDArray[np.int32], scores: PromptLogprobs, num_top: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Of the P tokens of a prompt; the first has none. num_top: of the likeliest, for which `scores` may have more."""
    token_ids, tops = prompt_ids.tolist(), _prompt_tops(scores, len(prompt_ids), num_top)
    scored = list(map(ScoredToken, token_ids, scores.logprobs.tolist(), echo.offsets, tops))
    later = build_completion_logprobs(scored[1:], num_top > 0, tokenizer)
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token_ids[0]), *later.tokens],
        token_logprobs=[None, *later.token_logprobs],
        top_logprobs=None if later.top_logprobs is None else [None, *later.top_logprobs],
        text_offset=echo.offsets,
    )


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both with the likeliest tokens or both without."""
    has_top = first.top_logprobs is not None and second.top_logprobs is not None
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=[*(first.top_logprobs or ()), *(second.top_logprobs or ())] if has_top else None,
        text_offset=first.text_offset + second.text_offset,
    )


def build_prompt_logprobs(
    prompt_ids: NDArray[np.int32], scores: PromptLogprobs, num_top: int, tokenizer: Tokenizer
) -> PromptTokenLogprobs:
    """num_top: as in `build_echo_logprobs`. A prompt's token that is among the likeliest is there once."""
    tops = _prompt_tops(scores, len(prompt_ids), num_top)
    places = zip(prompt_ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), tops, strict=True)
    entries = [_by_id(*place, tokenizer) for place in places]
    return [None, *entries[1:]]


def _prompt_tops(scores: PromptLogprobs, num_tokens: int, num_top: int) -> Sequence[list[tuple[int, float]]]:
    if num_top == 0:
        return [[]] * num_tokens
    assert scores.top is not None, "the engine returns the likeliest tokens where they are asked"
    return _pairs(scores.top, num_top)


def _by_id(
    token_id: int, logprob: float, rank: int, top: list[tuple[int, float]], tokenizer: Tokenizer
) -> dict[str, PromptTokenLogprob]:
    entry = {str(token_id): PromptTokenLogprob(logprob, rank, tokenizer.token_text(token_id))}
    for place, (other_id, value) in enumerate(top, start=1):
        if other_id != token_id:
            entry[str(other_id)] = PromptTokenLogprob(value, place, tokenizer.token_text(other_id))
    return entry


def _by_text(token: ScoredToken, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI has it, the chosen one; of several that read alike, the likeliest."""
    by_text: dict[str, float] = {}
    for token_id, logprob in token.top or ():
        by_text.setdefault(tokenizer.token_text(token_id), logprob)  # they fall
    by_text.setdefault(tokenizer.token_text(token.token_id), token.logprob)  # no likelier than those it is not among
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
