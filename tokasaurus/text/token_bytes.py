"""The bytes that each token adds to the text."""

import functools
import json
import re

from tokenizers import Tokenizer as BaseTokenizer

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
