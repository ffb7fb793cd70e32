"""A lower bound on the number of tokens of a text, from its bytes: rejects far too long texts without tokenizing."""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

_ASCII_ALPHANUMERIC = frozenset(byte for byte in range(128) if chr(byte).isalnum())
_NOT_ASCII = frozenset(range(128, 256))
_ALL = frozenset(range(256))
# The bound is computed for each class of bytes: a run of spaces or dashes may be one token of over a hundred bytes, but
# a token of letters rarely exceeds 25. For a text of words, this makes the bound three times as tight.
_CLASSES = (_ASCII_ALPHANUMERIC, _NOT_ASCII, _ALL)
# Each C call holds the GIL, which blocks the event loop: a few milliseconds for this many characters.
_SLICE_CHARS = 1 << 16
# More than the bytes that composing characters across a border of slices could save.
_BORDER_BYTES = 64
# Pre-tokenizers that remove nothing from the text.
_LOSSLESS = {"Sequence", "Split", "ByteLevel", "Digits"}


class TokenBounds:
    """Lower bounds for one vocabulary.

    Works for byte-level BPE, which keeps every byte of the text for which it has a token; for any other tokenizer the
    bound is always 0.
    """

    def __init__(self, base: BaseTokenizer, byte_of_character: Mapping[str, bytes]) -> None:
        """byte_of_character: the byte that each character of the byte-level alphabet stands for."""
        self._composes = _type_of(base.normalizer) == "NFC"
        self._longest: list[tuple[bytes, int]] = []
        if not _keeps_bytes(base):
            return
        has_token = {
            byte[0] for character, byte in byte_of_character.items() if base.token_to_id(character) is not None
        }
        added = base.get_added_tokens_decoder().values()
        vocabulary = sorted(base.get_vocab(with_added_tokens=False), key=len, reverse=True)
        for byte_class in _CLASSES:
            if byte_class is _ALL and any(_takes_spaces_along(token) for token in added):
                continue
            counted = byte_class & has_token
            characters = {character for character, byte in byte_of_character.items() if byte[0] in counted}
            most = max((sum(byte in counted for byte in token.content.encode()) for token in added), default=0)
            most = max(most, _max_characters(vocabulary, characters))
            self._longest.append((bytes(_ALL - counted), most))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`."""
        if not self._longest:
            return 0
        counts = [0] * len(self._longest)
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            if self._composes and not part.isascii():
                part = unicodedata.normalize("NFC", part)
            content = part.encode(errors="replace")
            for index, (others, _) in enumerate(self._longest):
                counts[index] += len(content.translate(None, others))
        num_uncounted = _BORDER_BYTES * (len(text) // _SLICE_CHARS) if self._composes else 0
        # `most` is 0 for a class none of whose bytes has a token; such a class gives no bound.
        bounds = zip(counts, self._longest, strict=True)
        return max(0, max(-((num_uncounted - count) // most) for count, (_, most) in bounds if most > 0))


def _keeps_bytes(base: BaseTokenizer) -> bool:
    if _type_of(base.normalizer) not in (None, "NFC") or base.pre_tokenizer is None:
        return False
    pre_tokenizers = _with_parts(json.loads(base.pre_tokenizer.__getstate__()))
    types = {part["type"] for part in pre_tokenizers}
    if "ByteLevel" not in types or not types <= _LOSSLESS:
        return False
    return all(part.get("behavior") != "Removed" for part in pre_tokenizers)


def _type_of(part: Any) -> str | None:
    return None if part is None else str(json.loads(part.__getstate__())["type"])


def _with_parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [state, *(part for inner in state.get("pretokenizers", []) for part in _with_parts(inner))]


def _takes_spaces_along(token: AddedToken) -> bool:
    return bool(token.lstrip or token.rstrip)


def _max_characters(vocabulary: list[str], characters: set[str]) -> int:
    """The largest number of `characters` in one token. vocabulary: sorted by length, longest first."""
    most = 0
    for token in vocabulary:
        if len(token) <= most:
            break
        most = max(most, sum(character in characters for character in token))
    return most
