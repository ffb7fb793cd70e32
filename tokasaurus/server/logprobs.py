"""Log-probabilities of the chosen tokens in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence

from tokasaurus.server.protocol.chat import ChatLogprobs, ChatTokenLogprob
from tokasaurus.server.protocol.completions import CompletionLogprobs
from tokasaurus.text.tokenizer import Tokenizer


def token_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each token's text starts in `tokenizer.decode(token_ids)`, in characters; never falls.

    A token that continues a character which an earlier one began starts where that character is. A special token,
    which is not part of the text, starts where the next one does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    num_characters = 0
    for token_id in token_ids:
        offsets.append(num_characters)
        if token_id not in tokenizer.special_ids:
            num_characters += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


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
