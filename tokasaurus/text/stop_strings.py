"""Stop strings: pure functions over text, and the manager's check over token ids.

The text is cut before the stop string that is complete first, as if it were generated one character at a time: how
the text happens to be cut into tokens changes nothing.
"""

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_REPLACEMENT = "\ufffd"  # what incomplete UTF-8 decodes to

_MOST_ROWS = 256
"""Sets of last characters that StopTokens keeps a table for; clients make up new ones at will."""


def find_first_stop(text: str, stops: Iterable[str], num_exempt: int = 0) -> tuple[int, str] | None:
    """Start and stop string of the occurrence that ends first; of those ending there, the longest. None without any.

    No stop string may be empty. `text[:start]` holds no stop string, other than those that end within the first
    `num_exempt` characters: they do not count.
    """
    found = [(_find_beyond(text, stop, num_exempt), stop) for stop in stops]
    ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    if not ends:
        return None
    _, start, stop = min(ends)
    return start, stop


def _find_beyond(text: str, stop: str, num_exempt: int) -> int:
    """Where `stop` first occurs so that it ends behind the first `num_exempt` characters; -1 where it does not."""
    return text.find(stop, max(0, num_exempt + 1 - len(stop)))


def held_back_length(text: str, stops: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the start of a stop string, so may not be streamed yet.

    `text` holds no whole stop string.
    """
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def lookback_tokens(stops: Iterable[str], minimum: int = 0) -> int:
    """How many tokens at the end must be decoded to see every stop string that the last of them completes.

    Each token holds at least one byte, so a stop string of b bytes touches at most b tokens. One more is decoded, since
    decoding may drop the first token's leading space.
    """
    longest = max((len(stop.encode()) for stop in stops), default=0)
    return max(minimum, longest + 1 if longest else 0)


class StopMatcher:
    """Finds the token at which a sequence's text completes a stop string, decoding only its last tokens.

    decode: token ids to text, special tokens left out. special_ids: those tokens, which do not interrupt a match.
    minimum_lookback: decode at least as many tokens, beyond what `stops` require.

    lookback: so many tokens before the first new one are read, special ones not counted; needs_whole_text: all are.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        special_ids: Container[int] = (),
        minimum_lookback: int = 0,
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._special_ids = special_ids
        self.lookback = lookback_tokens(stops, minimum_lookback)
        # A tail that begins inside a character shows a replacement character that the whole text may not have.
        self.needs_whole_text = any(_REPLACEMENT in stop for stop in stops)

    def first_completion(self, token_ids: Sequence[int], num_checked: int, num_exempt: int = 0) -> int | None:
        """The smallest n > num_checked such that the text of token_ids[:n] holds a stop string; None without one.

        token_ids: the sequence's generated tokens. num_checked: how many are known not to complete a stop string.
        num_exempt: a stop string within the text of the first so many does not count.
        """
        num_checked = max(num_checked, num_exempt)
        if not self._stops or num_checked >= len(token_ids):
            return None
        if not self._completes(token_ids, num_checked + 1, len(token_ids), num_exempt):
            return None
        ends = range(num_checked + 1, len(token_ids))
        return next((end for end in ends if self._completes(token_ids, end, end, num_exempt)), len(token_ids))

    def _completes(self, token_ids: Sequence[int], first_end: int, end: int, num_exempt: int) -> bool:
        """Whether one of the tokens first_end - 1, …, end - 1 completes a stop string."""
        start = self._tail_start(token_ids, first_end)
        text = self._decode(token_ids[start:end])
        exempt = len(self._decode(token_ids[start:num_exempt])) if start < num_exempt else 0
        return any(_find_beyond(text, stop, exempt) >= 0 for stop in self._stops)

    def _tail_start(self, token_ids: Sequence[int], end: int) -> int:
        """Where the last `lookback` tokens before `end` begin that are not special."""
        if self.needs_whole_text:
            return 0
        start, missing = end, self.lookback
        while start > 0 and missing > 0:
            start -= 1
            missing -= token_ids[start] not in self._special_ids
        return start


class StopTokens:
    """Which tokens can be the last of a stop string: most cannot, and then no text has to be decoded to know it.

    token_texts: the text of each token id by itself, V of them.
    """

    def __init__(self, token_texts: Sequence[str]) -> None:
        self._token_texts = token_texts
        self._row_of_characters: dict[frozenset[str], int] = {}
        self.may_end: NDArray[np.bool_] = np.ones((1, len(token_texts)), np.bool_)
        """[rows, V]; in row 0 every token may end a stop string."""

    def row(self, stops: Sequence[str]) -> int:
        """The row of `may_end` for these stop strings: the tokens whose text holds the last character of one of them.

        A token that holds part of a character counts as holding any.
        """
        characters = frozenset(stop[-1] for stop in stops)
        # A decoder may leave out the space before a first token; and what is no character may be part of any.
        if " " in characters or any(_REPLACEMENT in stop for stop in stops):
            return 0
        row = self._row_of_characters.get(characters)
        if row is None:
            row = len(self.may_end)
            if row > _MOST_ROWS:
                return 0
            sought = [*characters, _REPLACEMENT]
            holds = [any(character in text for character in sought) for text in self._token_texts]
            self.may_end = np.concatenate((self.may_end, np.array([holds], np.bool_)))
            self._row_of_characters[characters] = row
        return row
