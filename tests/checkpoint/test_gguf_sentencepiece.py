"""SentencePiece's tokenizers built from GGUF metadata, against a slow encoder that merges by scores."""

import itertools
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.gguf.tokenizer import build_tokenizer

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<bos>", "<eos>"]
USER_DEFINED = ["\n\n", "\n", "   ", "  "]
# The later, the less likely to be merged.
PIECES = [
    *("th", "he", "in", f"{SPACE}t", "er", f"{SPACE}the", "the", "an", "ing", "aa", f"{SPACE}an", "aaa", "ab", "ba"),
    *("there", f"{SPACE}in", "日本", "aba", f"{SPACE}a", "nd", "and", f"{SPACE}and", "ther"),
    *sorted({*"therinagdb日本.", SPACE}),
]
TEXTS = st.lists(
    st.sampled_from([*"therinagdb日本. xé😀\n", "the ", " and", "there", "aaaa", "abab", "  ", "   ", "\n\n"]),
    max_size=25,
).map("".join)


def metadata_of(adds_space: bool) -> dict[str, Any]:
    tokens = [*SPECIAL, *USER_DEFINED, *BYTES, *PIECES]
    types = [
        *(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL),
        *[TokenType.USER_DEFINED] * len(USER_DEFINED),
        *[TokenType.BYTE] * len(BYTES),
        *[TokenType.NORMAL] * len(PIECES),
    ]
    num_others = len(tokens) - len(PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(each) for each in types],
        "tokenizer.ggml.scores": [-1000.0] * num_others + [-float(index) for index in range(len(PIECES))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }


def slow_ids(text: str, adds_space: bool) -> list[int]:
    """Takes the user-defined tokens first, the longest of several; merges what is between them."""
    ids = {token: index for index, token in enumerate(metadata_of(adds_space)["tokenizer.ggml.tokens"])}
    found, between = [1], ""
    while text:
        token = next((each for each in USER_DEFINED if text.startswith(each)), None)
        if token is None:
            between, text = between + text[0], text[1:]
            continue
        found += [*slow_merges(between, adds_space, ids), ids[token]]
        between, text = "", text[len(token) :]
    return found + slow_merges(between, adds_space, ids)


def slow_merges(text: str, adds_space: bool, ids: dict[str, int]) -> list[int]:
    parts = list((" " + text if adds_space and text else text).replace(" ", SPACE))
    while True:
        pairs = enumerate(first + second for first, second in itertools.pairwise(parts))
        known = [(PIECES.index(pair), position) for position, pair in pairs if pair in PIECES]
        if not known:
            break
        _, position = min(known)
        parts[position : position + 2] = [parts[position] + parts[position + 1]]
    return [
        token_id
        for part in parts
        for token_id in ([ids[part]] if part in PIECES else [ids[BYTES[byte]] for byte in part.encode()])
    ]


TOKENIZERS = {adds_space: build_tokenizer(metadata_of(adds_space)) for adds_space in (True, False)}


@given(TEXTS, st.booleans())
def test_ids_are_those_of_merging_by_scores_and_decode_to_the_text(text: str, adds_space: bool) -> None:
    tokenizer = TOKENIZERS[adds_space]
    ids = tokenizer.encode(text).ids
    assert ids == slow_ids(text, adds_space)
    if not adds_space or not any(each in text for each in USER_DEFINED):
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_found_in_the_text_and_left_out_of_it() -> None:
    tokenizer = TOKENIZERS[False]
    ids = tokenizer.encode("the<eos>and", add_special_tokens=False).ids
    assert ids == [*slow_ids("the", False)[1:], 2, *slow_ids("and", False)[1:]]
    assert tokenizer.decode(ids) == "theand"


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.scores": None},
        {"tokenizer.ggml.scores": [0.0]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.tokens": ["a"] * (len(SPECIAL) + len(USER_DEFINED) + len(BYTES) + len(PIECES))},
    ],
)
def test_tokens_without_scores_or_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not each a score and a type, or a token occurs twice"):
        build_tokenizer({**metadata_of(False), **change})
