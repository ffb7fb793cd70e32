"""Answers whose text depends on the end of the prompt, against decoding all ids: whole, streamed, echoed, by token."""

import dataclasses
import random
from typing import Any

import numpy as np
import orjson
import pytest

from tests.helpers.examples import seeds
from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_llama_2_tokenizer
from tests.server.helpers import finished_sequences
from tests.server.helpers.finished_sequences import cut_into_deltas, finished, parse
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.prepare.completion import make_echo
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import CompletionStream
from tokasaurus.server.respond.whole import build_chat_completion, build_completion
from tokasaurus.server.served_model import ServedModel

WORDS = ["<unk>", "▁the", "t", "▁", "▁▁", "é", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]
E2, X82, XAC, NEWLINE = range(6, 10)
SPECIAL, ADDED = len(WORDS), len(WORDS) + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Decodes as Llama 2 does."""
    return make_served_model(save_llama_2_tokenizer(tmp_path_factory.mktemp("sentencepiece"), WORDS, ["café"]))


def make_request(prompt_ids: list[int], **fields: Any) -> GenerateRequest:
    return dataclasses.replace(finished_sequences.make_request(), prompt_ids=np.array(prompt_ids, np.int32), **fields)


def answer(model: ServedModel, prompt: list[int], completion: list[int], echoes: bool, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer, after asserting that a streamed one joins to the same text and tokens."""
    request = make_request(prompt, want_logprobs=not echoes, **fields)
    echo = [make_echo(prompt, prompt, model.tokenizer, wants_offsets=False)] if echoes else []
    prepared, result = Prepared("cmpl-1", [request], echoes=echo), finished(completion, "length")
    (choice,) = orjson.loads(orjson.dumps(build_completion(prepared, [[result]], model)))["choices"]
    stream = CompletionStream(prepared, model, StreamOptions())
    text, tokens = "", []
    for delta in cut_into_deltas(result, 0, random.Random(len(prompt))):
        for chunk in parse(stream.events([(0, delta)])):
            text += chunk["choices"][0]["text"]
            tokens += (chunk["choices"][0]["logprobs"] or {}).get("tokens", [])
    assert (text, tokens) == (choice["text"], (choice["logprobs"] or {}).get("tokens", []))
    return choice


@pytest.mark.parametrize("seed", seeds(40))
def test_echo_and_completion_join_to_the_decoding_of_all_ids(model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    pieces = [[1], [2], [3], [4], [5], [E2, X82, XAC], [NEWLINE], [ADDED]]  # whole characters
    token_ids = [token_id for _ in range(8) for token_id in rng.choice(pieces)]
    cut = rng.randrange(len(token_ids) + 1)  # may be inside a character
    prompt, completion = token_ids[:cut], token_ids[cut:]
    choice = answer(model, prompt, completion, echoes=True)
    assert choice["text"] == model.tokenizer.decode(token_ids)
    alone = answer(model, prompt, completion, echoes=False)
    assert choice["text"].endswith(alone["text"]), "echo does not change the completion's text"
    tokens, offsets = alone["logprobs"]["tokens"], alone["logprobs"]["text_offset"]
    if not {E2, X82, XAC} & {*completion}:
        assert "".join(tokens) == alone["text"]
        assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    request = make_request(prompt, want_logprobs=True)
    chat = build_chat_completion(Prepared("chatcmpl-1", [request]), [[finished(completion, "length")]], model)
    (chat_choice,) = orjson.loads(orjson.dumps(chat))["choices"]
    assert chat_choice["message"]["content"] == alone["text"]
    content = chat_choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == tokens
    missing = choice["text"].encode()[: -len(alone["text"].encode())] if alone["text"] else choice["text"].encode()
    own_bytes = bytes(byte for entry in content for byte in entry["bytes"])
    assert (missing + alone["text"].encode()).endswith(own_bytes), "the bytes of tokens are exact"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [([1, NEWLINE, E2], [X82, XAC, 1]), ([1, E2, X82, XAC, E2, X82], [XAC]), ([E2], [X82, XAC]), ([1, E2, X82], [XAC])],
)
def test_characters_before_one_that_the_completion_completes_are_echoed(
    model: ServedModel, prompt: list[int], completion: list[int]
) -> None:
    choice = answer(model, prompt, completion, echoes=True)
    assert choice["text"] == model.tokenizer.decode([*prompt, *completion])
    echo = make_echo(prompt, prompt, model.tokenizer, wants_offsets=True)
    assert echo.offsets == sorted(echo.offsets)
    assert max(echo.offsets) <= len(echo.text)


def test_the_first_word_keeps_its_space_only_after_a_prompt_with_text(model: ServedModel) -> None:
    assert answer(model, [1], [1, 1], echoes=False)["text"] == " the the"
    assert answer(model, [SPECIAL], [SPECIAL, 1, 1], echoes=False)["text"] == "the the"
    choice = answer(model, [SPECIAL], [SPECIAL, 1, 1], echoes=False)
    assert choice["logprobs"]["tokens"] == ["</s>", "the", " the"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3]
    choice = answer(model, [1, E2], [X82, XAC, ADDED, 2], echoes=False)
    assert choice["text"] == "€cafét"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 5]
    assert answer(model, [1, NEWLINE], [4, 3, 2], echoes=False)["text"] == "   t"
    assert answer(model, [1, E2, X82], [XAC, ADDED], echoes=False)["text"] == "€café"


def test_stop_strings_and_min_tokens_count_from_the_end_of_the_prompt(model: ServedModel) -> None:
    assert answer(model, [1], [1, 1], echoes=False, stop_strings=(" the",))["text"] == ""
    assert answer(model, [SPECIAL], [1, 1], echoes=False, stop_strings=(" the",))["text"] == "the"
    assert answer(model, [1], [1, 1, 2], echoes=False, stop_strings=(" the",), min_tokens=1)["text"] == " the"
    assert answer(model, [1, E2, X82], [XAC, 2], echoes=False, stop_strings=("€",))["text"] == ""
    assert answer(model, [1], [ADDED, 2, 2], echoes=False, stop_strings=("ét",))["text"] == "caf"
