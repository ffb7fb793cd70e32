"""Stop strings: pure functions over text, and the manager's check over token ids.

The text is cut before the stop string that is completed first, as if the text were generated one character at a time:
the result does not depend on how the text is split into tokens.
"""

import functools
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokasaurus.text.token_decoder import NO_TAIL, PromptTail

_REPLACEMENT = "\ufffd"  # incomplete UTF-8 decodes to this

_MAX_ROWS = 256
"""Limit on the sets of last characters for which StopTokens keeps a row, since clients can send arbitrarily many."""


def _find_beyond(text: str, stop: str, num_exempt: int) -> int:
    """Start of the first occurrence of `stop` that ends after the first `num_exempt` characters; -1 if none does."""
    return text.find(stop, max(0, num_exempt + 1 - len(stop)))


def buffered_length(text: str, stops: Iterable[str]) -> int:
    """Number of characters at the end of `text` that may begin a stop string, so must be buffered.

    Precondition: `text` contains no complete stop string.
    """
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with. Quadratic: for stops of a few characters."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class StopScanner:
    """Finds stop strings in a text that arrives in parts, in time proportional to the new text.

    It finds the occurrence that ends first; if several end there, the longest. `buffered_length` of the text that was
    not returned yet stays unsent. Precondition: no stop string is empty.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False) -> None:
        """keeps_stop: the text ends with the stop string, so nothing needs to be buffered."""
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._num_matched = [0] * len(stops)  # for each stop string, the length of its prefix that the text ends with
        self._buffered = ""  # may begin a stop string; returned already with keeps_stop
        self.found = ""
        """The stop string, once `add` has found one."""

    def add(self, new_text: str, num_exempt: int, is_last: bool) -> tuple[str, bool]:
        """(text that contains no part of a stop string, whether a stop string follows it).

        With keeps_stop: (new text, up to the end of a stop string, whether one ends there).

        num_exempt: stop strings that end within this many characters after all returned text are ignored.
        is_last: no further text follows, so nothing is buffered.
        """
        text, num_old = self._buffered + new_text, len(self._buffered)
        num_returned = num_old if self._keeps_stop else 0
        num_exempt += num_returned
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            # Only occurrences that end in the new text: earlier parts were searched when they came.
            start = _find_beyond(text, stop, max(num_exempt, num_old))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            end, start = min(found)
            self.found = text[start:end]
            return text[num_returned : end if self._keeps_stop else start], True
        if is_last:
            return text[num_returned:], False
        for index, stop in enumerate(self._stops):
            self._num_matched[index] = _advance(stop, self._num_matched[index], new_text)
        num_sent = len(text) - max(self._num_matched, default=0)
        self._buffered = text[num_sent:]
        return (new_text if self._keeps_stop else text[:num_sent]), False


def _advance(stop: str, num_matched: int, new_text: str) -> int:
    """The longest proper prefix of `stop` that the text ends with, after `num_matched` characters of it and new text.

    Knuth, Morris and Pratt's algorithm.
    """
    position, end = 0, len(new_text)
    if end >= len(stop):  # the last characters decide
        position, num_matched = end - len(stop) + 1, 0
    while position < end:
        if num_matched == 0:
            position = new_text.find(stop[0], position) + 1
            if position == 0:
                return 0
            num_matched = 1
        else:
            character = new_text[position]
            while num_matched > 0 and stop[num_matched] != character:
                num_matched = _failures(stop)[num_matched]
            num_matched += stop[num_matched] == character
            position += 1
        if num_matched == len(stop):
            num_matched = _failures(stop)[num_matched]
    return num_matched


@functools.lru_cache(maxsize=256)
def _failures(stop: str) -> Sequence[int]:
    """The length of the longest proper prefix of stop[:length] that stop[:length] ends with, for each length."""
    failures, matched = [0, 0], 0
    for character in stop[1:]:
        while matched > 0 and stop[matched] != character:
            matched = failures[matched]
        matched += stop[matched] == character
        failures.append(matched)
    return failures


def lookback_tokens(stops: Iterable[str]) -> int:
    """Number of final tokens to decode in order to find every stop string that the last token completes.

    Each token contains at least one byte, so a stop string of b bytes spans at most b tokens. One more is decoded,
    since decoding may drop the first token's leading space.
    """
    longest = max((len(stop.encode("utf-8", "surrogatepass")) for stop in stops), default=0)
    return longest + 1 if longest else 0


class StopMatcher:
    """Finds the token at which a sequence's text completes a stop string, decoding only its last tokens.

    decode: token ids to text without special tokens. special_ids: the special tokens, which do not interrupt a match.
    tail: of the prompt, after which the sequence's first tokens are decoded.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        special_ids: Container[int] = (),
        tail: PromptTail = NO_TAIL,
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._special_ids = special_ids
        self._prompt_tail = tail
        self.lookback = lookback_tokens(stops)
        """Number of tokens to decode, ending with the first new one; special tokens are not counted."""
        self.needs_whole_text = any(_REPLACEMENT in stop for stop in stops)
        """All tokens are decoded: a tail that begins inside a character decodes to a replacement character that the
        whole text may not contain."""

    def first_completion(
        self, token_ids: Sequence[int], num_checked: int, num_exempt: int = 0, is_whole: bool = True
    ) -> int | None:
        """The smallest n > num_checked such that the text of token_ids[:n] contains a stop string; None if none does.

        token_ids: the sequence's generated tokens. num_checked: number of first tokens known to complete none.
        num_exempt: stop strings within the text of the first `num_exempt` tokens are ignored. is_whole: False if the
        sequence has generated tokens before these.
        """
        num_checked = max(num_checked, num_exempt)
        if not self._stops or num_checked >= len(token_ids):
            return None
        if not self._completes(token_ids, num_checked + 1, len(token_ids), num_exempt, is_whole):
            return None
        ends = range(num_checked + 1, len(token_ids))
        return next((end for end in ends if self._completes(token_ids, end, end, num_exempt, is_whole)), len(token_ids))

    def _completes(self, token_ids: Sequence[int], first_end: int, end: int, num_exempt: int, is_whole: bool) -> bool:
        """Whether any of the tokens first_end - 1, …, end - 1 completes a stop string."""
        start = self._lookback_start(token_ids, first_end)
        tail = self._prompt_tail if is_whole and start == 0 else NO_TAIL
        text = tail.text_after(self._decode, token_ids[start:end])
        exempt = len(tail.text_after(self._decode, token_ids[start:num_exempt])) if start < num_exempt else 0
        return any(_find_beyond(text, stop, exempt) >= 0 for stop in self._stops)

    def _lookback_start(self, token_ids: Sequence[int], end: int) -> int:
        """Index at which the last `lookback` non-special tokens before `end` begin."""
        if self.needs_whole_text:
            return 0
        start, missing = end, self.lookback
        while start > 0 and missing > 0:
            start -= 1
            missing -= token_ids[start] not in self._special_ids
        return start


class StopTokens:
    """Tells which tokens can complete a stop string. Most cannot, which avoids decoding any text after them.

    token_texts: the text of each of the V token ids on its own.
    """

    def __init__(self, token_texts: Sequence[str]) -> None:
        # Every character of every token, sorted by code point, so that the tokens with a character are one slice.
        characters = np.frombuffer("".join(token_texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        owners = np.repeat(np.arange(len(token_texts), dtype=np.int32), [len(text) for text in token_texts])
        order = characters.argsort(kind="stable")
        self._characters, self._owners = characters[order], owners[order]
        self._row_of: dict[tuple[frozenset[str], frozenset[int]], int] = {}
        # Room for all rows: the system provides memory only for those in use, and no row is ever copied.
        self._rows = np.empty((_MAX_ROWS + 1, len(token_texts)), np.bool_)
        self._rows[0] = True
        self.may_end: NDArray[np.bool_] = self._rows[:1]
        """bool [rows, V]: whether a token may complete a stop string; in row 0 every token may."""

    def row(self, stops: Sequence[str], special_ids: Iterable[int] = ()) -> int:
        """The row of `may_end` for these stop strings: tokens whose text contains the last character of one of
        them, and these special tokens, whose marks they have.

        A token with an incomplete character may contain any character, so it is included. The texts are not read
        for a new row, because the manager sends no step meanwhile.
        """
        characters = frozenset(stop[-1] for stop in stops)
        # A decoder may drop a first token's leading space, and U+FFFD may come from any token with incomplete UTF-8.
        if " " in characters or any(_REPLACEMENT in stop for stop in stops):
            return 0
        key = characters, frozenset(special_ids)
        row = self._row_of.get(key)
        if row is None:
            row = len(self.may_end)
            if row > _MAX_ROWS:
                return 0
            self._rows[row] = False
            sought = np.array([ord(character) for character in (*characters, _REPLACEMENT)], np.uint32)
            starts, ends = self._characters.searchsorted(sought), self._characters.searchsorted(sought, "right")
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self._rows[row, self._owners[start:end]] = True
            self._rows[row, [token_id for token_id in key[1] if token_id < self._rows.shape[1]]] = True
            self.may_end = self._rows[: row + 1]
            self._row_of[key] = row
        return row
