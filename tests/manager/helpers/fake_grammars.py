"""Grammars over the fake worker's tokens. Each comes with two Python regular expressions: for prefixes of its texts and
for whole texts.

If the next bytes are certain and several token sequences spell them, llguidance allows only the tokenizer's own; these
grammars never get there.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.text.grammars import GrammarVocabulary

EOS_ID = 0
TOKEN_BYTES = [b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xc3\xa9a", b"c", b"bc", b"d", b"f", b"g"]
VOCAB_SIZE = len(TOKEN_BYTES)


@dataclass(frozen=True)
class Language:
    """A grammar and its language. If a pattern has groups, the second may not be longer than the first, and in a whole
    text both have the same length."""

    grammar: str
    beginnings: bytes
    """Pattern of all prefixes of texts."""
    texts: bytes
    """Pattern of whole texts."""

    def may_begin(self, text: bytes) -> bool:
        found = re.fullmatch(self.beginnings, text)
        return found is not None and (not found.lastindex or len(found[1]) >= len(found[2]))

    def is_text(self, text: bytes) -> bool:
        found = re.fullmatch(self.texts, text)
        return found is not None and (not found.lastindex or len(found[1]) == len(found[2]))


def _choice(*texts: str) -> Language:
    grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts))
    beginnings = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    return Language(grammar, "|".join(beginnings).encode(), "|".join(texts).encode())


_regex = LLMatcher.grammar_from_regex
LANGUAGES = [
    Language(_regex("[abcdfg]*"), b"[abcdfg]*", b"[abcdfg]*"),
    Language(_regex("(a|bc)*d"), b"(?:a|bc)*[bd]?", b"(?:a|bc)*d"),
    Language(_regex("(é|a)+g"), b"(?:\xc3\xa9|a)*\xc3?|(?:\xc3\xa9|a)+g", b"(?:\xc3\xa9|a)+g"),
    Language(_regex("ab?(c|d){2,9}"), b"a?|ab?[cd]{0,9}", b"ab?[cd]{2,9}"),
    Language(_regex(""), b"", b""),
    _choice("ab", "abc", "d", "bcdc"),
    _choice("dcfg"),
    Language(LLMatcher.grammar_from_lark('start: "f" start "g" | "a"'), b"f*|(f*)a(g*)", b"(f*)a(g*)"),
]
BY_GRAMMAR = {language.grammar: language for language in LANGUAGES}
INVALID_GRAMMAR = LLMatcher.grammar_from_regex("(a")
"""Not a valid grammar; a server would have rejected it."""


def fake_vocabulary() -> GrammarVocabulary:
    class Tokens:
        eos_token_id, bos_token_id, special_token_ids = EOS_ID, None, (EOS_ID,)
        tokens = (b"<eos>", *TOKEN_BYTES[1:])

        def __call__(self, text: str) -> list[int]:
            """llguidance calls this if the next bytes are certain. Greedy: the longest token first."""
            return self.tokenize(text.encode())

        def tokenize(self, text: bytes) -> list[int]:
            longest = max((token for token in TOKEN_BYTES if token and text.startswith(token)), key=len)
            remaining = text[len(longest) :]
            return [TOKEN_BYTES.index(longest), *(self.tokenize(remaining) if remaining else [])]

    eos_bits = np.array([1 << EOS_ID], np.uint32)
    return GrammarVocabulary(LLTokenizer(TokenizerWrapper(Tokens())), 1, eos_bits, {}, frozenset({EOS_ID}))


def allowed_tokens(grammar: str, token_ids: list[int], avoids_eos: bool) -> set[int]:
    """Tokens that may follow `token_ids`, none of which is eos."""
    language = BY_GRAMMAR[grammar]
    text = b"".join(TOKEN_BYTES[token_id] for token_id in token_ids)
    allowed = {token for token in range(1, VOCAB_SIZE) if language.may_begin(text + TOKEN_BYTES[token])}
    if language.is_text(text) and not (avoids_eos and allowed):
        allowed.add(EOS_ID)
    return allowed


def read_masks(message: ForwardInput) -> dict[int, set[int]]:
    """The allowed tokens, by index among the rows that sample."""
    if message.masks is None:
        return {}
    rows, bits = message.masks.rows, message.masks.bits
    assert rows.dtype == np.int32
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert bits.dtype == np.uint32
    assert bits.shape == (len(rows), 1)
    return {
        row: {token_id for token_id in range(32) if mask >> token_id & 1}
        for row, (mask,) in zip(rows.tolist(), bits.tolist(), strict=True)
    }


def assert_is_allowed(allowed: set[int] | None, request: GenerateRequest, context: list[int]) -> None:
    """The mask equals the grammar's tokens after everything generated so far."""
    assert (allowed is not None) == (request.grammar != "" and request.max_new_tokens > 0)
    if allowed is not None:
        generated = context[len(request.prompt_ids) :]
        assert allowed == allowed_tokens(request.grammar, generated, request.ignore_eos)
