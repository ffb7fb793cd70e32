"""Grammar masks over a tokenizer file, against trying every token."""

import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.helpers.small_tokenizer import EOS_IDS, IM_START, VOCAB_SIZE, save_small_tokenizer
from tokasaurus.text.grammars import GrammarError, GrammarVocabulary, load_grammar_vocabulary, make_matcher
from tokasaurus.text.token_decoder import TokenizerError
from tokasaurus.text.tokenizer import Tokenizer

GRAMMAR = LLMatcher.grammar_from_regex("[a-zé]{3,9} [a-z]*[.!]")
BEGINNINGS = "[a-zé]{0,9}|[a-zé]{3,9} [a-z]*[.!]?".encode()
TEXTS = "[a-zé]{3,9} [a-z]*[.!]".encode()


@pytest.fixture
def directory(tmp_path):
    return save_small_tokenizer(tmp_path)


def masked_tokens(matcher: LLMatcher, vocabulary: GrammarVocabulary) -> set[int]:
    mask = np.zeros(vocabulary.num_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def may_begin(text: bytes) -> bool:
    """Whether a sentence may begin with `text`, which has whole characters or ends within an é."""
    whole = text[:-1] + "é".encode() if text.endswith(b"\xc3") else text
    return re.fullmatch(BEGINNINGS.decode(), whole.decode(errors="replace")) is not None


def test_a_mask_allows_the_tokens_whose_bytes_may_follow_and_no_special_tokens(directory):
    """The model's vocabulary is larger than the tokenizer's, and no multiple of 32."""
    vocabulary = load_grammar_vocabulary(directory, VOCAB_SIZE + 45, EOS_IDS)
    assert vocabulary.num_words == -(-(VOCAB_SIZE + 45) // 32)
    tokenizer = Tokenizer.load(directory)
    rng = np.random.default_rng(0)
    num_seen = 0
    for _ in range(12):
        matcher, text = make_matcher(vocabulary, GRAMMAR), b""
        while not matcher.is_stopped():
            expected = {token for token in range(IM_START) if may_begin(text + tokenizer.token_bytes(token))}
            assert masked_tokens(matcher, vocabulary) == expected, text
            token = int(rng.choice(sorted(expected)))
            assert matcher.consume_token(token)
            text += tokenizer.token_bytes(token)
            num_seen += 1
        assert re.fullmatch(TEXTS.decode(), text.decode())
    assert num_seen > 60


def test_a_complete_text_may_be_followed_by_all_eos_ids_of_the_model(directory):
    masks = {}
    for eos_ids in [EOS_IDS, (IM_START, *EOS_IDS)]:
        vocabulary = load_grammar_vocabulary(directory, VOCAB_SIZE, eos_ids)
        bits = np.unpackbits(vocabulary.eos_bits.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == sorted(eos_ids)
        matcher = make_matcher(vocabulary, LLMatcher.grammar_from_regex("a*"))
        masks[eos_ids] = masked_tokens(matcher, vocabulary)
    assert masks == {eos_ids: {ord("a"), *eos_ids} for eos_ids in masks}


def test_a_model_without_eos_ids_can_use_grammars(directory):
    vocabulary = load_grammar_vocabulary(directory, VOCAB_SIZE, ())
    assert ord("a") in masked_tokens(make_matcher(vocabulary, LLMatcher.grammar_from_regex("a")), vocabulary)


@pytest.mark.parametrize("damage", ["missing", "broken", "no list", "other decoder", "small model", "no such eos"])
def test_a_tokenizer_that_cannot_be_used_gives_a_one_line_error(directory, damage):
    path = directory / "tokenizer.json"
    if damage == "missing":
        path.unlink()
    elif damage == "broken":
        path.write_text("{")
    elif damage == "no list":
        path.write_text("[]")
    elif damage == "other decoder":
        path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": None, "pre_tokenizer": None}))
    with pytest.raises(TokenizerError, match="grammars cannot be used") as caught:
        load_grammar_vocabulary(
            directory,
            100 if damage == "small model" else VOCAB_SIZE,
            (VOCAB_SIZE + 100,) if damage == "no such eos" else EOS_IDS,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grammar", ["", 'begin: "a"', LLMatcher.grammar_from_regex("(a"), "{", '{"grammars": []}'])
def test_a_grammar_that_cannot_be_read_gives_a_one_line_error(directory, grammar):
    vocabulary = load_grammar_vocabulary(directory, VOCAB_SIZE, EOS_IDS)
    with pytest.raises(GrammarError) as caught:
        make_matcher(vocabulary, grammar)
    assert 0 < len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
