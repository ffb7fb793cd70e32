"""Distinguishes special tokens written by a chat template from the same text in a client's message.

Before the template is rendered, a mark (random digits) is inserted into every occurrence of a special token's text in
the client's strings. Every intact special token in the rendered prompt then comes from the template.

The prompt is encoded by a copy of the tokenizer in which the special tokens have secret names: the template's tokens
are given these names, and the marks are removed. So the text is split exactly as if the special tokens had other names,
with every setting of the tokenizer and its tokens (spaces before the first word, lstrip, rstrip, normalized, …).
"""

import itertools
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from tokenizers import Tokenizer as BaseTokenizer

# Digits survive everything that templates do to text: changes of case, JSON encoding, trimming.
_NUM_MARK_DIGITS = 24
# A search holds the GIL, which blocks the event loop: about a millisecond for this many characters.
_SLICE_CHARS = 1 << 16


class SpecialText:
    """Marks and encodes for one tokenizer. Thread-safe. Special tokens of one character are not distinguished.

    With encode_special_tokens set, the tokenizer never makes a special token of a text, so nothing is marked."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        added = base.get_added_tokens_decoder()
        self._tokens = {
            token.content: token
            for token in added.values()
            if token.special and len(token.content) > 1 and not base.encode_special_tokens
        }
        self._longest = max(map(len, self._tokens), default=0)
        pattern = _any_of(self._tokens)
        self._texts = re.compile(pattern)
        self._starts = re.compile(f"(?={pattern})")  # finds occurrences that overlap
        self._renamed: _RenamedTokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, *values: Any) -> tuple[list[Any], str]:
        """Copies of JSON values with marks inserted into their strings (keys included), and the mark.

        If no string contains the text of a special token: the values themselves, and "" as the mark.
        """
        if not self._tokens or not any(map(self._is_in, values)):
            return list(values), ""
        mark = _random_digits()
        return [self._marked(value, mark) for value in values], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt that contains marks. Adds no bos or other token around the text."""
        with self._lock:
            if self._renamed is None:
                self._renamed = _RenamedTokenizer(self._base, self._tokens)
        names = self._renamed.names
        parts: list[str] = []
        end = 0
        for match in self._matches(self._texts, text):
            if self._is_token(match):
                parts += [text[end : match.start()].replace(mark, ""), names[match.group()]]
                end = match.end()
        return self._renamed.encode("".join([*parts, text[end:].replace(mark, "")]))

    def _is_token(self, match: re.Match[str]) -> bool:
        """Whether the tokenizer makes this text of a special token a token: some must not be part of a word."""
        around = match.string[max(0, match.start() - 1) : match.start()] + match.string[match.end() : match.end() + 1]
        return not self._tokens[match.group()].single_word or re.search(r"\w", around) is None

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


class _RenamedTokenizer:
    """A copy of a tokenizer that knows its special tokens under secret names only."""

    def __init__(self, base: BaseTokenizer, texts: Iterable[str]) -> None:
        """texts: of the special tokens, each longer than one character."""
        digits = _random_digits()
        self.names = {text: f"{text[0]}{digits}{index}{text[-1]}" for index, text in enumerate(texts)}
        """Text of a special token → its name. It begins and ends alike, for normalizers that combine characters."""
        state = orjson.loads(base.to_str())
        ids = {token["content"]: token["id"] for token in state["added_tokens"]}
        vocabulary = state["model"]["vocab"]
        if isinstance(vocabulary, list):  # of [text, score]; with the texts in it, it would find the special tokens
            for entry in vocabulary:
                entry[0] = self.names.get(entry[0], entry[0])
        for token in state["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
            if isinstance(vocabulary, dict):  # so that the copy gives it the same id
                vocabulary[token["content"]] = token["id"]
        self._tokenizer = BaseTokenizer.from_str(orjson.dumps(state).decode())
        own_ids = {text: self._tokenizer.token_to_id(self.names.get(text, text)) for text in ids}
        # Nothing can be added to Unigram's list: a token that is not in it gets another id from the copy.
        self._ids = {own_ids[text]: token_id for text, token_id in ids.items()}

    def encode(self, text: str) -> list[int]:
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [self._ids.get(token_id, token_id) for token_id in encoded.ids]


def _random_digits() -> str:
    return "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))


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
