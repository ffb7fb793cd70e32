"""Stop strings that have the text of special tokens, such as "<|im_end|>", although answers do not show those tokens.

Each such token is one character of the text in which stop strings are sought, a mark. Marks are halves of surrogate
pairs, which no other text has; they are removed from what a client gets.
"""

from collections.abc import Collection, Mapping, Sequence

from tokasaurus.text.token_decoder import NO_TAIL, PromptTail, TokenDecoder

_FIRST_MARK = 0xD800


class SpecialStops:
    """The stop strings of one request, at least one of which has the text of a special token.

    Each is found where the text has its characters, and where special tokens are in place of all their texts in it."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str], named: Mapping[str, int]) -> None:
        """named: text → id of the special tokens in them."""
        self._decoder = decoder
        mark_of_text = {text: chr(_FIRST_MARK + index) for index, text in enumerate(named)}
        self._text_of_mark = {mark: text for text, mark in mark_of_text.items()}
        self.marks = {named[text]: mark for text, mark in mark_of_text.items()}
        """Id → mark of these tokens."""
        find = decoder.special_pattern.sub
        marked = (find(lambda match: mark_of_text.get(match.group(), match.group()), stop) for stop in stops)
        self.stops = tuple(dict.fromkeys((*stops, *marked)))
        """The stop strings as they are, and with marks."""
        self._without_marks = dict.fromkeys(map(ord, self._text_of_mark))

    def shown(self, text: str) -> str:
        """The text without marks."""
        return text.translate(self._without_marks)

    def as_given(self, stop: str) -> str:
        """The stop string that the client gave, of one with marks."""
        return "".join(self._text_of_mark.get(character, character) for character in stop)

    def decode(self, ids: Sequence[int]) -> str:
        """The text with marks. A mark ends an incomplete character before it."""
        parts: list[str] = []
        tail, start = NO_TAIL, 0
        for end in [index for index, id_ in enumerate(ids) if id_ in self.marks]:
            run = ids[start:end]
            parts += [self._decoder.decode_after(tail, run), self.marks[ids[end]]]
            tail, start = self.tail_after(tail, run), end + 1
        return "".join([*parts, self._decoder.decode_after(tail, ids[start:])])

    def tail_after(self, tail: PromptTail, run: Sequence[int]) -> PromptTail:
        """What the text after a mark depends on, which follows these ids: whether it is the first."""
        decoder = self._decoder
        if decoder.is_byte_level:
            return NO_TAIL
        ids = (*tail.token_ids, *run)
        last = next((id_ for id_ in reversed(ids) if id_ not in decoder.special_ids and decoder.has_text(id_)), None)
        return NO_TAIL if last is None else PromptTail((last,), len(decoder.decode([last])))


def find_special_stops(
    decoder: TokenDecoder, stops: Sequence[str], ids: Collection[int] | None = None
) -> SpecialStops | None:
    """None if no stop string has the text of a special token. ids: the tokens that count; None: all."""
    texts = decoder.special_texts
    found = (text for stop in stops for text in decoder.special_pattern.findall(stop)) if texts else ()
    named = {text: texts[text] for text in found if ids is None or texts[text] in ids}
    return SpecialStops(decoder, stops, named) if named else None
