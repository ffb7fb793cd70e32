"""Grammars: llguidance computes which tokens may come next, from tokenizer.json, without torch or transformers.

A grammar is a string in llguidance's serialised form. A mask has one bit for each token of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tokasaurus.text.tokenizer import TokenizerError

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits for one grammar, beside llguidance's defaults. So many lexer states take up to 100 MB."""

_MOST_ERROR_CHARS = 200

_NO_TOKEN = "NoExtensionBias"
"""llguidance's whole message when the grammar requires bytes that no token contains."""


class GrammarError(ValueError):
    """A grammar cannot be parsed or exceeds the limits; the message is one line."""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """A model's tokens in the form that grammar matchers use."""

    tokenizer: LLTokenizer
    num_words: int
    """Length of a mask in 32-bit words."""
    eos_bits: NDArray[np.uint32]
    """uint32 [num_words]: mask of the tokens that are allowed where the text may end."""


def load_grammar_vocabulary(directory: Path, vocab_size: int, eos_ids: Iterable[int]) -> GrammarVocabulary:
    """Build the vocabulary from tokenizer.json. Takes 0.2 s for 50,000 tokens, during which it holds the GIL.

    vocab_size: the model's, which may exceed the tokenizer's. eos_ids: if empty, llguidance chooses the end token from
    tokenizer.json. Raises TokenizerError.
    """
    path = directory / "tokenizer.json"
    num_words = -(-vocab_size // 32)
    eos_bits = np.zeros(num_words, np.uint32)
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)
        for token_id in tokenizer.eos_tokens:
            eos_bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    except Exception as error:  # a broken file may raise any exception type
        raise TokenizerError(f"grammars cannot be used with {path}: {error}") from None
    return GrammarVocabulary(tokenizer, num_words, eos_bits)


def make_matcher(vocabulary: GrammarVocabulary, grammar: str) -> LLMatcher:
    """A grammar matcher at the start of a text. May take a second, without holding the GIL. Raises GrammarError."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(one_line(matcher.get_error()))
    return matcher


def one_line(error: str) -> str:
    """llguidance's error message on one line, truncated: it may quote much of the grammar."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if line == _NO_TOKEN:
        return "no token can follow: none has the characters that the grammar requires next"
    return line if len(line) <= _MOST_ERROR_CHARS else line[:_MOST_ERROR_CHARS] + "…"
