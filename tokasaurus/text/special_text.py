"""Distinguishes special tokens written by a chat template from the same text in a client's message.

Before the template is rendered, a mark (random digits) is inserted into every occurrence of a special token's text in
the client's strings. Every intact special token in the rendered prompt then comes from the template; the marks are
removed from the text between these tokens.
"""

import re
import secrets
import threading
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

# Digits survive everything that templates do to text: changes of case, JSON encoding, trimming.
_NUM_MARK_DIGITS = 24


class SpecialText:
    """Marks and encodes for one tokenizer. Thread-safe. Special tokens of one character are not distinguished."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        added = base.get_added_tokens_decoder()
        special = [(token, token_id) for token_id, token in added.items() if token.special and len(token.content) > 1]
        # Longest first, since the tokenizer takes the longest match.
        special.sort(key=lambda pair: len(pair[0].content), reverse=True)
        self._ids = {token.content: token_id for token, token_id in special}
        contents = [re.escape(token.content) for token, _ in special]
        self._starts = re.compile(f"(?={'|'.join(contents)})(.)", re.DOTALL) if special else None
        # No capturing groups: with a group for each of Llama 3's 256 tokens, searching 30 kB takes over a second.
        self._texts = re.compile("|".join(contents))
        self._tokens = re.compile("|".join(_with_spaces(token) for token, _ in special))
        self._ids_by_pattern = [(re.compile(_with_spaces(token)), token_id) for token, token_id in special]
        self._plain_tokenizer: BaseTokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, *values: Any) -> tuple[list[Any], str]:
        """Copies of JSON values with marks inserted into their strings (keys included), and the mark.

        If no string contains the text of a special token: the values themselves, and "" as the mark.
        """
        if self._starts is None or not any(map(self._is_in, values)):
            return list(values), ""
        mark = "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))
        return [self._marked(value, rf"\g<1>{mark}") for value in values], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt that contains marks. Adds no bos or other token around the text."""
        plain_texts: list[str] = []
        special_ids: list[int] = []
        end = 0
        for match in self._tokens.finditer(text):
            plain_texts.append(text[end : match.start()].replace(mark, ""))
            special_ids.append(self._find_id(match.group()))
            end = match.end()
        plain_texts.append(text[end:].replace(mark, ""))
        encoded = self._plain().encode_batch_fast(plain_texts, add_special_tokens=False)
        ids = list(encoded[0].ids)
        for special_id, plain_encoding in zip(special_ids, encoded[1:], strict=True):
            ids += [special_id, *plain_encoding.ids]
        return ids

    def _find_id(self, matched: str) -> int:
        """Id of the special token that `matched` is, including any adjacent white space that the token absorbs."""
        if matched in self._ids:
            return self._ids[matched]
        return next(token_id for pattern, token_id in self._ids_by_pattern if pattern.fullmatch(matched))

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._texts.search(value) is not None
        if isinstance(value, dict):
            return any(self._is_in(key) or self._is_in(item) for key, item in value.items())
        return isinstance(value, list) and any(self._is_in(item) for item in value)

    def _marked(self, value: Any, replacement: str) -> Any:
        if isinstance(value, str):
            assert self._starts is not None, "there is something to mark"
            return self._starts.sub(replacement, value)
        if isinstance(value, dict):
            return {self._marked(key, replacement): self._marked(item, replacement) for key, item in value.items()}
        return [self._marked(item, replacement) for item in value] if isinstance(value, list) else value

    def _plain(self) -> BaseTokenizer:
        """A copy of the tokenizer that encodes special tokens as ordinary text; created on first use."""
        with self._lock:
            if self._plain_tokenizer is None:
                self._plain_tokenizer = BaseTokenizer.from_str(self._base.to_str())
                self._plain_tokenizer.encode_special_tokens = True
            return self._plain_tokenizer


def _with_spaces(token: AddedToken) -> str:
    """A regular expression for the token, including adjacent white space if the token absorbs it."""
    return (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
