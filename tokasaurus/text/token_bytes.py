"""The bytes that each token adds to the text, and from them a lower bound on the number of tokens of a text."""

import functools
import json
import re
import unicodedata
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

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


class TokenBytes:
    """Bytes and text of the tokens of one tokenizer; `Tokenizer` documents the methods. Thread-safe."""

    def __init__(self, base: BaseTokenizer) -> None:
        parts = _decoder_parts(base)
        self.is_byte_level = "ByteLevel" in parts
        self._has_byte_tokens = "ByteFallback" in parts and not self.is_byte_level
        self._base = base
        self.added_texts = {token_id: token.content for token_id, token in base.get_added_tokens_decoder().items()}
        """Id → text of the added tokens, whose text always becomes this one token; special tokens included."""
        self.misread_ids = frozenset(
            token_id
            for token_id, text in self.added_texts.items()
            if self.is_byte_level and not text.isascii() and _bytes_of_characters(text) != self.of_added(token_id)
        )
        """Added tokens that the library decodes wrongly: it takes their text for letters of the byte-level alphabet."""
        # Caches by id: the same tokens are looked up repeatedly, a thousand at a time for prompt logprobs.
        self._known_bytes: dict[tuple[int, bool], bytes] = {}
        self._known_texts: dict[tuple[int, bool], str] = {}

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        key = (token_id, is_first)
        token_bytes = self._known_bytes.get(key)
        if token_bytes is None:
            token_bytes = self._known_bytes[key] = self._find(token_id, is_first)
        return token_bytes

    def text_of(self, token_id: int, is_first: bool = False) -> str:
        key = (token_id, is_first)
        text = self._known_texts.get(key)
        if text is None:
            text = self._known_texts[key] = self.of(token_id, is_first).decode(errors="replace")
        return text

    def of_added(self, token_id: int) -> bytes:
        """The bytes of an added token of a byte-level tokenizer: it is stored as plain text.

        Only a single letter of the alphabet that the model itself has as a token stands for a byte there too."""
        text = self.added_texts[token_id]
        if len(text) == 1 and text in BYTE_OF_CHARACTER and self._base.model.token_to_id(text) == token_id:
            return BYTE_OF_CHARACTER[text]
        return text.encode()

    def is_byte_token(self, token_id: int) -> bool:
        return self._has_byte_tokens and _is_byte_token(self._base.id_to_token(token_id) or "")

    def _find(self, token_id: int, is_first: bool) -> bytes:
        if self.is_byte_level:
            if token_id in self.added_texts:
                return self.of_added(token_id)
            return _bytes_of_characters(self._base.id_to_token(token_id) or "")
        if self.is_byte_token(token_id):
            return bytes([int((self._base.id_to_token(token_id) or "")[3:5], 16)])
        before = [] if is_first else self._ordinary_ids
        before_text, text = (self._base.decode(ids, skip_special_tokens=False) for ids in (before, [*before, token_id]))
        return text[len(before_text) :].encode()

    @functools.cached_property
    def _ordinary_ids(self) -> list[int]:
        """One ordinary token with text, after which no token is the first; empty if there is none."""
        for token_id in range(self._base.get_vocab_size()):
            if token_id not in self.added_texts and not self.is_byte_token(token_id) and self._base.decode([token_id]):
                return [token_id]
        return []


def _is_byte_token(token: str) -> bool:
    return _BYTE_TOKEN.fullmatch(token) is not None


def _bytes_of_characters(token: str) -> bytes:
    """The bytes that a token spells in the byte-level alphabet; a token with any other character is plain text."""
    known = [BYTE_OF_CHARACTER.get(character) for character in token]
    return b"".join([byte for byte in known if byte is not None]) if None not in known else token.encode()


def _decoder_parts(base: BaseTokenizer) -> set[str]:
    if base.decoder is None:
        return set()
    state = json.loads(base.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _characters_of_bytes() -> dict[str, bytes]:
    """Character → byte. Byte-level BPE spells each byte as one visible character: printable Latin-1 as itself, other
    bytes from U+0100 on.

    Source: GPT-2's published encoder."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): bytes([byte]) for byte in visible}
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _characters_of_bytes()


class TokenBounds:
    """Lower bounds on the number of tokens of a text, for one vocabulary. They reject far too long texts untokenized.

    Works for byte-level BPE, which keeps every byte of the text for which it has a token; for any other tokenizer the
    bound is always 0.
    """

    def __init__(self, base: BaseTokenizer) -> None:
        self._composes = _type_of(base.normalizer) == "NFC"
        self._longest: list[tuple[bytes, int]] = []
        if not _keeps_bytes(base):
            return
        has_token = {
            byte[0] for character, byte in BYTE_OF_CHARACTER.items() if base.token_to_id(character) is not None
        }
        added = base.get_added_tokens_decoder().values()
        vocabulary = sorted(base.get_vocab(with_added_tokens=False), key=len, reverse=True)
        for byte_class in _CLASSES:
            if byte_class is _ALL and any(_takes_spaces_along(token) for token in added):
                continue
            counted = byte_class & has_token
            characters = {character for character, byte in BYTE_OF_CHARACTER.items() if byte[0] in counted}
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
