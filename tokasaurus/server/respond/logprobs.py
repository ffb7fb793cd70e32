"""Logprobs of an answer: OpenAI's two formats, prompt logprobs in vLLM's, and the fingerprint with packed logprobs."""

import base64
import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from tokasaurus.messages.generation import PromptLogprobs, TopLogprobs
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Echo
from tokasaurus.server.protocol.answers import PromptTokenLogprob, PromptTokenLogprobs
from tokasaurus.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.text.token_decoder import NO_TAIL, PromptTail
from tokasaurus.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a choice, with its logprob."""

    token_id: int
    logprob: float
    offset: int
    """Start of the token's text, see TokenOffsets."""
    is_first: bool
    """No token with text precedes it, not even in the prompt: see `Tokenizer.token_bytes`."""
    top: list[tuple[int, float]] | None
    """(token id, logprob) of the most likely tokens at its position, most likely first, without impossible ones; None
    if not requested."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How the logprobs of an answer name tokens."""

    tokenizer: Tokenizer
    are_ids: bool = False
    """See return_tokens_as_token_ids of SamplingFields."""

    def name(self, token_id: int, is_first: bool = False) -> str:
        """is_first: as in `Tokenizer.token_text`."""
        return f"token_id:{token_id}" if self.are_ids else self.tokenizer.token_text(token_id, is_first)


class TokenOffsets:
    """Start of each token's text in the text of a completion, in characters, never decreasing.

    A token that continues a character has the offset of that character. A special token, which is not part of the text,
    has the offset of the next token.
    """

    def __init__(self, tokenizer: Tokenizer, tail: PromptTail = NO_TAIL) -> None:
        """tail: of the prompt."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, tail.token_ids)))
        self._is_first = not tail.token_ids
        self._num_characters = 0

    def next(self, token_id: int) -> tuple[int, bool]:
        """The offset of the sequence's next token, and whether no token with text precedes it."""
        offset, is_first = self._num_characters, self._is_first
        if token_id not in self._tokenizer.special_ids:
            token_bytes = self._tokenizer.token_bytes(token_id, is_first)
            self._num_characters += len(self._decoder.decode(token_bytes))
            self._is_first &= not self._tokenizer.token_bytes(token_id)
        return offset, is_first


def build_token_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None, offsets: TokenOffsets
) -> list[TokenLogprob]:
    """The next tokens of a choice, with their logprobs.

    logprobs, top: of these tokens; entries for later tokens are ignored. offsets: has seen the choice's earlier tokens.
    """
    count = len(token_ids)
    tops: Sequence[list[tuple[int, float]] | None] = (
        [None] * count if top is None else _pairs(top, top.token_ids.shape[1])
    )
    return [
        TokenLogprob(token_id, logprob, *offsets.next(token_id), token_top)
        for token_id, logprob, token_top in zip(token_ids, logprobs[:count], tops[:count], strict=True)
    ]


def _pairs(top: TopLogprobs, count: int) -> list[list[tuple[int, float]]]:
    """(token id, logprob) of the `count` most likely tokens at each position, most likely first, or of fewer if no more
    are possible."""
    logprobs = top.logprobs[:, :count]
    rows = zip(top.token_ids[:, :count].tolist(), logprobs.tolist(), strict=True)
    pairs = [list(zip(ids, values, strict=True)) for ids, values in rows]
    if np.isfinite(logprobs).all():
        return pairs
    return [[pair for pair in row if math.isfinite(pair[1])] for row in pairs]


def likely_tokens(top: TopLogprobs | None, num_tokens: int) -> Sequence[list[tuple[int, float]]]:
    """(token id, logprob) of the most likely tokens at each of `num_tokens` positions; none if top is None."""
    return [[]] * num_tokens if top is None else _pairs(top, top.token_ids.shape[1])


def build_completion_logprobs(
    tokens: Sequence[TokenLogprob], names: TokenNames, first_offset: int = 0
) -> CompletionLogprobs:
    """Logprobs in the completions format. first_offset: start of the completion in the text of its choice."""
    return CompletionLogprobs(
        tokens=[names.name(token.token_id, token.is_first) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_by_name(token, names) for token in tokens],
        text_offset=[first_offset + token.offset for token in tokens],
    )


def build_echo_logprobs(
    echo: Echo, prompt_ids: NDArray[np.int32], prompt_logprobs: PromptLogprobs, num_top: int, names: TokenNames
) -> CompletionLogprobs:
    """Logprobs of the P tokens of an echoed prompt; null for the first.

    num_top: top-k logprobs per token; `prompt_logprobs` may contain more.
    """
    token_ids, tops = prompt_ids.tolist(), _prompt_tops(prompt_logprobs.top, len(prompt_ids), num_top)
    rows = zip(token_ids, prompt_logprobs.logprobs.tolist(), echo.offsets, tops, strict=True)
    tokens = [TokenLogprob(token_id, logprob, offset, False, top) for token_id, logprob, offset, top in rows]
    later = build_completion_logprobs(tokens[1:], names)
    return CompletionLogprobs(
        tokens=[names.name(token_ids[0], is_first=True), *later.tokens],
        token_logprobs=[None, *later.token_logprobs],
        top_logprobs=[None, *later.top_logprobs],
        text_offset=echo.offsets,
    )


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The logprobs of both texts."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def build_prompt_logprobs(
    prompt_ids: NDArray[np.int32],
    prompt_logprobs: PromptLogprobs,
    num_top: int,
    tokenizer: Tokenizer,
    start: int = 0,
    stop: int | None = None,
) -> PromptTokenLogprobs:
    """Prompt logprobs in vLLM's format: one entry per prompt token, null for the first.

    num_top: as in `build_echo_logprobs`. start, stop: positions in the prompt; all of it by default. A prompt token
    that is also among the most likely occurs once in its entry.
    """
    part, top = slice(start, stop), prompt_logprobs.top
    token_ids = prompt_ids[part].tolist()
    top_part = None if top is None else TopLogprobs(top.token_ids[part], top.logprobs[part])
    logprobs, ranks = prompt_logprobs.logprobs[part].tolist(), prompt_logprobs.ranks[part].tolist()
    rows = zip(token_ids, logprobs, ranks, _prompt_tops(top_part, len(token_ids), num_top), strict=True)
    entries: PromptTokenLogprobs = [_by_id(*row, tokenizer) for row in rows]
    if start == 0:
        entries[0] = None
    return entries


def _prompt_tops(top: TopLogprobs | None, num_tokens: int, num_top: int) -> Sequence[list[tuple[int, float]]]:
    """(token id, logprob) of the `num_top` most likely tokens at each of `num_tokens` positions of a prompt."""
    if num_top == 0:
        return [[]] * num_tokens
    assert top is not None, "the engine returns top-k logprobs if they are requested"
    return _pairs(top, num_top)


def _by_id(
    token_id: int, logprob: float, rank: int, top: list[tuple[int, float]], tokenizer: Tokenizer
) -> dict[str, PromptTokenLogprob]:
    """The prompt token and the most likely tokens, by token id."""
    entry = {str(token_id): PromptTokenLogprob(logprob, rank, tokenizer.token_text(token_id))}
    for other_rank, (other_id, value) in enumerate(top, start=1):
        if other_id != token_id:
            entry[str(other_id)] = PromptTokenLogprob(value, other_rank, tokenizer.token_text(other_id))
    return entry


def _by_name(token: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The most likely tokens and, as at OpenAI, the sampled one; of several with the same text, the most likely."""
    by_name: dict[str, float] = {}
    for token_id, logprob in token.top or ():
        by_name.setdefault(names.name(token_id, token.is_first), logprob)  # the most likely come first
    # no more likely than any of the top tokens
    by_name.setdefault(names.name(token.token_id, token.is_first), token.logprob)
    return by_name


def build_chat_logprobs(tokens: Sequence[TokenLogprob], names: TokenNames) -> ChatLogprobs:
    """Logprobs in the chat format."""

    def spelling(token_id: int, token: TokenLogprob) -> tuple[str, list[int]]:
        return names.name(token_id, token.is_first), list(names.tokenizer.token_bytes(token_id, token.is_first))

    content = []
    for token in tokens:
        top = []
        for token_id, logprob in token.top or ():
            text, token_bytes = spelling(token_id, token)
            top.append(ChatTopLogprob(text, logprob, token_bytes))
        text, token_bytes = spelling(token.token_id, token)
        content.append(ChatTokenLogprob(text, token.logprob, token_bytes, top_logprobs=top))
    return ChatLogprobs(content)


def build_fingerprint(sequences: Sequence[FinishedSequence], starts_in_reasoning: bool = False) -> str:
    """JSON object of lists with one entry per choice, for its G tokens as sampled: end token or stop string included.

    completion_ids: G ids. packed_chosen_logprobs: base64 of float32 [G]. packed_topk_indices, packed_topk_logprobs:
    base64 of int32 and float32 [G, k], -inf where fewer than k tokens are possible. Arrays are row-major and
    little-endian. A list is null if not requested.
    starts_in_reasoning: true if a chat's prompt ends within reasoning, which the choices continue; else it is left out.
    """
    chosen = [sequence.logprobs for sequence in sequences if sequence.logprobs is not None]
    tops = [sequence.top for sequence in sequences]
    top = [entry for entry in tops if entry is not None]
    assert len(chosen) in (0, len(sequences)), "either all sequences of an answer have logprobs or none"
    assert len(top) in (0, len(sequences)), "either all sequences of an answer have top-k logprobs or none"
    fingerprint: dict[str, object] = {
        "completion_ids": [sequence.token_ids for sequence in sequences],
        "packed_chosen_logprobs": [_pack(np.array(logprobs, "<f4")) for logprobs in chosen] or None,
        "packed_topk_indices": [_pack(entry.token_ids.astype("<i4")) for entry in top] or None,
        "packed_topk_logprobs": [_pack(entry.logprobs.astype("<f4")) for entry in top] or None,
    }
    if starts_in_reasoning:
        fingerprint["starts_in_reasoning"] = True
    return orjson.dumps(fingerprint).decode()


def _pack(numbers: NDArray[np.float32] | NDArray[np.int32]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()
