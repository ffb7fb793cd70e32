"""The end of a prompt, on which the text of its completion depends.

A completion's text is what decoding adds when its ids follow the prompt's: the first "▁world" keeps its space, and
bytes that complete the prompt's last character give this character.
"""

import codecs
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from tokasaurus.text.token_bytes import TokenBytes

PROMPT_TAIL_TOKENS = 64
"""Most tokens that are read at the end of a prompt."""

_MAX_BYTE_TOKENS = 32
"""Most byte tokens that are read at the end of a prompt. A longer run is taken for valid UTF-8 before them."""

_MAX_OPEN_BYTES = 3  # of an incomplete character
_CONTINUATION = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class PromptTail:
    """The last tokens of a prompt; no tokens if they do not change the text of what follows."""

    token_ids: tuple[int, ...] = ()
    num_characters: int = 0
    """Characters of their decoding that the prompt's text has. The rest is an incomplete character, which belongs to
    the completion's text, where it may be completed."""
    num_open_tokens: int = 0
    """Byte tokens at the end that are this character; 0 for byte-level BPE, whose tokens may end inside one."""

    def text_after(self, decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> str:
        """The text that these ids add to the prompt. decode: without special tokens."""
        return decode([*self.token_ids, *token_ids])[self.num_characters :] if self.token_ids else decode(token_ids)


NO_TAIL = PromptTail()


def tail_of_bytes(prompt_ids: Sequence[int], special_ids: Container[int], token_bytes: TokenBytes) -> PromptTail:
    """For byte-level BPE, where only an incomplete last character matters. Special tokens have no text."""
    token_ids: list[int] = []
    last_bytes = b""
    for token_id in reversed(prompt_ids[-PROMPT_TAIL_TOKENS:]):
        own = b"" if token_id in special_ids else token_bytes.of(token_id)
        if own:
            token_ids.append(token_id)
            last_bytes = own + last_bytes
            if len(last_bytes) >= _MAX_OPEN_BYTES or last_bytes[0] not in _CONTINUATION:
                break
    text, num_decoded = codecs.utf_8_decode(last_bytes, "replace", False)
    return NO_TAIL if num_decoded == len(last_bytes) else PromptTail(tuple(reversed(token_ids)), len(text))


def tail_of_tokens(
    prompt_ids: Sequence[int],
    special_ids: Container[int],
    token_bytes: TokenBytes,
    decode: Callable[[Sequence[int]], str],
) -> PromptTail:
    """For any other decoder: the last token with text, and the byte tokens after it, which are decoded as a unit."""
    last_first: list[int] = []
    run: list[int] = []
    for token_id in reversed(prompt_ids[-PROMPT_TAIL_TOKENS:]):
        if token_id in special_ids or not token_bytes.of(token_id):
            continue
        last_first.append(token_id)
        if len(last_first) > _MAX_BYTE_TOKENS or not token_bytes.is_byte_token(token_id):
            break
        run.append(token_id)
    if len(run) == _MAX_BYTE_TOKENS:
        last_first = run
        while len(last_first) > 1 and token_bytes.of(last_first[-1])[0] in _CONTINUATION:
            last_first.pop()  # the run is cut where a character begins
        run = last_first
    token_ids = tuple(reversed(last_first))
    num_open = _num_open(b"".join(map(token_bytes.of, reversed(run))))
    return PromptTail(token_ids, len(decode(token_ids[: len(token_ids) - num_open])), num_open)


def _num_open(run: bytes) -> int:
    """Number of last bytes that begin a character; 0 if the bytes before them are no valid UTF-8."""
    try:
        return len(run) - codecs.utf_8_decode(run, "strict", False)[1]
    except UnicodeDecodeError:
        return 0
