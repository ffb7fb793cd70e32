"""Texts with their special tokens, and with what ended them, against decoding the tokens: whole and streamed."""

import codecs
import dataclasses
import random
from collections.abc import Collection

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.finished_sequences import cut_into_deltas, finished, make_request
from tests.text.helpers.first_stop import find_first_stop
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.respond.choice import Choice
from tokasaurus.server.served_model import ServedModel

HELLO, SPACE_WO = 259, 261  # "hello", " wo"
TOKENS = [HELLO, SPACE_WO, *b"helo w", *"é€".encode(), IM_START]
STOPS = [
    *[(), ("o w",), ("lo", "hello h"), ("é",), ("<|im_start|>",), ("o<|im",), ("start|>hello", "zz")],
    *[("o<|im_start|>", "€"), ("<|im_start|>hello",), ("lo<|im_end|>",), ("<|im_start|><|im_end|>", "w")],
]
SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
STOP_TOKEN = SPACE_WO


def with_marks(served_model: ServedModel, token_ids: list[int], marks: dict[int, str], hidden: Collection[int]) -> str:
    """The text, in which the tokens that stop strings name are characters."""
    text, run = "", b""
    for token_id in token_ids:
        if token_id in marks:
            text, run = text + run.decode(errors="replace") + marks[token_id], b""
        elif token_id not in hidden:
            run += served_model.tokenizer.token_bytes(token_id)
    return text + run.decode(errors="replace")


def marked(stop: str, marks: dict[int, str]) -> str:
    for id_, mark in marks.items():
        stop = stop.replace(SPECIAL[id_], mark)
    return stop


def begun(pieces: list[bytes]) -> str:
    """Without an incomplete last character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))


@examples(400)
@given(
    st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12),
    st.sampled_from(["length", "eos", "stop token"]),
    st.sampled_from(STOPS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
@example([*b"o w", IM_START], "eos", ("o w",), True, True, 0)
@example([HELLO, IM_START, HELLO], "length", ("start|>hello", "zz"), True, True, 1)
@example([HELLO], "stop token", (), False, True, 2)
@example([HELLO, IM_START, HELLO], "length", ("o<|im_start|>", "€"), False, False, 3)
@example([HELLO], "eos", ("lo<|im_end|>",), False, False, 4)
@example([HELLO], "eos", ("lo<|im_end|>",), True, False, 5)
def test_text_and_logprobs_are_those_of_the_tokens_that_are_kept(
    served_model: ServedModel,
    token_ids: list[int],
    end: str,
    stop: tuple[str, ...],
    shows_special: bool,
    keeps_stop: bool,
    seed: int,
) -> None:
    end_ids = {"length": [], "eos": [IM_END], "stop token": [STOP_TOKEN]}[end]
    sequence = finished([*token_ids, *end_ids], "stop" if end_ids else "length")
    request = dataclasses.replace(
        make_request(3, stop, want_logprobs=True), shows_special=shows_special, stop_token_ids=(STOP_TOKEN,)
    )
    if not end_ids and token_ids[-1] == STOP_TOKEN:  # then it is what ended the text
        end_ids, token_ids = [STOP_TOKEN], token_ids[:-1]
    prepared = Prepared("cmpl-1", [request], keeps_stop=keeps_stop)

    # the slow way: each token's bytes, and the first token whose text is not all in the kept text
    shown = [*token_ids, *end_ids] if keeps_stop else token_ids
    special_ids = () if shows_special else (IM_START, IM_END)
    pieces = [b"" if id_ in special_ids else served_model.tokenizer.token_bytes(id_) for id_ in shown]
    named = {id_: name for id_, name in SPECIAL.items() if any(name in each for each in stop)}
    # shown ones are texts, apart from the end token, which the text lacks unless it keeps it
    marks = {id_: chr(0xD800 + id_) for id_ in named if not shows_special or (id_ in end_ids and not keeps_stop)}
    searched = [*shown, *(id_ for id_ in end_ids if id_ in marks and not keeps_stop)]
    found_in = with_marks(served_model, searched, marks, special_ids)
    stops = [*stop, *(marked(each, marks) for each in stop)]
    found = find_first_stop(found_in, stops)
    text = b"".join(pieces).decode(errors="replace")
    if found is not None or marks:
        start, matched = found or (len(found_in), "")
        text = found_in[: start + len(matched)] if keeps_stop else found_in[:start]
        text = text.translate(dict.fromkeys(map(ord, marks.values())))

    whole = Choice(request, prepared, served_model).add(sequence)
    choice = Choice(request, prepared, served_model)
    deltas = [choice.add(delta) for delta in cut_into_deltas(sequence, 0, random.Random(seed))]
    assert whole.text == text
    assert "".join(delta.text for delta in deltas) == text
    assert whole.logprobs is not None
    kept = [token.token_id for token in whole.logprobs]
    assert kept == shown[: len(kept)]
    assert [token for delta in deltas for token in delta.logprobs or []] == whole.logprobs
    if found is None:
        assert kept == shown
    elif "\ufffd" not in text:  # tokens whose text begins in what is kept
        assert len(kept) == sum(len(begun(pieces[:index])) < len(text) for index in range(len(pieces)))
        assert whole.finish_reason == deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_kept_stop_string_is_not_delayed(served_model: ServedModel, keeps_stop: bool) -> None:
    request = make_request(3, ("hello w",), want_logprobs=True)
    choice = Choice(request, Prepared("cmpl-1", [request], keeps_stop=keeps_stop), served_model)
    sequence = finished([HELLO, *b" w"], "stop")
    deltas = [
        dataclasses.replace(
            cut_into_deltas(sequence, 0, random.Random(0))[0],
            token_ids=[token_id],
            logprobs=[-1.0],
            finish_reason="stop" if number == 2 else None,
        )
        for number, token_id in enumerate(sequence.token_ids)
    ]
    texts = [choice.add(delta).text for delta in deltas]
    assert texts == (["hello", " ", "w"] if keeps_stop else ["", "", ""])
