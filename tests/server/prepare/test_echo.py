"""Prompts echoed before their completions, as the OpenAI client receives them."""

import codecs
import dataclasses
import random
import unicodedata
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CompletionChoice
from tokenizers import Tokenizer as BaseTokenizer
from tokenizers import normalizers, processors

from tests.helpers.examples import examples, seeds
from tests.helpers.small_tokenizer import IM_END, IM_START, VOCAB_SIZE
from tests.server.helpers.echo_entries import NEW_TOKENS, entries_of, expected_entries, say_hello
from tests.server.helpers.fake_engine import LIMITS, FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tokasaurus.server.prepare.completion import make_echo
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    server.engine.script = say_hello
    return sync_client(server)


def texts_of(answer: Completion) -> list[tuple[int, str]]:
    return [(choice.index, choice.text) for choice in answer.choices]


def test_prompt_precedes_every_completion(server: LiveServer, client: openai.OpenAI) -> None:
    plain = client.completions.create(model="default", prompt=["a b", "<|im_end|>"], n=2, stop="o")
    answer = client.completions.create(model="default", prompt=["o b", "<|im_end|>"], n=2, stop="o", echo=True)
    assert texts_of(answer) == [(0, "o bhell"), (1, "o bhell"), (2, "<|im_end|>hell"), (3, "<|im_end|>hell")]
    assert answer.usage == plain.usage, "echoed tokens are not completion tokens"
    assert {choice.logprobs for choice in answer.choices} == {None}
    assert {request.want_prompt_logprobs for request in server.engine.requests} == {False}
    ids = client.completions.create(model="default", prompt=[[104, 259], [IM_START, 0xE2, 97]], echo=True)
    assert texts_of(ids) == [(0, "hhellohello€"), (1, "<|im_start|>\ufffdahello€")]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_entries_of_the_prompt_precede_the_entries_of_the_completion(
    server: LiveServer, client: openai.OpenAI, served_model: ServedModel, num_top: int
) -> None:
    prompts = ["hello world, hello €uro", "x"]
    plain = client.completions.create(model="default", prompt=prompts, n=2, logprobs=num_top, max_tokens=3)
    answer = client.completions.create(model="default", prompt=prompts, n=2, logprobs=num_top, max_tokens=3, echo=True)
    assert {request.want_prompt_logprobs for request in server.engine.requests[:2]} == {False}
    requests = server.engine.requests[2:]
    assert [(request.want_prompt_logprobs, request.num_top_prompt_logprobs) for request in requests] == [
        (True, num_top)
    ] * 2
    for choice, without in zip(answer.choices, plain.choices, strict=True):
        prompt, request = prompts[choice.index // 2], requests[choice.index // 2]
        expected = expected_entries(request, num_top, served_model.tokenizer)
        assert entries_of(choice) == expected + entries_of(without)
        assert choice.text == prompt + without.text
        assert choice.logprobs is not None
        assert without.logprobs is not None
        offsets, own = choice.logprobs.text_offset or [], without.logprobs.text_offset or []
        assert offsets[len(expected) :] == [len(prompt) + offset for offset in own]
        tops = choice.logprobs.top_logprobs or []
        assert [top is None for top in tops] == [True] + [False] * (len(tops) - 1)


def test_logprob_of_the_most_likely_token_equals_the_largest_top_logprob(client: openai.OpenAI) -> None:
    """lm-eval uses this to tell whether a continuation is greedy, wherever it splits context and continuation."""
    token_ids = [104, 101, 97, 98, 259, 120, 121, 122, 0xE2, 0xE3]
    (choice,) = client.completions.create(
        model="default", prompt=[token_ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    ).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(token_ids) + 1
    assert [value is None for value in logprobs.token_logprobs] == [True] + [False] * len(token_ids)
    pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    is_greedy = [value == max(top.values()) for value, top in pairs]
    assert is_greedy == [1 + position % 7 == 1 for position in range(1, len(token_ids))] + [True]


@pytest.mark.parametrize("stop_token_ids", [[], [65]])
def test_stop_token_has_a_logprobs_entry(server: LiveServer, client: openai.OpenAI, stop_token_ids: list[int]) -> None:
    end, name = (65, "A") if stop_token_ids else (IM_END, "<|im_end|>")
    server.engine.script = lambda _request, _index: Reply([end], [-0.125])
    asked: dict[str, Any] = {"model": "default", "prompt": "ab", "max_tokens": 1, "logprobs": 0}
    asked["extra_body"] = {"stop_token_ids": stop_token_ids}
    (choice,) = client.completions.create(**asked, echo=True).choices
    assert (choice.text, choice.finish_reason) == ("ab", "stop")
    assert entries_of(choice)[2:] == [(name, -0.125, {name: -0.125})]
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 1, 2]
    streamed = list(client.completions.create(**asked, echo=True, stream=True))
    assert [entry for chunk in streamed for entry in entries_of(chunk.choices[0])] == entries_of(choice)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo_with_zero_max_tokens_returns_only_the_prompt(
    server: LiveServer, client: openai.OpenAI, served_model: ServedModel, logprobs: int | None
) -> None:
    asked: dict[str, Any] = {"model": "default", "prompt": ["a" * LIMITS.max_tokens_per_sequence, "b"], "max_tokens": 0}
    answer = client.completions.create(**asked, echo=True, logprobs=logprobs)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
        (asked["prompt"][0], "length"),
        ("b", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, LIMITS.max_tokens_per_sequence + 1)
    assert [request.max_new_tokens for request in server.engine.requests] == [0, 0]
    for choice, request in zip(answer.choices, server.engine.requests, strict=True):
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert entries_of(choice) == expected_entries(request, logprobs, served_model.tokenizer)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked)
    assert refused.value.param == "max_tokens"


def test_fingerprint_has_the_completion_ids_and_choices_have_the_prompt_entries(
    server: LiveServer, client: openai.OpenAI, served_model: ServedModel
) -> None:
    answer = client.completions.create(
        model="default", prompt="ab", logprobs=1, echo=True, extra_body={"logprobs_in_fingerprint": True}
    )
    (request,) = server.engine.requests
    assert entries_of(answer.choices[0]) == expected_entries(request, 1, served_model.tokenizer)
    assert orjson.loads(answer.system_fingerprint or "")["completion_ids"] == [NEW_TOKENS]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_first_chunk_of_each_streamed_choice_is_the_prompt(client: openai.OpenAI, logprobs: int | None) -> None:
    """The engine sends the sequences without prompt logprobs before the one sequence with them."""
    asked: dict[str, Any] = {"model": "default", "prompt": ["hello world", "€"], "n": 3, "logprobs": logprobs}
    whole = client.completions.create(**asked, echo=True)
    chunks: dict[int, list[CompletionChoice]] = {}
    for chunk in client.completions.create(**asked, echo=True, stream=True, extra_body={"return_token_ids": True}):
        (choice,) = chunk.choices
        chunks.setdefault(choice.index, []).append(choice)
    assert sorted(chunks) == list(range(6))
    for choice in whole.choices:
        first, *later = chunks[choice.index]
        assert first.text == asked["prompt"][choice.index // 3]
        assert (first.model_extra or {})["prompt_token_ids"]
        assert {(part.model_extra or {})["prompt_token_ids"] for part in later} == {None}
        assert first.text + "".join(part.text for part in later) == choice.text
        if logprobs is not None:
            assert [entry for part in chunks[choice.index] for entry in entries_of(part)] == entries_of(choice)


PARTS = ["a", "hello w", "é", "€uro", "😀", "<|im_end|>", "<|im_start|>", " ", "\ufffd"]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8))
@examples(200)
def test_offset_of_each_token_is_where_its_text_begins(served_model: ServedModel, parts: list[str]) -> None:
    """Oracle: decode the bytes before each token, ignoring an incomplete character at the end."""
    text, tokenizer = "".join(parts), served_model.tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    bytes_of_tokens = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    expected = [len(b"".join(bytes_of_tokens[:index]).decode(errors="ignore")) for index in range(len(bytes_of_tokens))]
    for prompt in (text, token_ids):
        echo = make_echo(prompt, token_ids, tokenizer, wants_offsets=True)
        assert (echo.text, echo.offsets) == (text, expected)
    assert make_echo(text, token_ids, tokenizer, wants_offsets=False).offsets == []


@pytest.mark.parametrize("seed", seeds(30))
def test_echo_of_token_ids_is_their_text_up_to_the_last_whole_character(served_model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    token_ids = [rng.choice([rng.randrange(VOCAB_SIZE), *"€😀".encode()]) for _ in range(20)]
    echo = make_echo(token_ids, token_ids, served_model.tokenizer, wants_offsets=True)
    whole = b"".join(map(served_model.tokenizer.token_bytes, token_ids))
    assert echo.text == codecs.getincrementaldecoder("utf-8")("replace").decode(whole)
    for offset, token_id, end in zip(echo.offsets, token_ids, [*echo.offsets[1:], len(echo.text)], strict=True):
        token_bytes = served_model.tokenizer.token_bytes(token_id)
        if token_bytes.isascii():
            assert echo.text[offset:end].lstrip("\ufffd") == token_bytes.decode()


ADD_START_AND_END_TOKENS = processors.TemplateProcessing(
    single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", IM_START), ("<|im_end|>", IM_END)]
)


@pytest.fixture(scope="module")
def normalizing(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizer that applies NFC, as Qwen's does, and adds a token before and after each text."""
    base = BaseTokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    base.normalizer = normalizers.NFC()
    base.post_processor = ADD_START_AND_END_TOKENS
    directory = tmp_path_factory.mktemp("normalizing")
    base.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def test_offsets_include_leading_whitespace_though_the_tokenizer_trims_it(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Llama 3's tokenizer trims the whitespace from the offsets it reports."""
    base = BaseTokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    base.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), ADD_START_AND_END_TOKENS])
    base.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text = "hello world <|im_end|> €"
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.token_starts(text, add_special_tokens=True)[2] == 6
    echo = make_echo(text, token_ids, tokenizer, wants_offsets=True)
    assert echo.offsets == [0, 0, 5, 8, 11, 12, 22, 23, 23, 23, 24]


@pytest.mark.parametrize(
    "text", ["plain", "e\u0301te\u0301 here", "<|im_start|>a", "nin\u0303o <|im_end|> e\u0301", "é"]
)
def test_text_is_echoed_unchanged_even_if_the_tokenizer_normalizes_it(normalizing: Tokenizer, text: str) -> None:
    token_ids = normalizing.encode(text, add_special_tokens=True)
    echo = make_echo(text, token_ids, normalizing, wants_offsets=True)
    assert echo.text == text
    assert (echo.offsets[0], echo.offsets[-1]) == (0, len(text))
    for start, end, token_id in zip(echo.offsets, echo.offsets[1:], token_ids, strict=False):
        if start < end:  # an empty span is part of a character, or a token that is not in the text
            shown = unicodedata.normalize("NFC", text[start:end])
            assert shown.encode().endswith(normalizing.token_bytes(token_id))


def test_no_special_tokens_are_added_to_a_prompt_of_token_ids(
    served_model: ServedModel, normalizing: Tokenizer
) -> None:
    model = dataclasses.replace(served_model, tokenizer=normalizing)
    with live_server(model, FakeEngine(say_hello)) as server:
        client = sync_client(server)
        asked: dict[str, Any] = {"model": "default", "logprobs": 0, "echo": True, "max_tokens": 0}
        text, ids = (client.completions.create(prompt=prompt, **asked) for prompt in ("ab", [97, 98]))
    assert [choice.text for answer in (text, ids) for choice in answer.choices] == ["ab", "ab"]
    assert [entry[:2] for entry in entries_of(text.choices[0])] == [
        ("<|im_start|>", None),
        ("a", -1.0),
        ("b", -1.5),
        ("<|im_end|>", -2.0),
    ]
    assert [entry[:2] for entry in entries_of(ids.choices[0])] == [("a", None), ("b", -1.0)]
