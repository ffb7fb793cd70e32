"""The bytes that each token adds to the text."""

import json

from tokenizers import Tokenizer as BaseTokenizer


class TokenBytes:
    """Bytes and text of the tokens of one tokenizer; `Tokenizer` documents the methods. Thread-safe."""

    def __init__(self, base: BaseTokenizer) -> None:
        self.is_byte_level = _is_byte_level(base)
        self._base = base
        self.added_texts = {token_id: token.content for token_id, token in base.get_added_tokens_decoder().items()}
        """Id → text of the added tokens, whose text always becomes this one token; special tokens included."""
        # Caches by id: the same tokens are looked up repeatedly, a thousand at a time for prompt logprobs.
        self._known_bytes: dict[int, bytes] = {}
        self._known_texts: dict[int, str] = {}

    def of(self, token_id: int) -> bytes:
        token_bytes = self._known_bytes.get(token_id)
        if token_bytes is None:
            token_bytes = self._known_bytes[token_id] = self._find(token_id)
        return token_bytes

    def text_of(self, token_id: int) -> str:
        text = self._known_texts.get(token_id)
        if text is None:
            text = self._known_texts[token_id] = self.of(token_id).decode(errors="replace")
        return text

    def is_byte_token(self, token_id: int) -> bool:
        return not self.is_byte_level and _is_byte_token(self._base.id_to_token(token_id) or "")

    def _find(self, token_id: int) -> bytes:
        if token_id in self.added_texts:
            return self.added_texts[token_id].encode()
        token = self._base.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return b"".join(BYTE_OF_CHARACTER.get(character, character.encode()) for character in token)
        if _is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_byte_level(base: BaseTokenizer) -> bool:
    if base.decoder is None:
        return False
    state = json.loads(base.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return any(part["type"] == "ByteLevel" for part in parts)


def _characters_of_bytes() -> dict[str, bytes]:
    """Character → byte. Byte-level BPE spells each byte as one visible character: printable Latin-1 as itself, other
    bytes from U+0100 on.

    Source: GPT-2's published encoder."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): bytes([byte]) for byte in visible}
    return table | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _characters_of_bytes()
