"""Texts with their special tokens, and with what ended them, against decoding the tokens: whole and streamed."""

import codecs
import dataclasses
import random

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
STOPS = [(), ("o w",), ("lo", "hello h"), ("é",), ("<|im_start|>",), ("o<|im",), ("start|>hello", "zz")]
STOP_TOKEN = SPACE_WO


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
    text = b"".join(pieces).decode(errors="replace")
    found = find_first_stop(text, stop)
    if found is not None:
        start, matched = found
        text = text[: start + len(matched)] if keeps_stop else text[:start]

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
    else:  # tokens whose text begins in what is kept
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
