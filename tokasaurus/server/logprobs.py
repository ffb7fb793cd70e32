"""Log-probabilities of the chosen tokens in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence

from tokasaurus.server.protocol.chat import ChatLogprobs, ChatTokenLogprob
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.text.tokenizer import Tokenizer


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


def token_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """TokenOffsets of each."""
    offsets = TokenOffsets(tokenizer)
    return [offsets.next(token_id) for token_id in token_ids]


def build_completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], offsets: Sequence[int], tokenizer: Tokenizer
) -> CompletionLogprobs:
    """All three sequences of one length."""
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token_id) for token_id in token_ids],
        token_logprobs=list(logprobs),
        top_logprobs=None,
        text_offset=list(offsets),
    )


def build_chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> ChatLogprobs:
    """Both sequences of one length."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=tokenizer.token_text(token_id),
                logprob=logprob,
                bytes=list(tokenizer.token_bytes(token_id)),
                top_logprobs=[],
            )
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
    )
