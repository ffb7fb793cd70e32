"""Text deltas for ids that come one after the other, against decoding all ids at once."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

from tests.helpers.small_tokenizer import IM_END, IM_START, save_llama_2_tokenizer, save_small_tokenizer
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.tokenizer import Tokenizer

EURO = list("€".encode())
# Parts of characters, bytes that are never in UTF-8, words, special tokens, ids without a token.
BYTE_LEVEL_IDS = st.lists(
    st.sampled_from([*EURO, *"é😀".encode(), 0xFF, 97, 259, 261, IM_START, IM_END, 5000]), max_size=14
)

TOKENS = ["<unk>", "▁the", "t", "▁", "▁▁", *(f"<0x{byte:02X}>" for byte in EURO), "<0xFF>", "é"]
SPECIAL_ID = len(TOKENS)
SENTENCEPIECE_IDS = st.lists(st.sampled_from([*range(len(TOKENS)), SPECIAL_ID, 5000]), max_size=14)
CUTS = st.lists(st.integers(0, 3), max_size=14)


MARKS = [("<tool_call>", "</tool_call>"), ("<think>", "</think>"), ("[THINK]", "[/THINK]")]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_small_tokenizer(tmp_path_factory.mktemp("byte level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As in Llama 2."""
    return Tokenizer.load(save_llama_2_tokenizer(tmp_path_factory.mktemp("sentencepiece"), TOKENS))


@pytest.fixture(scope="module")
def with_special_marks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As in Hermes models and in Magistral: the marks around tool calls and reasoning are special tokens."""
    directory = save_small_tokenizer(tmp_path_factory.mktemp("marks"))
    base = BaseTokenizer.from_file(str(directory / "tokenizer.json"))
    base.add_special_tokens([AddedToken(mark, special=True) for pair in MARKS for mark in pair])
    base.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.mark.parametrize(("start", "end"), MARKS)
def test_special_marks_of_calls_and_reasoning_are_decoded_as_text(
    with_special_marks: Tokenizer, start: str, end: str
) -> None:
    tokenizer = with_special_marks
    text = f"a{start}hello{end}€"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) == 1 + 3 + 3
    shown = [*token_ids[:1], IM_START, *token_ids[1:], IM_END]
    assert tokenizer.decode(shown) == text
    assert tokenizer.decode(shown, skip_special_tokens=False) == text.replace("a", "a<|im_start|>", 1) + "<|im_end|>"
    detokenizer = make_detokenizer(tokenizer)
    assert "".join(detokenizer.add([id_]) for id_ in shown) + detokenizer.finish() == text


def cut(token_ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Chunks of the given lengths, then the remaining ids one by one."""
    ends = [0, *itertools.accumulate(lengths)]
    ends = [*ends, *range(ends[-1] + 1, len(token_ids) + 1)]
    return [list(token_ids[start:end]) for start, end in itertools.pairwise(ends)]


@given(BYTE_LEVEL_IDS, CUTS)
@example([*EURO[:2], IM_END, EURO[2]], [])
@example(EURO[:2], [1, 1])
def test_byte_level_deltas_join_to_the_whole_text_and_are_not_delayed(
    byte_level: Tokenizer, token_ids: list[int], lengths: list[int]
) -> None:
    detokenizer, text, num_read = make_detokenizer(byte_level), "", 0
    whole = byte_level.decode(token_ids)
    for chunk in cut(token_ids, lengths):
        text += detokenizer.add(chunk)
        num_read += len(chunk)
        so_far = byte_level.decode(token_ids[:num_read])
        assert whole.startswith(text)
        assert text == so_far or (text == so_far[:-1] and so_far[-1] == "\ufffd"), "at most one character is buffered"
    assert text + detokenizer.finish() == whole


@given(BYTE_LEVEL_IDS, st.integers(0, 14))
@example([*EURO, 97, 0xFF], 0)
@example([*EURO, 97, 0xFF], 2)
def test_byte_level_last_ids_can_be_given_to_finish(
    byte_level: Tokenizer, token_ids: list[int], num_first: int
) -> None:
    detokenizer = make_detokenizer(byte_level)
    text = detokenizer.add(token_ids[:num_first]) if num_first else ""
    assert text + detokenizer.finish(token_ids[num_first:]) == byte_level.decode(token_ids)


def test_a_character_is_returned_with_its_last_byte(byte_level: Tokenizer) -> None:
    detokenizer = make_detokenizer(byte_level)
    assert [detokenizer.add([token_id]) for token_id in [97, *EURO, 97]] == ["a", "", "", "€", "a"]
    assert detokenizer.add(EURO[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


@given(SENTENCEPIECE_IDS, CUTS)
@example([3, 1, 3, 3, 2], [])
@example([5, 6, 7, 8, 2], [])
@example([1, 5, SPECIAL_ID, 6, 5000, 7], [])
def test_sentencepiece_deltas_join_to_the_whole_text(
    sentencepiece: Tokenizer, token_ids: list[int], lengths: list[int]
) -> None:
    detokenizer, text = make_detokenizer(sentencepiece), ""
    whole = sentencepiece.decode(token_ids)
    for chunk in cut(token_ids, lengths):
        text += detokenizer.add(chunk)
        assert whole.startswith(text)
    assert text + detokenizer.finish() == whole


@given(SENTENCEPIECE_IDS, st.integers(0, 14))
@example([3, 1, 5, 6, SPECIAL_ID, 7, 2], 4)
def test_sentencepiece_last_ids_can_be_given_to_finish(
    sentencepiece: Tokenizer, token_ids: list[int], num_first: int
) -> None:
    detokenizer = make_detokenizer(sentencepiece)
    text = detokenizer.add(token_ids[:num_first])
    assert text + detokenizer.finish(token_ids[num_first:]) == sentencepiece.decode(token_ids)


def test_sentencepiece_text_comes_token_by_token_except_for_runs_of_bytes(sentencepiece: Tokenizer) -> None:
    detokenizer = make_detokenizer(sentencepiece)
    assert [detokenizer.add([token_id]) for token_id in [1, 1, 2, 5, 6, 7, 2]] == ["the", " the", "t", "", "", "", "€t"]


@given(BYTE_LEVEL_IDS, CUTS)
@example([*EURO[:2], IM_END, EURO[2]], [])
def test_byte_level_deltas_with_special_tokens_join_to_the_bytes_of_all_tokens(
    byte_level: Tokenizer, token_ids: list[int], lengths: list[int]
) -> None:
    detokenizer = make_detokenizer(byte_level.with_special())
    text = "".join([detokenizer.add(chunk) for chunk in cut(token_ids, lengths)]) + detokenizer.finish()
    assert text == b"".join(map(byte_level.token_bytes, token_ids)).decode(errors="replace")
    assert text == make_detokenizer(byte_level.with_special()).finish(token_ids)


@given(SENTENCEPIECE_IDS, CUTS)
@example([1, 5, SPECIAL_ID, 6, 5000, 7], [])
def test_sentencepiece_deltas_with_special_tokens_join_to_the_librarys_text(
    sentencepiece: Tokenizer, token_ids: list[int], lengths: list[int]
) -> None:
    detokenizer = make_detokenizer(sentencepiece.with_special())
    text = "".join([detokenizer.add(chunk) for chunk in cut(token_ids, lengths)]) + detokenizer.finish()
    assert text == sentencepiece.decode(token_ids, skip_special_tokens=False)


def test_special_tokens_are_still_left_out_of_the_tokenizers_own_text(byte_level: Tokenizer) -> None:
    assert byte_level.with_special().decode([97, IM_END]) == "a<|im_end|>"
    assert byte_level.decode([97, IM_END]) == "a"
    assert byte_level.with_special().special_ids == frozenset()
    assert IM_END in byte_level.special_ids
