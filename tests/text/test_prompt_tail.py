"""The text of ids that follow a prompt, whole, streamed and for stop strings: what they add to its decoding."""

import codecs
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BaseTokenizer
from tokenizers import decoders

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, LLAMA_2_DECODER, save_llama_2_tokenizer, save_small_tokenizer
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.stop_strings import StopMatcher
from tokasaurus.text.token_decoder import NO_TAIL, PROMPT_TAIL_TOKENS
from tokasaurus.text.tokenizer import Tokenizer

BYTES = [*"€é😀".encode(), 0x0A, 0xFF]
WORDS = ["<unk>", "▁the", "t", "▁", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in dict.fromkeys(BYTES))]
SPECIAL, ADDED, NO_TOKEN = len(WORDS), len(WORDS) + 1, 5000
SENTENCEPIECE_IDS = st.sampled_from([*range(len(WORDS)), *range(6, len(WORDS)), SPECIAL, ADDED, NO_TOKEN])
BYTE_LEVEL_IDS = st.sampled_from([*BYTES, 97, 259, 261, IM_END, 266, NO_TOKEN])
DECODERS = {
    "as in Llama 2": LLAMA_2_DECODER,
    "keeps the first space": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "without byte tokens": decoders.Metaspace(),
}


def make_sentencepiece(directory: Path, decoder: decoders.Decoder) -> Tokenizer:
    return Tokenizer.load(save_llama_2_tokenizer(directory, WORDS, ["café"], decoder))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = save_small_tokenizer(tmp_path_factory.mktemp("byte level"))
    base = BaseTokenizer.from_file(str(directory / "tokenizer.json"))
    base.add_tokens(["café"])
    base.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module", params=DECODERS)
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_sentencepiece(tmp_path_factory.mktemp("sentencepiece"), DECODERS[request.param])


def num_settled_bytes(content: bytes) -> int:
    """Without the bytes at the end that begin a character; all of them if the bytes before are not valid UTF-8."""
    try:
        return codecs.utf_8_decode(content, "strict", False)[1]
    except UnicodeDecodeError:
        return len(content)


def settled_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The prompt's decoding, without a character that is incomplete at its end."""
    visible = [id_ for id_ in prompt if id_ not in tokenizer.special_ids and tokenizer.token_bytes(id_)]
    if tokenizer.is_byte_level:
        content = b"".join(map(tokenizer.token_bytes, visible))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(content)
    run = list(itertools.takewhile(tokenizer.is_byte_token, reversed(visible)))[::-1]
    num_open = len(run) - num_settled_bytes(b"".join(map(tokenizer.token_bytes, run)))
    return tokenizer.decode(visible[: len(visible) - num_open])


def added_text(tokenizer: Tokenizer, prompt: Sequence[int], completion: Sequence[int]) -> str:
    return tokenizer.decode([*prompt, *completion])[len(settled_text(tokenizer, prompt)) :]


def check(tokenizer: Tokenizer, prompt: list[int], completion: list[int], cuts: list[int]) -> None:
    expected = added_text(tokenizer, prompt, completion)
    tail = tokenizer.prompt_tail(prompt)
    assert tokenizer.decode_after(tail, completion) == expected
    detokenizer, streamed, position = make_detokenizer(tokenizer, tail), "", 0
    for count in cuts:
        streamed += detokenizer.add(completion[position : position + count])
        position += count
        assert expected.startswith(streamed)
    assert streamed + detokenizer.finish(completion[position:]) == expected
    whole = tokenizer.decode([*prompt, *completion])
    if whole.startswith(settled := settled_text(tokenizer, prompt)):
        assert settled + expected == whole


CUTS = st.lists(st.integers(0, 4), max_size=6)
LENGTHS = {"max_size": 12}


@examples(10_000, 60)
@given(st.lists(BYTE_LEVEL_IDS, **LENGTHS), st.lists(BYTE_LEVEL_IDS, **LENGTHS), CUTS)
@example([97, 0xE2, IM_END, 0x82], [NO_TOKEN, 0xAC, 266], [1, 1])
@example([0xE2, 0x82], [], [])
@example([0xF0, 0x9F, 0x98], [97], [1])
@example([0xFF, 0x80], [0x80, 97], [])
def test_byte_level_text_is_what_the_ids_add_to_the_prompt(
    byte_level: Tokenizer, prompt: list[int], completion: list[int], cuts: list[int]
) -> None:
    check(byte_level, prompt, completion, cuts)


E2, X82, XAC, NEWLINE = (WORDS.index(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0x0A))


@examples(10_000, 60)
@given(st.lists(SENTENCEPIECE_IDS, **LENGTHS), st.lists(SENTENCEPIECE_IDS, **LENGTHS), CUTS)
@example([1], [1], [1])
@example([], [1, 1], [1])
@example([SPECIAL], [SPECIAL, 1], [1])
@example([1, SPECIAL, NO_TOKEN], [1], [1])
@example([1, NEWLINE], [3, 2], [1])
@example([1, NEWLINE, E2, SPECIAL, X82], [XAC, 2], [1])
@example([1, NEWLINE, E2, X82], [2], [1])
@example([E2, X82, XAC, E2], [2, X82], [1])
def test_sentencepiece_text_is_what_the_ids_add_to_the_prompt(
    sentencepiece: Tokenizer, prompt: list[int], completion: list[int], cuts: list[int]
) -> None:
    check(sentencepiece, prompt, completion, cuts)


def test_words_indentation_and_characters_continue_the_prompt(tmp_path: Path, byte_level: Tokenizer) -> None:
    tokenizer = make_sentencepiece(tmp_path, DECODERS["as in Llama 2"])

    def text(prompt: list[int], completion: list[int]) -> str:
        return tokenizer.decode_after(tokenizer.prompt_tail(prompt), completion)

    assert text([1], [1]) == " the"
    assert text([], [1]) == "the"
    assert text([1, NEWLINE], [4, 3, 2]) == "   t", "indentation keeps all its spaces"
    assert text([1, E2], [X82, XAC, 1]) == "€ the"
    assert byte_level.decode_after(byte_level.prompt_tail([97, 0xE2, 0x82]), [0xAC, 266]) == "€café"


def test_the_tail_of_a_long_prompt_is_short(tmp_path: Path, byte_level: Tokenizer) -> None:
    sentencepiece = make_sentencepiece(tmp_path, DECODERS["as in Llama 2"])
    euros = [E2, X82, XAC] * 10_000
    for prompt, completion, expected in (
        ([1] * 30_000, [1], " the"),
        ([1, *euros], [E2, X82, XAC, 1], "€ the"),
        ([1, *euros, E2, X82], [XAC, 1], "€ the"),
        ([XAC] * 30_000, [XAC, 1], "\ufffd the"),
        ([1, *[SPECIAL] * 30_000], [1], "the"),
    ):
        tail = sentencepiece.prompt_tail(prompt)
        assert len(tail.token_ids) <= 33
        assert sentencepiece.prompt_tail(prompt[-PROMPT_TAIL_TOKENS:]) == tail
        assert sentencepiece.decode_after(tail, completion) == expected
    assert byte_level.prompt_tail([97] * 30_000) == NO_TAIL
    assert len(byte_level.prompt_tail([0xE2, 0x82, *[IM_END] * 50]).token_ids) == 2


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_stop_strings_are_found_in_the_text_after_the_prompt(kind: str, byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = byte_level if kind == "byte_level" else make_sentencepiece(tmp_path, DECODERS["as in Llama 2"])
    pool = [97, 259, 261, *"€é".encode(), 266, IM_END] if kind == "byte_level" else [1, 2, 3, 5, E2, X82, XAC, SPECIAL]
    rng = random.Random(0)
    num_found = 0
    for _ in range(400):
        prompt, completion = (rng.choices(pool, k=rng.randrange(6)) for _ in range(2))
        text = added_text(tokenizer, prompt, completion)
        if not text:
            continue
        start = rng.choice([0, 0, rng.randrange(len(text))])
        stop = text[start : start + rng.randrange(1, 4)]
        texts = [added_text(tokenizer, prompt, completion[:end]) for end in range(len(completion) + 1)]
        expected = next((end for end, so_far in enumerate(texts) if end and stop in so_far), None)
        if expected is None or "\ufffd" in stop:
            continue
        decode: Callable[[Sequence[int]], str] = tokenizer.decode
        matcher = StopMatcher(decode, [stop], tokenizer.special_ids, tokenizer.prompt_tail(prompt))
        assert matcher.first_completion(completion, 0) == expected
        assert [matcher.first_completion(completion[:end], end - 1) for end in range(1, expected + 1)] == [
            *[None] * (expected - 1),
            expected,
        ]
        num_found += 1
    assert num_found > 120


def test_only_the_sequences_first_tokens_follow_the_prompts_tail(byte_level: Tokenizer) -> None:
    decode: Callable[[Sequence[int]], str] = byte_level.decode
    matcher = StopMatcher(decode, ["€"], byte_level.special_ids, byte_level.prompt_tail([97, 0xE2]))
    assert matcher.first_completion([0x82, 0xAC, 97], 0) == 2
    assert matcher.first_completion([0x82, 0xAC, 97], 2, is_whole=False) is None
    assert matcher.first_completion([*[97] * 5, 0x82, 0xAC, 97, 97], 8) is None
