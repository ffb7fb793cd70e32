"""Incremental decoding of token ids: emits whole characters only; all parts joined equal decoding all ids at once."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokasaurus.text.special_stops import SpecialStops
from tokasaurus.text.token_decoder import NO_TAIL, PromptTail
from tokasaurus.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Decodes the tokens of one sequence as they arrive, without special tokens.

    The results of all `add` calls and of the final `finish`, concatenated, equal `Tokenizer.decode_after` of all ids.
    Text that later ids may change is buffered, such as the bytes of an incomplete character.
    """

    def add(self, token_ids: Sequence[int]) -> str: ...

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The buffered text and the text of the last ids."""


def make_detokenizer(
    tokenizer: Tokenizer, tail: PromptTail = NO_TAIL, special_stops: SpecialStops | None = None
) -> Detokenizer:
    """tail: of the prompt that the ids follow. special_stops: the text has their marks, as their `decode` gives it."""
    if special_stops is not None:
        return _MarkingDetokenizer(tokenizer, tail, special_stops)
    return _ByteDetokenizer(tokenizer, tail) if tokenizer.is_byte_level else _ContextDetokenizer(tokenizer, tail)


class _ByteDetokenizer:
    """Decodes byte-level BPE: the text is the concatenation of the tokens' bytes, decoded as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, tail: PromptTail) -> None:
        self._tokenizer = tokenizer
        self._tail = tail
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._bytes_of(tail.token_ids))  # leaves the bytes of an incomplete character in it
        self._has_begun = False

    def add(self, token_ids: Sequence[int]) -> str:
        self._has_begun = True
        return self._decoder.decode(self._bytes_of(token_ids))

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        if not self._has_begun:  # these are all ids, which the library decodes faster
            return self._tokenizer.decode_after(self._tail, token_ids)
        return self._decoder.decode(self._bytes_of(token_ids), final=True)

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        special_ids, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return b"".join([token_bytes(id_) for id_ in token_ids if id_ not in special_ids])


class _ContextDetokenizer:
    """For any other tokenizer: decodes new ids together with the preceding ids.

    A decoder may drop a leading space from the first token it decodes; the preceding ids ensure that no new id is the
    first. It decodes a run of byte tokens ("<0xNN>") as a unit, so such a run is buffered until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, tail: PromptTail) -> None:
        self._tokenizer = tokenizer
        self._context = tail
        self._pending: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        special_ids, token_bytes = self._tokenizer.special_ids, self._tokenizer.token_bytes
        # A token without text does not end a run of byte tokens: `decode` drops it before decoding the run.
        visible = [id_ for id_ in token_ids if id_ not in special_ids and token_bytes(id_)]
        self._pending += visible
        if not visible or self._tokenizer.is_byte_token(visible[-1]):
            return ""
        text = self._tokenizer.decode_after(self._context, self._pending)
        self._context = PromptTail(tuple(self._pending), len(self._tokenizer.decode(self._pending)))
        self._pending = []
        return text

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        return self._tokenizer.decode_after(self._context, [*self._pending, *token_ids])


class _MarkingDetokenizer:
    """Adds the marks of special tokens that stop strings name."""

    def __init__(self, tokenizer: Tokenizer, tail: PromptTail, special_stops: SpecialStops) -> None:
        self._tokenizer = tokenizer
        self._special_stops = special_stops
        self._tail = tail
        self._run: list[int] = []  # since the last mark
        self._detokenizer = make_detokenizer(tokenizer, tail)

    def add(self, token_ids: Sequence[int]) -> str:
        text, rest = self._marked(token_ids)
        return text + self._detokenizer.add(rest)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        text, rest = self._marked(token_ids)
        return text + self._detokenizer.finish(rest)

    def _marked(self, token_ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """(the text up to the last mark, the tokens after it)."""
        marks, parts, start = self._special_stops.marks, [], 0
        for end in [index for index, id_ in enumerate(token_ids) if id_ in marks]:
            parts += [self._detokenizer.finish(token_ids[start:end]), marks[token_ids[end]]]
            self._tail = self._special_stops.tail_after(self._tail, [*self._run, *token_ids[start:end]])
            self._detokenizer = make_detokenizer(self._tokenizer, self._tail)
            self._run, start = [], end + 1
        self._run += token_ids[start:]
        return "".join(parts), token_ids[start:]
