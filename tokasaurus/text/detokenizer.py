"""Token ids → text while the ids still come: whole characters only, and joined what `decode` makes of all ids."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokasaurus.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """The text of one sequence, special tokens left out.

    What `add` and at last `finish` give, put together, is `Tokenizer.decode` of all ids. Text that later ids may change
    is held back: the bytes of a character that is not complete, for instance.
    """

    def add(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return _ByteDetokenizer(tokenizer) if tokenizer.is_byte_level else _ContextDetokenizer(tokenizer)


class _ByteDetokenizer:
    """For byte-level BPE: the text is the UTF-8 of the tokens' bytes, one after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        special_ids, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([token_bytes(id_) for id_ in token_ids if id_ not in special_ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ContextDetokenizer:
    """For any other tokenizer: decodes new ids together with those before them.

    A decoder may drop the space before the first text; with ids before them, the new ones are not the first. It reads a
    run of byte tokens ("<0xNN>") as a whole, so such a run is held back until it ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        special_ids, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        # What has no text does not end a run of bytes: `decode` leaves it out before it reads them.
        visible = [id_ for id_ in token_ids if id_ not in special_ids and token_bytes(id_)]
        self._pending += visible
        if not visible or self._tokenizer.is_byte_token(visible[-1]):
            return ""
        return self._decode_pending()

    def finish(self) -> str:
        return self._decode_pending()

    def _decode_pending(self) -> str:
        decode = self._tokenizer.decode
        text = decode(self._context + self._pending)[len(decode(self._context)) :]
        self._context, self._pending = self._pending, []
        return text
