"""Grammars: llguidance computes which tokens may come next, from tokenizer.json, without torch or transformers.

A grammar is a string in llguidance's serialised form. A mask has one bit for each token of the model.

A token is allowed where its bytes fit. Tokens that add no text to the answer (special tokens) or end it (eos) fit
nowhere: a text that looks like such a token is spelled with other tokens.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tokasaurus.text.token_bytes import BYTE_OF_CHARACTER
from tokasaurus.text.token_decoder import SHOWN_MARKS, TokenizerError

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits for one grammar, beside llguidance's defaults. So many lexer states take up to 100 MB."""

_MAX_ERROR_CHARS = 200

_NO_TOKEN = "NoExtensionBias"
"""llguidance's whole message when the grammar requires bytes that no token contains."""


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_CHARACTER_OF_BYTE = {token_byte[0]: character for character, token_byte in BYTE_OF_CHARACTER.items()}


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
    added_tokens: Mapping[str, int]
    """Text → id of the added tokens, special tokens included."""
    hidden_ids: frozenset[int]
    """Tokens whose text is not part of the answer: special tokens and eos."""


def load_grammar_vocabulary(directory: Path, vocab_size: int, eos_ids: Iterable[int]) -> GrammarVocabulary:
    """Build the vocabulary from tokenizer.json. Takes 0.25 s for 50,000 tokens, during which it holds the GIL.

    vocab_size: the model's, which may be larger or smaller than the tokenizer's. eos_ids: if empty, a special token
    takes their place. Raises TokenizerError.
    """
    path = directory / "tokenizer.json"
    num_words = -(-vocab_size // 32)
    eos_bits = np.zeros(num_words, np.uint32)
    try:
        state = orjson.loads(path.read_bytes())
        added = [token for token in state.get("added_tokens") or () if token["id"] < vocab_size]
        special_ids = {token["id"] for token in added if token["special"] and token["content"] not in SHOWN_MARKS}
        ending_ids = sorted(eos_ids) or sorted(special_ids)[:1]
        hidden_ids = frozenset(special_ids.union(ending_ids))
        added_tokens = {token["content"]: token["id"] for token in added}
        _spell_added_tokens(state, vocab_size, added_tokens, hidden_ids)
        tokenizer = LLTokenizer(orjson.dumps(state).decode(), n_vocab=vocab_size, eos_token=ending_ids or None)
        for token_id in tokenizer.eos_tokens:
            eos_bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    except Exception as error:  # a broken file may raise any exception type
        raise TokenizerError(f"grammars cannot be used with {path}: {error}") from None
    return GrammarVocabulary(tokenizer, num_words, eos_bits, added_tokens, hidden_ids)


def _spell_added_tokens(
    state: dict[str, Any], vocab_size: int, added_tokens: Mapping[str, int], hidden_ids: Collection[int]
) -> None:
    """Change the content of tokenizer.json such that it encodes every text with tokens whose bytes are this text.

    Added tokens become tokens of the model: llguidance would take the text of an added token for this token, but then
    refuse it where the grammar asks for the text. No merge leads to them, so texts are encoded without them. Hidden
    tokens, and ids without a token, get names that no text can spell, since they contain a secret.
    """
    model = state["model"]
    entries = model["vocab"]
    old: dict[str, int] = entries if isinstance(entries, dict) else {name: id_ for id_, (name, _) in enumerate(entries)}
    # a letter of the byte-level alphabet that is itself a token stands for its byte, although it is an added token too
    letters = {id_ for text, id_ in added_tokens.items() if len(text) == 1 and old.get(text) == id_}
    renamed = (set(added_tokens.values()) - letters).union(hidden_ids)
    vocab = {name: id_ for name, id_ in old.items() if id_ < vocab_size and id_ not in renamed}
    for text, id_ in added_tokens.items():
        if id_ in renamed and id_ not in hidden_ids and (spelling := _spelling(state, text)) is not None:
            vocab.setdefault(spelling, id_)
    num_ids = max([*old.values(), *added_tokens.values()], default=-1) + 1
    secret = f"\U0010ffff{secrets.token_hex(16)}"
    nameless = set(range(min(num_ids, vocab_size))).difference(vocab.values())
    hidden = {f"{secret}{id_}": id_ for id_ in nameless}
    vocab |= hidden
    if "merges" in model and (lost := old.keys() - vocab.keys()):
        model["merges"] = [merge for merge in model["merges"] if lost.isdisjoint(_tokens_of(merge))]
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in vocab:
        model["unk_token"] = f"{secret}{old[unknown]}" if old.get(unknown) in nameless else None
    if isinstance(entries, list):
        lowest = min((score for _, score in entries), default=0.0)
        scores = dict(entries)
        model["vocab"] = [[name, scores.get(name, lowest)] for name in sorted(vocab, key=vocab.__getitem__)]
    else:
        model["vocab"] = vocab
    # llguidance allows special tokens only where a grammar names them
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    state["added_tokens"] = [{"id": id_, "content": name, **flags} for name, id_ in hidden.items()]
    state["post_processor"] = None


def _spelling(state: dict[str, Any], text: str) -> str | None:
    """How a token of the model with the bytes of `text` is written in tokenizer.json; None if that is impossible."""
    decoders = state["decoder"].get("decoders", [state["decoder"]])
    if any(decoder["type"] == "ByteLevel" for decoder in decoders):
        return "".join(_CHARACTER_OF_BYTE[byte] for byte in text.encode())
    return text if not text.startswith("<0x") or _BYTE_TOKEN.fullmatch(text) else None


def _tokens_of(merge: str | list[str]) -> tuple[str, str, str]:
    """The two tokens that a merge joins, and the joined token."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second


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
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "…"
