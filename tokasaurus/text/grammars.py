"""Grammars, by llguidance: which tokens may come next. It reads tokenizer.json itself: no torch, no transformers.

A grammar is a text in llguidance's serialised form. Masks have a bit for each token of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tokasaurus.text.tokenizer import TokenizerError

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Of one grammar, beside llguidance's own: its states take up to 100 MB, and what it says of an error is short."""


_MOST_ERROR_CHARS = 200

_NO_TOKEN = "NoExtensionBias"
"""All that llguidance says where the grammar asks for bytes that no token has."""


class GrammarError(ValueError):
    """A grammar cannot be read, or takes more work than is allowed; the message is one line."""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """A model's tokens as grammars see them.

    num_words: of 32 bits each, of a mask. eos_bits: uint32 [num_words], the tokens that a mask allows where a text may
    end.
    """

    tokenizer: LLTokenizer
    num_words: int
    eos_bits: NDArray[np.uint32]


def load_grammar_vocabulary(directory: Path, vocab_size: int, eos_ids: Iterable[int]) -> GrammarVocabulary:
    """From tokenizer.json. vocab_size: the model's, which may exceed the tokenizer's. eos_ids: where there are none,
    the tokenizer's own choice stands for the end. Takes 0.2 s for 50,000 tokens, and keeps the GIL meanwhile.

    Raises TokenizerError.
    """
    path = directory / "tokenizer.json"
    num_words = -(-vocab_size // 32)
    eos_bits = np.zeros(num_words, np.uint32)
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)
        for token_id in tokenizer.eos_tokens:
            eos_bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    except Exception as error:  # the library raises whatever a broken file makes it raise
        raise TokenizerError(f"grammars cannot be used with {path}: {error}") from None
    return GrammarVocabulary(tokenizer, num_words, eos_bits)


def make_matcher(vocabulary: GrammarVocabulary, grammar: str) -> LLMatcher:
    """At the beginning of a text. May take a second, and other threads run meanwhile. Raises GrammarError."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(one_line(matcher.get_error()))
    return matcher


def one_line(error: str) -> str:
    """What llguidance says of an error, which may repeat much of the grammar."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if line == _NO_TOKEN:
        return "no token can follow, for none has the characters that the grammar asks for next"
    return line if len(line) <= _MOST_ERROR_CHARS else line[:_MOST_ERROR_CHARS] + "…"
