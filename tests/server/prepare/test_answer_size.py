"""Limit on the number of prompt values in one answer, which repeats them for each of its n choices."""

import pytest

from tests.server.helpers.prepared_requests import chat, completion, prompts_of
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.served_model import ServedModel


@pytest.mark.parametrize(
    ("fields", "per_token", "param"),
    [
        ({"echo": True, "logprobs": 3}, 4, "echo"),
        ({"prompt_logprobs": 1, "logprobs": 5}, 2, "prompt_logprobs"),
        ({"return_token_ids": True, "logprobs": 5}, 1, "return_token_ids"),
    ],
)
def test_prompt_values_times_n_in_one_answer_are_limited(
    monkeypatch: pytest.MonkeyPatch,
    served_model: ServedModel,
    fields: dict[str, object],
    per_token: int,
    param: str,
) -> None:
    monkeypatch.setattr("tokasaurus.server.prepare.requests.MAX_PROMPT_VALUES", 2**20)
    prompts = [[1] * 90, [2] * 60]
    largest = 2**20 // (150 * per_token)
    assert completion(served_model, prompt=prompts, n=largest, **fields).requests
    with pytest.raises(InvalidRequest) as error:
        completion(served_model, prompt=prompts, n=largest + 1, **fields)
    assert error.value.param == param
    assert param in error.value.message


def test_prompt_token_ids_in_the_first_chunks_of_a_chat_stream_are_limited(
    monkeypatch: pytest.MonkeyPatch, served_model: ServedModel
) -> None:
    num_tokens = len(prompts_of(chat(served_model))[0])
    monkeypatch.setattr("tokasaurus.server.prepare.requests.MAX_PROMPT_VALUES", 100 * num_tokens)
    chat(served_model, n=100, return_token_ids=True, stream=True)
    chat(served_model, n=101, return_token_ids=True)
    chat(served_model, n=101, stream=True)
    with pytest.raises(InvalidRequest, match="return_token_ids"):
        chat(served_model, n=101, return_token_ids=True, stream=True)
