"""Grammar masks over a tokenizer file, against trying every token."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as BaseTokenizer

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


# Text → whether it is a special token.
ADDED = {
    "<think>": False,
    "</think>": False,
    "<tool_call>": True,
    "</tool_call>": True,
    "<x>": False,
    "plain": False,
    "two words": False,
    "<0xZZ>": False,
    "café": False,
    "日本": False,
    "|end|": False,
    "<|special|>": True,
    "[INST]": True,
    "spécial": True,
}
EOS_TEXT = "|end|"
"""An eos token that the tokenizer does not know to be special."""


def save_byte_level_with_added_tokens(directory: Path) -> None:
    path = save_small_tokenizer(directory) / "tokenizer.json"
    base = BaseTokenizer.from_file(str(path))
    for text, is_special in ADDED.items():
        base.add_tokens([AddedToken(text, special=is_special)])
    base.save(str(path))


def save_byte_fallback_with_added_tokens(directory: Path) -> None:
    """As in Llama 2: some of the added tokens are in the model's vocabulary as well, one is the result of merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abehlnopst<>/x|", "[INST]"]
    tokens += ["th", "<x", "<x>", "pl", "▁a", "ab"]
    merges = [("t", "h"), ("<", "x"), ("<x", ">"), ("p", "l"), ("▁", "a"), ("a", "b")]
    base = BaseTokenizer(models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges, byte_fallback=True))
    base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    base.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for text, is_special in {"<unk>": True, "<s>": True, "</s>": True, **ADDED}.items():
        base.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    base.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module", params=[save_byte_level_with_added_tokens, save_byte_fallback_with_added_tokens])
def with_added_tokens(request, tmp_path_factory) -> tuple[GrammarVocabulary, Tokenizer]:
    directory = tmp_path_factory.mktemp("added tokens")
    request.param(directory)
    tokenizer = Tokenizer.load(directory)
    eos_id = BaseTokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(EOS_TEXT)
    return load_grammar_vocabulary(directory, tokenizer.vocab_size + 9, [eos_id]), tokenizer


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


@pytest.mark.parametrize("damage", ["missing", "broken", "no list", "other decoder", "no such eos"])
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
            VOCAB_SIZE,
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


def random_text(matcher: LLMatcher, vocabulary: GrammarVocabulary, seed: int) -> list[int]:
    """The ids of a random text that the grammar allows, without eos."""
    rng, token_ids = random.Random(seed), []
    while not matcher.is_stopped():
        token_id = rng.choice(sorted(masked_tokens(matcher, vocabulary)))
        assert matcher.consume_token(token_id), matcher.get_error()
        if token_id not in vocabulary.tokenizer.eos_tokens:
            token_ids.append(token_id)
    assert not matcher.is_error(), matcher.get_error()
    return token_ids


@pytest.mark.parametrize("form", ["{}", "a{}b", "a?{}b?", "({}|ab)({}){{2}}", "[ab]{{2}}({}.?)+x"])
@pytest.mark.parametrize("text", [*ADDED, "<|im_end|>", "<|im_start|>", "<s>", "</s>", "<unk>"])
def test_text_that_spells_an_added_token_is_in_the_answer_as_it_stands(with_added_tokens, text, form):
    vocabulary, tokenizer = with_added_tokens
    pattern = form.format(*[re.escape(text)] * 2)
    for seed in range(6):
        matcher = make_matcher(vocabulary, LLMatcher.grammar_from_regex(pattern))
        token_ids = random_text(matcher, vocabulary, seed)
        # What the server shows: without special tokens, and cut where the engine ends the sequence.
        assert not vocabulary.hidden_ids.intersection(token_ids)
        shown = b"".join(tokenizer.token_bytes(id_) for id_ in token_ids if id_ not in tokenizer.special_ids).decode()
        assert re.fullmatch(pattern, shown), (shown, token_ids)


def test_free_text_may_have_every_token_with_text_and_no_other(with_added_tokens):
    vocabulary, tokenizer = with_added_tokens
    allowed = masked_tokens(make_matcher(vocabulary, LLMatcher.grammar_from_regex(r"x?(.|\n)+")), vocabulary)
    assert not allowed & vocabulary.hidden_ids
    assert {vocabulary.added_tokens[text] for text in ADDED} & vocabulary.hidden_ids == {
        vocabulary.added_tokens[text] for text in (EOS_TEXT, "<|special|>", "[INST]", "spécial")
    }
    for token_id in set(range(tokenizer.vocab_size)) - vocabulary.hidden_ids:
        token_bytes = tokenizer.token_bytes(token_id)
        if token_bytes == b"<0xZZ>" and not tokenizer.is_byte_level:
            continue  # llguidance would read it as a broken byte token: its text is spelled with other tokens
        rests = (b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80")  # a token may begin a character
        is_text = any(_is_utf8(token_bytes + rest[:end]) for rest in rests for end in range(4))
        assert (token_id in allowed) == (is_text and token_bytes != b""), (token_id, token_bytes)


def _is_utf8(text: bytes) -> bool:
    return text.decode(errors="replace").encode() == text


def test_forced_text_is_encoded_as_the_tokenizer_encodes_it(with_added_tokens):
    """Except for a space that some tokenizers put before the text."""
    vocabulary, tokenizer = with_added_tokens
    text = "hello the ab world plan"
    matcher, token_ids = make_matcher(vocabulary, LLMatcher.grammar_from_regex(text)), []
    while not matcher.is_stopped():
        (token_id,) = masked_tokens(matcher, vocabulary)
        matcher.consume_token(token_id)
        token_ids.append(token_id)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == (expected if tokenizer.is_byte_level else expected[1:])


def test_a_tokenizer_larger_than_the_model_can_be_used(directory):
    """Tokens without a row in the model are never allowed."""
    vocabulary = load_grammar_vocabulary(directory, 262, [0])
    grammar = LLMatcher.grammar_from_regex("x?(hell|hello)")
    for seed in range(20):
        token_ids = random_text(make_matcher(vocabulary, grammar), vocabulary, seed)
        assert max(token_ids) < 262
