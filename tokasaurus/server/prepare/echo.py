"""The prompt in front of a completion, with echo=true: its text, and where each of its tokens begins in it."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokasaurus.server.protocol.completions import Prompt
from tokasaurus.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """text: the prompt as it was given, or what its ids read, special tokens by their names.

    offsets: where the text of each of its tokens begins, in characters, and never falls; empty where no
    log-probabilities are asked. A token that continues a character begins where that does, and one that is not in the
    text, since the tokenizer put it there, where the next one does.
    """

    text: str
    offsets: list[int]


def make_echo(prompt: Prompt, prompt_ids: Sequence[int], tokenizer: Tokenizer, wants_offsets: bool) -> Echo:
    """prompt_ids: of the prompt, if that is a text with what the tokenizer adds to it."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids, skip_special_tokens=False)
    if not wants_offsets:
        return Echo(text, [])
    offsets, pieces = [0], []
    for piece in _pieces(prompt_ids, text, tokenizer):
        pieces.append(piece)
        offsets.append(offsets[-1] + len(piece))
    if is_text and "".join(pieces) != text:  # the tokenizer has normalized it
        return Echo(text, tokenizer.token_starts(text, add_special_tokens=True))
    return Echo(text, [min(offset, len(text)) for offset in offsets[:-1]])


def _pieces(prompt_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The whole characters that each token completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters = 0
    for token_id in prompt_ids:
        piece = decoder.decode(tokenizer.token_bytes(token_id))
        if token_id in tokenizer.special_ids and not text.startswith(piece, num_characters):
            piece = ""
        num_characters += len(piece)
        yield piece
