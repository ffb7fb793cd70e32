"""The prompt that echo=true returns in front of a completion: its text and the offset of each token in it."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokasaurus.server.protocol.completions import Prompt
from tokasaurus.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt."""

    text: str
    """The prompt as the client wrote it; a prompt given as ids is decoded, special tokens included. Where such a prompt
    ends inside a character, this character belongs to the completion's text."""
    offsets: list[int]
    """Start of each prompt token in `text`, in characters, never decreasing; empty if no logprobs are requested.

    A token that continues a character has the offset of that character. A token that is not in the text, because the
    tokenizer added it, has the offset of the next token.
    """


def make_echo(prompt: Prompt, prompt_ids: Sequence[int], tokenizer: Tokenizer, wants_offsets: bool) -> Echo:
    """prompt_ids: the tokens of the prompt; for a text, with the special tokens that the tokenizer adds."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _text_of_ids(prompt_ids, tokenizer)
    if not wants_offsets:
        return Echo(text, [])
    offsets, token_texts = [0], []
    for token_text in _token_texts(prompt_ids, text, tokenizer):
        token_texts.append(token_text)
        offsets.append(offsets[-1] + len(token_text))
    if is_text and "".join(token_texts) != text:  # the tokenizer normalised the text
        return Echo(text, tokenizer.token_starts(text, add_special_tokens=True))
    return Echo(text, [min(offset, len(text)) for offset in offsets[:-1]])


def _text_of_ids(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    tail = tokenizer.prompt_tail(prompt_ids)
    num_settled = len(prompt_ids) - tail.num_open_tokens
    if tail.num_open_tokens and tuple(prompt_ids[num_settled:]) == tail.token_ids[-tail.num_open_tokens :]:
        # Without these bytes, since a run of byte tokens that is no valid UTF-8 has none of its characters.
        return tokenizer.decode(prompt_ids[:num_settled], skip_special_tokens=False)
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    return text.removesuffix(tokenizer.decode_after(tail, []))


def _token_texts(prompt_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each token: the characters that it completes, "" for a special token that is not in `text`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters = 0
    for index, token_id in enumerate(prompt_ids):
        token_text = decoder.decode(tokenizer.token_bytes(token_id, is_first=index == 0))
        if token_id in tokenizer.special_ids and not text.startswith(token_text, num_characters):
            token_text = ""
        num_characters += len(token_text)
        yield token_text
