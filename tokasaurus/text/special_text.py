"""Encodes a rendered prompt, in which only the chat template's own characters can be a special token.

Usually every special token's text in a prompt is the template's, and the prompt is encoded as it is. Otherwise it is
encoded by a copy of the tokenizer in which the special tokens have secret names: the template's tokens are given these
names. So the text is split exactly as if the special tokens had other names, with every setting of the tokenizer and
its tokens (spaces before the first word, lstrip, rstrip, normalized, …).
"""

import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping

import orjson
from tokenizers import Tokenizer as BaseTokenizer

from tokasaurus.text.template_text import TemplateText, is_written, plain, written_spans

_NUM_NAME_DIGITS = 24
# A search holds the GIL, which blocks the event loop: about a millisecond for this many characters.
_SLICE_CHARS = 1 << 16


class SpecialText:
    """The special tokens of one tokenizer. Thread-safe. A client can still write special tokens of one character: they
    get no secret name.

    With encode_special_tokens set, the tokenizer never makes a special token of a text."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        self._tokens = {
            token.content: token
            for token in base.get_added_tokens_decoder().values()
            if token.special and len(token.content) > 1 and not base.encode_special_tokens
        }
        self._longest = max(map(len, self._tokens), default=0)
        self._texts = re.compile(any_of(self._tokens))
        # Other texts may become the text of such a token.
        self._is_normalizing = base.normalizer is not None and any(token.normalized for token in self._tokens.values())
        self._renamed: _RenamedTokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: TemplateText) -> list[int]:
        """Token ids of a rendered prompt. Adds no bos or other token around the text."""
        whole = plain(text)
        if not self._is_normalizing and all(
            is_written(text, *match.span()) for match in self._matches(whole, 0, len(whole))
        ):
            # The library's `encode` of a single text holds the GIL, which would block the server's event loop.
            (encoded,) = self._base.encode_batch_fast([whole], add_special_tokens=False)
            return list(encoded.ids)
        with self._lock:
            if self._renamed is None:
                self._renamed = _RenamedTokenizer(self._base, self._tokens)
        names = self._renamed.names
        parts: list[str] = []
        end = 0
        for span in written_spans(text):
            for match in self._matches(whole, *span):
                if self._is_token(match):
                    parts += [whole[end : match.start()], names[match.group()]]
                    end = match.end()
        return self._renamed.encode("".join([*parts, whole[end:]]))

    def _is_token(self, match: re.Match[str]) -> bool:
        """Whether the tokenizer makes this text of a special token a token: some must not be part of a word."""
        around = match.string[max(0, match.start() - 1) : match.start()] + match.string[match.end() : match.end() + 1]
        return not self._tokens[match.group()].single_word or re.search(r"\w", around) is None

    def _matches(self, text: str, start: int, end: int) -> Iterator[re.Match[str]]:
        """All special tokens between two positions, one after the other; a search holds the GIL for at most
        _SLICE_CHARS."""
        while start < end and self._tokens:
            # The slice ends beyond the last start in it, so that a longer token is not cut into a shorter one.
            match = self._texts.search(text, start, min(end, start + _SLICE_CHARS + self._longest))
            if match is None or match.start() >= start + _SLICE_CHARS:
                start += _SLICE_CHARS
            else:
                yield match
                start = match.end()


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
    return "".join(secrets.choice("0123456789") for _ in range(_NUM_NAME_DIGITS))


def any_of(texts: Iterable[str]) -> str:
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
    branches = [re.escape(first) + any_of(rests) for first, rests in by_first.items()]
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
