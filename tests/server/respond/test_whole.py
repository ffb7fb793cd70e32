"""Answers that are not streamed: text, logprobs, finish reasons and usage."""

import random
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples, seeds
from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.fake_engine import prompt_logprobs
from tests.server.helpers.finished_sequences import make_request
from tokasaurus.messages.generation import FinishReason, GenerateRequest
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import PromptTokensDetails
from tokasaurus.server.protocol.completions import CompletionChoice
from tokasaurus.server.respond.logprobs import build_prompt_logprobs
from tokasaurus.server.respond.whole import build_chat_completion, build_completion, build_usage, write_answer
from tokasaurus.server.served_model import ServedModel

HELLO, SPACE_WO = 259, 261  # "hello", " wo"


def finished(
    token_ids: list[int], finish_reason: FinishReason = "stop", num_cached_tokens: int = 0
) -> FinishedSequence:
    logprobs = [-float(position) for position in range(len(token_ids))]
    return FinishedSequence(token_ids, logprobs, finish_reason, num_cached_tokens)


def only_choice(model: ServedModel, sequence: FinishedSequence, request: GenerateRequest) -> CompletionChoice:
    (choice,) = build_completion(Prepared("cmpl-1", [request]), [[sequence]], model).choices
    return choice


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_final_stop_token_is_left_out_of_the_text(served_model: ServedModel, ignore_eos: bool) -> None:
    request = replace(make_request(want_logprobs=True, ignore_eos=ignore_eos), stop_token_ids=(7, HELLO))
    choice = only_choice(served_model, finished([HELLO, SPACE_WO, HELLO]), request)
    assert (choice.text, choice.finish_reason) == ("hello wo", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["hello", " wo"]


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, "hello"), (2, "hello"), (3, "hellohellox"), (4, "hellohellox")]
)
def test_stop_strings_within_the_first_min_tokens_do_not_cut_the_text(
    served_model: ServedModel, min_tokens: int, text: str
) -> None:
    hell, o, x = 258, 111, 120
    ids = [HELLO, hell, o, x]
    request = replace(make_request(stop=("hello",)), min_tokens=min_tokens)
    choice = only_choice(served_model, finished(ids, "length"), request)
    assert (choice.text, choice.finish_reason) == (text, "length" if min_tokens > 2 else "stop")


def test_final_eos_is_left_out_of_the_logprobs_unless_ignored(served_model: ServedModel) -> None:
    ids = [HELLO, IM_END, HELLO, IM_END]
    choice = only_choice(served_model, finished(ids), make_request(want_logprobs=True))
    assert (choice.text, choice.finish_reason) == ("hellohello", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["hello", "<|im_end|>", "hello"]
    ignoring = make_request(want_logprobs=True, ignore_eos=True)
    choice = only_choice(served_model, finished(ids, "length"), ignoring)
    assert (choice.text, choice.finish_reason) == ("hellohello", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["hello", "<|im_end|>", "hello", "<|im_end|>"]


def test_sequence_of_only_eos_has_empty_text_and_logprobs(served_model: ServedModel) -> None:
    choice = only_choice(served_model, finished([IM_END]), make_request(want_logprobs=True))
    assert choice.text == ""
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == []


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("lo",), "hel", ["hello"]),
        (("o w",), "hell", ["hello"]),
        ((" wo",), "hello", ["hello"]),
        (("hello",), "", []),
        (("o!", "wo"), "hello ", ["hello", " wo"]),
        (("zzz",), "hello wo!", ["hello", " wo", "!"]),
    ],
)
def test_text_and_logprobs_end_before_the_stop_string(
    served_model: ServedModel, stop: tuple[str, ...], text: str, tokens: list[str]
) -> None:
    sequence = finished([HELLO, SPACE_WO, ord("!")], "length")
    choice = only_choice(served_model, sequence, make_request(stop=stop, want_logprobs=True))
    assert choice.text == text
    assert choice.finish_reason == ("length" if stop == ("zzz",) else "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == tokens
    assert choice.logprobs.token_logprobs == [0.0, -1.0, -2.0][: len(tokens)]


@pytest.mark.parametrize("seed", seeds(40))
def test_logprobs_entries_cover_the_returned_text(served_model: ServedModel, seed: int) -> None:
    """Oracle: decode every prefix of the sequence; keep the tokens of the shortest one that contains the text."""
    rng = random.Random(seed)
    ids = [rng.choice([104, 101, 108, 111, 32, 119, 256, 257, 258, 259, 260, 261]) for _ in range(12)]
    stop = rng.choice(["lo", "o w", "he", "ll", "w"])
    tokenizer = served_model.tokenizer
    choice = only_choice(served_model, finished(ids), make_request(stop=(stop,), want_logprobs=True))
    whole = tokenizer.decode(ids)
    assert choice.text == whole.split(stop)[0]
    if stop in whole:
        num_kept = next(count for count in range(13) if tokenizer.decode(ids[:count]).startswith(choice.text))
    else:
        num_kept = len(ids)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [tokenizer.decode([token_id]) for token_id in ids[:num_kept]]
    assert choice.logprobs.text_offset == [len(tokenizer.decode(ids[:count])) for count in range(num_kept)]


def test_choices_are_ordered_by_prompt_then_sample(served_model: ServedModel) -> None:
    prepared = Prepared("cmpl-1", [make_request(num_sequences=2), make_request(num_sequences=2)])
    results = [[finished([ord("a")]), finished([ord("b")])], [finished([ord("c")]), finished([ord("d")])]]
    choices = build_completion(prepared, results, served_model).choices
    assert [(choice.index, choice.text) for choice in choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert all(choice.logprobs is None for choice in choices)


def test_usage_counts_prompts_once_and_completions_with_eos(served_model: ServedModel) -> None:
    prepared = Prepared("cmpl-1", [make_request(5, num_sequences=2), make_request(7, num_sequences=2)])
    results = [
        [finished([1, 2, IM_END], num_cached_tokens=0), finished([1], num_cached_tokens=4)],
        [finished([1], num_cached_tokens=6), finished([1, 2], num_cached_tokens=5)],
    ]
    for build in (build_completion, build_chat_completion):
        usage = build(prepared, results, served_model).usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 7, 19)
        assert usage.prompt_tokens_details.cached_tokens == 5


@given(
    prompts=st.lists(
        st.integers(1, 40).flatmap(
            lambda num_tokens: st.tuples(
                st.just(num_tokens), st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=5)
            )
        ),
        min_size=1,
        max_size=4,
    )
)
@examples(300)
def test_cached_tokens_are_the_prompt_tokens_no_sequence_computed(prompts: list[tuple[int, list[int]]]) -> None:
    """Oracle: mark the prompt tokens each sequence computes, which begin after its cached tokens."""
    expected = 0
    for num_tokens, cached_by_sequence in prompts:
        computed = [False] * num_tokens
        for num_cached in cached_by_sequence:
            for position in range(num_cached, num_tokens):
                computed[position] = True
        expected += computed.count(False)
    requests = [make_request(num_tokens, num_sequences=len(cached)) for num_tokens, cached in prompts]
    results = [[finished([1], num_cached_tokens=number) for number in cached] for _, cached in prompts]
    usage = build_usage(Prepared("cmpl-1", requests), results)
    assert usage.prompt_tokens_details.cached_tokens == expected
    assert usage.prompt_tokens == sum(num_tokens for num_tokens, _ in prompts)


def test_prompt_token_details_are_summed_over_all_sequences(served_model: ServedModel) -> None:
    prepared = Prepared("cmpl-1", [make_request(5, num_sequences=2), make_request(7)])
    results = [
        [FinishedSequence([1], None, "stop", 0, 5, 0, 1), FinishedSequence([1], None, "stop", 4, 1, 20, 4)],
        [FinishedSequence([1], None, "stop", 6, 1, 300, 6)],
    ]
    for build in (build_completion, build_chat_completion):
        assert build(prepared, results, served_model).usage.prompt_tokens_details == PromptTokensDetails(
            cached_tokens=0 + 6, computed_tokens=5 + 1 + 1, shared_tokens=1 + 4 + 6, recomputed_tokens=0 + 20 + 300
        )


def test_chat_choice_has_the_text_and_the_bytes_of_each_token(served_model: ServedModel) -> None:
    euro = list("€".encode())
    sequence = finished([IM_START, HELLO, *euro, IM_END])
    request = make_request(want_logprobs=True)
    (choice,) = build_chat_completion(Prepared("chatcmpl-1", [request]), [[sequence]], served_model).choices
    assert choice.message.content == "hello€"
    assert choice.logprobs is not None
    assert [entry.bytes for entry in choice.logprobs.content] == [
        list(b"<|im_start|>"),
        list(b"hello"),
        *([byte] for byte in euro),
    ]
    assert [entry.logprob for entry in choice.logprobs.content] == [0.0, -1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize("return_token_ids", [False, True])
def test_serialising_choice_by_choice_equals_serialising_the_whole_answer(
    served_model: ServedModel, return_token_ids: bool
) -> None:
    request = make_request(want_logprobs=True, num_sequences=2)
    prepared = Prepared("cmpl-1", [request], return_token_ids=return_token_ids)
    results = [[finished([HELLO, SPACE_WO]), finished([HELLO] * 300, "length")]]
    for build in (build_completion, build_chat_completion):
        answer = build(prepared, results, served_model)
        assert write_answer(answer) == orjson.dumps(answer)


@pytest.mark.parametrize("num_tokens", [1, 2, 5000])
def test_prompt_logprobs_written_in_slices_equal_those_written_at_once(
    served_model: ServedModel, num_tokens: int
) -> None:
    request = replace(make_request(num_tokens), want_prompt_logprobs=True, num_top_prompt_logprobs=4)
    computed = prompt_logprobs(request)
    sequence = replace(finished([HELLO]), prompt_logprobs=computed)
    prepared = Prepared("cmpl-1", [request], num_top_prompt_logprobs=4)
    expected = build_prompt_logprobs(request.prompt_ids, computed, 4, served_model.tokenizer)
    for build in (build_completion, build_chat_completion):
        answer = orjson.loads(write_answer(build(prepared, [[sequence]], served_model)))
        found = answer["choices"][0] if build is build_completion else answer
        assert found["prompt_logprobs"] == orjson.loads(orjson.dumps(expected))
