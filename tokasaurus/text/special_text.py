"""Keeps the special tokens that a chat template writes apart from text in a message that only reads like one.

What the client wrote is marked before the template is rendered: a mark inside each text of a special token. Whole texts
of special tokens in the rendered prompt are then the template's own; the marks are taken out of what lies between.
"""

import re
import secrets
import threading
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

# Digits pass through whatever a template does with text: change of case, JSON, trimming.
_NUM_MARK_DIGITS = 24


class SpecialText:
    """Of one tokenizer. Safe to use from several threads. Special tokens of one character are not told apart."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        added = base.get_added_tokens_decoder()
        special = [(token, token_id) for token_id, token in added.items() if token.special and len(token.content) > 1]
        # the longest first, since the tokenizer takes the longest that matches
        special.sort(key=lambda pair: len(pair[0].content), reverse=True)
        self._ids = {token.content: token_id for token, token_id in special}
        contents = [re.escape(token.content) for token, _ in special]
        self._starts = re.compile(f"(?={'|'.join(contents)})(.)", re.DOTALL) if special else None
        # Without groups: with one for each of Llama 3's 256 tokens, a search of 30 kB would take over a second.
        self._texts = re.compile("|".join(contents))
        self._tokens = re.compile("|".join(_with_spaces(token) for token, _ in special))
        self._ids_by_pattern = [(re.compile(_with_spaces(token)), token_id) for token, token_id in special]
        self._plain_tokenizer: BaseTokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, *values: Any) -> tuple[list[Any], str]:
        """Copies of plain JSON data with marks in their strings, keys included, and the mark; as they were and "" if
        none of them holds the text of a special token."""
        if self._starts is None or not any(map(self._is_in, values)):
            return list(values), ""
        mark = "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))
        return [self._marked(value, rf"\g<1>{mark}") for value in values], mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered prompt whose mark is not "". Tokens are only added for what stands in `text`."""
        pieces: list[str] = []
        special_ids: list[int] = []
        end = 0
        for match in self._tokens.finditer(text):
            pieces.append(text[end : match.start()].replace(mark, ""))
            special_ids.append(self._find_id(match.group()))
            end = match.end()
        pieces.append(text[end:].replace(mark, ""))
        encoded = self._plain().encode_batch_fast(pieces, add_special_tokens=False)
        ids = list(encoded[0].ids)
        for special_id, piece in zip(special_ids, encoded[1:], strict=True):
            ids += [special_id, *piece.ids]
        return ids

    def _find_id(self, matched: str) -> int:
        """Of the special token that stands there, with the spaces that it takes along."""
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
        """A copy of the tokenizer to which special tokens are text like any other; made when it is first needed."""
        with self._lock:
            if self._plain_tokenizer is None:
                self._plain_tokenizer = BaseTokenizer.from_str(self._base.to_str())
                self._plain_tokenizer.encode_special_tokens = True
            return self._plain_tokenizer


def _with_spaces(token: AddedToken) -> str:
    """A pattern for the token; some take the spaces beside them along."""
    return (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
