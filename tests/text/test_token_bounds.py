"""The lower bound on a text's number of tokens against the tokenizer."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as BaseTokenizer

from tests.helpers.examples import examples
from tokasaurus.text.token_bytes import BYTE_OF_CHARACTER, TokenBounds

WORDS = [
    "hello",
    " the",
    "日本語",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "\u03b1\u0313\u0301\u0345",
    "  ",
    "\n",
    "----",
    "<|end|>",
    "7",
]


@dataclass(frozen=True)
class Case:
    base: BaseTokenizer
    bounds: TokenBounds


def make(
    normalizer: normalizers.Normalizer | None, special: AddedToken, split: bool = True, without: bytes = b""
) -> Case:
    """without: bytes that have no token, as some have none in the demo model's vocabulary."""
    base = BaseTokenizer(models.BPE())
    if normalizer is not None:
        base.normalizer = normalizer
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    base.decoder = decoders.ByteLevel()
    alphabet = [character for character, byte in BYTE_OF_CHARACTER.items() if byte[0] not in without]
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    base.train_from_iterator(["hello the hello the", "日本語 éé ----------- 한한한한            "] * 3, trainer)
    base.add_special_tokens([special])
    return Case(base, TokenBounds(base))


@pytest.fixture(
    scope="module",
    params=[
        (None, AddedToken("<|end|>", special=True), True),
        (None, AddedToken("<|end|>", special=True), False),
        (normalizers.NFC(), AddedToken("<|end|>", special=True, normalized=False), True),
        (None, AddedToken("<|end|>", special=True, rstrip=True, lstrip=True), True),
        (None, AddedToken("<|end|>", special=True), True, b"7\n<\x04\xce\xff"),
    ],
    ids=["plain", "tokens over words", "NFC", "special tokens take spaces along", "bytes without a token"],
)
def case(request: pytest.FixtureRequest) -> Case:
    return make(*request.param)


@given(text=st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=30).map("".join) | st.text())
@examples(100)
def test_no_text_has_fewer_tokens_than_the_bound(case: Case, text: str) -> None:
    assert case.bounds.fewest_tokens(text) <= len(case.base.encode(text).ids)


@pytest.mark.parametrize(
    "word",
    ["7", "\n\u03b1", "hello", "日", "한", "\u1112\u1161\u11ab", "e\u0301", "-", " ", "<|end|>", "<|end|>" + " " * 50],
)
def test_repeated_words_have_no_fewer_tokens_than_the_bound(case: Case, word: str) -> None:
    text = word * 500
    assert case.bounds.fewest_tokens(text) <= len(case.base.encode(text).ids)


def test_the_bound_is_at_least_the_length_divided_by_the_longest_token(case: Case) -> None:
    vocabulary = case.base.get_vocab(with_added_tokens=True)
    max_letters = max(sum(c.isascii() and c.isalnum() for c in token) for token in vocabulary)
    assert case.bounds.fewest_tokens("hello the " * 300) >= 8 * 300 / max_letters
    max_bytes = max(map(len, vocabulary))
    assert case.bounds.fewest_tokens("\u0416" * 300) >= 2 * 300 / max_bytes


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ],
    ids=str,
)
def test_the_bound_is_0_for_tokenizers_that_may_drop_text(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
) -> None:
    case = make(None, AddedToken("<|end|>", special=True))
    assert case.bounds.fewest_tokens("hello " * 100) > 0
    if pre_tokenizer is None:
        case.base.normalizer = normalizers.Strip()
    else:
        case.base.pre_tokenizer = pre_tokenizer
    assert TokenBounds(case.base).fewest_tokens("hello " * 100) == 0
