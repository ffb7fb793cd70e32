"""Request bodies become GenerateRequests: prompts, limits, defaults and refused fields."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, IM_START, VOCAB_SIZE
from tests.server.helpers.prepared_requests import chat, completion, prompts_of
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, SamplingParams
from tokasaurus.server.errors import ContextLengthExceeded, InvalidRequest
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.served_model import ServedModel

REFUSED = [{"role": "user", "content": "refuse me"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", [[97, 98, 99]]),
        ([97, 5], [[97, 5]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_can_be_text_or_token_ids_one_or_many(
    served_model: ServedModel, prompt: object, expected: object
) -> None:
    assert prompts_of(completion(served_model, prompt=prompt)) == expected


def test_chat_prompt_is_the_rendered_template(served_model: ServedModel) -> None:
    def text(words: str) -> list[int]:
        return served_model.tokenizer.encode(words, add_special_tokens=False)

    expected = [IM_START, *text("user\nabc"), IM_END, *text("\n"), IM_START, *text("assistant\n")]
    assert prompts_of(chat(served_model, "abc")) == [expected]


def test_text_of_content_parts_is_concatenated(served_model: ServedModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    in_parts = chat(served_model, messages=[{"role": "user", "content": parts}])
    assert prompts_of(in_parts) == prompts_of(chat(served_model, "abc"))


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "refusal": None, "function_call": None}])
def test_an_assistant_message_without_content_is_empty(served_model: ServedModel, message: dict[str, object]) -> None:
    def with_assistant(fields: dict[str, object]) -> Prepared:
        return chat(served_model, messages=[{"role": "user", "content": "a"}, {"role": "assistant", **fields}])

    assert prompts_of(with_assistant(message)) == prompts_of(with_assistant({"content": ""}))


@given(num_prompt_tokens=st.integers(1, 120), max_tokens=st.none() | st.integers(1, 120))
@examples(100)
def test_completion_max_tokens_is_the_field_or_at_most_the_default(
    served_model: ServedModel, num_prompt_tokens: int, max_tokens: int | None
) -> None:
    fitting = [count for count in range(1, 101) if num_prompt_tokens + count <= 100]
    fields = {"prompt": [1] * num_prompt_tokens, "max_tokens": max_tokens}
    if not fitting or (max_tokens is not None and max_tokens not in fitting):
        with pytest.raises(ContextLengthExceeded):
            completion(served_model, **fields)
        return
    expected = max(count for count in fitting if count <= 16) if max_tokens is None else max_tokens
    assert completion(served_model, **fields).requests[0].max_new_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": 1}, 1),
    ],
)
def test_chat_max_tokens_is_the_field_or_the_rest_of_the_context(
    served_model: ServedModel, fields: dict[str, int | None], expected: int | None
) -> None:
    request = chat(served_model, **fields).requests[0]
    assert request.max_new_tokens == (100 - len(request.prompt_ids) if expected is None else expected)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_refuses_too_many_max_tokens_and_names_the_field_used(served_model: ServedModel, field: str) -> None:
    num_free_tokens = chat(served_model).requests[0].max_new_tokens
    assert chat(served_model, **{field: num_free_tokens}).requests[0].max_new_tokens == num_free_tokens
    with pytest.raises(ContextLengthExceeded) as error:
        chat(served_model, **{field: num_free_tokens + 1})
    assert error.value.param == field


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seed_is_taken_modulo_2_to_the_64_for_every_prompt(served_model: ServedModel, seed: int, expected: int) -> None:
    requests = completion(served_model, prompt=["a", "b"], seed=seed).requests
    assert [request.seed for request in requests] == [expected, expected]


def test_prompts_without_a_seed_get_distinct_random_seeds(served_model: ServedModel) -> None:
    requests = completion(served_model, prompt=["a"] * 200).requests + chat(served_model).requests
    seeds = {request.seed for request in requests}
    assert len(seeds) == 201
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**62  # all bits are drawn; fails once in 2**57 runs


def test_request_ids_are_unique_and_start_with_the_response_id(served_model: ServedModel) -> None:
    first, second = completion(served_model, prompt=["a", "b"]), completion(served_model)
    answer = chat(served_model)
    assert first.response_id.startswith("cmpl-")
    assert answer.response_id.startswith("chatcmpl-")
    ids = [request.request_id for prepared in (first, second, answer) for request in prepared.requests]
    assert len(set(ids)) == 4
    assert all(request.request_id.startswith(first.response_id) for request in first.requests)


def test_generation_fields_reach_the_engine(served_model: ServedModel) -> None:
    fields = {"n": 3, "temperature": 0.25, "top_p": 0.5, "stop": ["x", "y"], "ignore_eos": True, "max_tokens": 9}
    for prepared in (
        completion(served_model, logprobs=0, **fields),
        chat(served_model, logprobs=True, **fields),
    ):
        (request,) = prepared.requests
        assert (request.num_sequences, request.max_new_tokens, request.ignore_eos) == (3, 9, True)
        assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)
        assert request.stop_strings == ("x", "y")
        assert request.want_logprobs


def test_sampling_and_stop_token_fields_reach_the_engine(served_model: ServedModel) -> None:
    fields = {"top_k": 5, "min_p": 0.25, "presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 2}
    fields |= {"logit_bias": {"7": -100, "3": 0.5}, "stop_token_ids": [4, 9], "min_tokens": 2}
    for prepared in (completion(served_model, **fields), chat(served_model, **fields)):
        (request,) = prepared.requests
        sampling = request.sampling
        assert (sampling.top_k, sampling.min_p, request.logit_bias) == (5, 0.25, ((7, -100.0), (3, 0.5)))
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        assert penalties == (1.5, -0.5, 2.0)
        assert (request.stop_token_ids, request.min_tokens) == ((4, 9), 2)


@pytest.mark.parametrize("top_k", [None, -1, 0, VOCAB_SIZE, 2**70])
def test_top_k_that_excludes_no_token_becomes_zero(served_model: ServedModel, top_k: int | None) -> None:
    assert completion(served_model, top_k=top_k).requests[0].sampling.top_k == 0
    assert completion(served_model, top_k=VOCAB_SIZE - 1).requests[0].sampling.top_k == VOCAB_SIZE - 1


def test_extreme_repetition_penalty_keeps_logits_finite_in_float32(served_model: ServedModel) -> None:
    for penalty in (1e-300, 1e300):
        penalty_used = np.float32(
            completion(served_model, repetition_penalty=penalty).requests[0].sampling.repetition_penalty
        )
        assert np.isfinite(np.float32(1e3) * penalty_used)
        assert np.isfinite(np.float32(1e3) / penalty_used)


def test_client_and_priority_are_passed_with_every_prompt(served_model: ServedModel) -> None:
    requests = completion(served_model, "somebody", prompt=["a", "b"], priority=-3).requests
    requests += chat(served_model, client="somebody", priority=-3).requests
    assert [(request.client, request.priority) for request in requests] == [("somebody", -3)] * 3


def test_cache_salt_is_passed_unchanged_with_every_prompt(served_model: ServedModel) -> None:
    salt = " Tenant \U0001f99c\0"
    requests = completion(served_model, prompt=["a", "b"], cache_salt=salt).requests
    requests += chat(served_model, cache_salt=salt).requests
    assert [request.cache_salt for request in requests] == [salt] * 3


@pytest.mark.parametrize(
    ("fields", "opening", "end"),
    [
        ({}, "", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": None, "continue_final_message": None}, "", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, "", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "", "<|im_end|>\n"),
        ({"continue_final_message": True}, "", ""),
        ({"continue_final_message": True, "add_generation_prompt": False}, "", ""),
        ({"continue_final_message": False}, "", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"opening": "Hear!"}}, "Hear!", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"unknown": {"a": [1]}}}, "", "<|im_end|>\n<|im_start|>assistant\n"),
        ({"apply_chat_template_overrides": {"add_generation_prompt": False, "opening": "a"}}, "a", "<|im_end|>\n"),
        ({"apply_chat_template_overrides": {"continue_final_message": True}}, "", ""),
        ({"apply_chat_template_overrides": {"opening": "a"}, "chat_template_kwargs": {"opening": "a"}}, "a", None),
    ],
)
def test_template_fields_reach_the_chat_template(
    served_model: ServedModel, fields: dict[str, Any], opening: str, end: str | None
) -> None:
    (prompt,) = prompts_of(chat(served_model, "abc", **fields))
    end = "<|im_end|>\n<|im_start|>assistant\n" if end is None else end
    text = served_model.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == f"{opening}<|im_start|>user\nabc{end}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"raise_exception": 1}, "messages": REFUSED}, "messages"),
        ({"apply_chat_template_overrides": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"apply_chat_template_overrides": {"add_generation_prompt": 1}}, "apply_chat_template_overrides"),
        (
            {"apply_chat_template_overrides": {"opening": 1}, "chat_template_kwargs": {"opening": True}},
            "apply_chat_template_overrides",
        ),
        (
            {"apply_chat_template_overrides": {"add_generation_prompt": True}, "add_generation_prompt": False},
            "apply_chat_template_overrides",
        ),
    ],
)
def test_invalid_template_fields_are_refused_by_name(
    served_model: ServedModel, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(served_model, **fields)
    assert error.value.param == param
    assert param in error.value.message


def test_special_token_text_is_plain_text_in_a_message_and_a_token_in_a_prompt(served_model: ServedModel) -> None:
    (prompt,) = prompts_of(chat(served_model, "a<|im_end|>"))
    assert prompt.count(IM_END) == 1
    assert prompts_of(completion(served_model, prompt="a<|im_end|>")) == [[97, IM_END]]


def test_text_that_must_exceed_the_context_is_refused_without_tokenizing(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_args: object, **_options: object) -> None:
        raise AssertionError("tokenized")

    text = "a b " * 500
    monkeypatch.setattr(served_model.tokenizer, "_base", SimpleNamespace(encode_batch_fast=encode))
    for ask in (lambda: completion(served_model, prompt=["a", text]), lambda: chat(served_model, text)):
        with pytest.raises(ContextLengthExceeded, match="at least"):
            ask()


OPTIONAL = ["n", "temperature", "top_p", "stop", "seed", "ignore_eos", "cache_salt", "top_k", "min_p", "logit_bias"]
OPTIONAL += ["presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "min_tokens", "priority"]


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(OPTIONAL)])
def test_absent_and_null_fields_get_the_defaults(served_model: ServedModel, fields: dict[str, None]) -> None:
    for prepared in (completion(served_model, **fields), chat(served_model, **fields)):
        (request,) = prepared.requests
        assert (request.num_sequences, request.stop_strings, request.ignore_eos) == (1, (), False)
        assert request.sampling == SamplingParams()
        assert not request.want_logprobs
        assert (request.cache_salt, request.priority) == ("", 0)
        assert (request.stop_token_ids, request.min_tokens) == ((), 0)
        assert not request.logit_bias


def test_tiny_temperature_becomes_zero_and_tiny_top_p_stays_positive_in_float32(served_model: ServedModel) -> None:
    sampling = completion(served_model, temperature=1e-300, top_p=1e-300).requests[0].sampling
    assert sampling.temperature == 0
    assert np.float32(sampling.top_p) > 0


@pytest.mark.parametrize("name", SamplingParams._fields)
def test_the_bodies_have_the_declared_default_and_range_of_every_sampling_parameter(
    served_model: ServedModel, name: str
) -> None:
    declared = CLIENT_PARAMETERS[name]
    for prepare in (completion, chat):
        (usual,) = prepare(served_model).requests
        (request,) = prepare(served_model, **{name: declared.default}).requests
        assert request.sampling == usual.sampling
        for value in (declared.strong, declared.weak):
            assert prepare(served_model, **{name: value})
        least = declared.minimum
        outside = [least if declared.excludes_minimum else least - 1]
        outside += [] if declared.maximum is None else [declared.maximum + 1]
        for value in outside:
            with pytest.raises(ValidationError):
                prepare(served_model, **{name: value})


@pytest.mark.parametrize("name", SamplingParams._fields)
def test_every_sampling_parameter_is_a_field_of_both_bodies_and_changes_nothing_else(
    served_model: ServedModel, name: str
) -> None:
    usual, value = SamplingParams()._asdict(), CLIENT_PARAMETERS[name].strong
    for prepare in (completion, chat):
        (request,) = prepare(served_model, **{name: value}).requests
        assert request.sampling._asdict() == {**usual, name: value}
        (request,) = prepare(served_model).requests
        assert request.sampling._asdict() == usual
