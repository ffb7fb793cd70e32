"""Distinguishes special tokens written by a chat template from the same text in a client's message.

Before the template is rendered, a mark (random digits) is inserted into every occurrence of a special token's text in
the client's strings. Every intact special token in the rendered prompt then comes from the template; the marks are
removed from the text between these tokens.
"""

import itertools
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as BaseTokenizer

# Digits survive everything that templates do to text: changes of case, JSON encoding, trimming.
_NUM_MARK_DIGITS = 24
# A search holds the GIL, which blocks the event loop: about a millisecond for this many characters.
_SLICE_CHARS = 1 << 16


class SpecialText:
    """Marks and encodes for one tokenizer. Thread-safe. Special tokens of one character are not distinguished."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        added = base.get_added_tokens_decoder()
        self._tokens = {
            token.content: (token, token_id)
            for token_id, token in added.items()
            if token.special and len(token.content) > 1
        }
        self._longest = max(map(len, self._tokens), default=0)
        pattern = _any_of(self._tokens)
        self._texts = re.compile(pattern)
        self._starts = re.compile(f"(?={pattern})")  # finds occurrences that overlap
        self._plain_tokenizer: BaseTokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, *values: Any) -> tuple[list[Any], str]:
        """Copies of JSON values with marks inserted into their strings (keys included), and the mark.

        If no string contains the text of a special token: the values themselves, and "" as the mark.
        """
        if not self._tokens or not any(map(self._is_in, values)):
            return list(values), ""
        mark = "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))
        return [self._marked(value, mark) for value in values], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt that contains marks. Adds no bos or other token around the text."""
        plain_texts: list[str] = []
        special_ids: list[int] = []
        end = 0
        for match in self._matches(self._texts, text):
            token, special_id = self._tokens[match.group()]
            start = match.start()
            if token.lstrip:  # the token absorbs adjacent white space
                while start > end and text[start - 1].isspace():
                    start -= 1
            plain_texts.append(text[end:start].replace(mark, ""))
            special_ids.append(special_id)
            end = match.end()
            if token.rstrip:
                while end < len(text) and text[end].isspace():
                    end += 1
        plain_texts.append(text[end:].replace(mark, ""))
        encoded = self._plain().encode_batch_fast(plain_texts, add_special_tokens=False)
        ids = list(encoded[0].ids)
        for special_id, plain_encoding in zip(special_ids, encoded[1:], strict=True):
            ids += [special_id, *plain_encoding.ids]
        return ids

    def _matches(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """All matches, in order, one after the other; a search holds the GIL for at most _SLICE_CHARS."""
        position = 0
        while position < len(text):
            # The slice ends beyond the last start in it, so that a longer token is not cut into a shorter one.
            match = pattern.search(text, position, position + _SLICE_CHARS + self._longest)
            if match is None or match.start() >= position + _SLICE_CHARS:
                position += _SLICE_CHARS
            else:
                yield match
                position = max(match.end(), match.start() + 1)

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return next(self._matches(self._texts, value), None) is not None
        if isinstance(value, dict):
            return any(self._is_in(key) or self._is_in(item) for key, item in value.items())
        return isinstance(value, list) and any(self._is_in(item) for item in value)

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            # The mark follows the first character of each occurrence.
            cuts = [match.start() + 1 for match in self._matches(self._starts, value)]
            return mark.join([value[start:end] for start, end in itertools.pairwise([0, *cuts, len(value)])])
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return [self._marked(item, mark) for item in value] if isinstance(value, list) else value

    def _plain(self) -> BaseTokenizer:
        """A copy of the tokenizer that encodes special tokens as ordinary text; created on first use."""
        with self._lock:
            if self._plain_tokenizer is None:
                self._plain_tokenizer = BaseTokenizer.from_str(self._base.to_str())
                self._plain_tokenizer.encode_special_tokens = True
            return self._plain_tokenizer


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of these texts that begins at a position.

    Common beginnings are written once: with 256 alternatives of 30 equal characters, a search would compare them all.
    """
    by_first: dict[str, list[str]] = {}
    ends_here = False
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
        else:
            ends_here = True
    if not by_first:
        return ""
    branches = [re.escape(first) + _any_of(rests) for first, rests in by_first.items()]
    if len(branches) == 1 and not ends_here:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends_here else ''}"


def strings_in(value: object) -> Iterator[str]:
    """Every string in JSON values except keys; raises nothing for deep nesting."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
