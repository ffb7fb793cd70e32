"""Log-probabilities as trainers read them, from a real server: parallel to the token ids, finite, and exact."""

import base64
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.small_tokenizer import IM_END, VOCAB_SIZE, save_small_tokenizer
from tests.helpers.tiny_model import family_config, save_random_model
from tests.model.sampling.helpers.logprobs_as_sampled import Row, distribution
from tokasaurus.messages.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO, SPACE_W = 259, 260
FLAGS = ("dtype=float32", "device=cpu", "kv_cache_num_tokens=8192", "max_seqs_per_forward=16")
PROMPT = "Say hello world"


class Served(NamedTuple):
    toka: TokaProcess
    oracle: PreTrainedModel


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model whose tokens are bytes and some words; log-probabilities are sampled ones by default."""
    directory = tmp_path_factory.mktemp("model")
    config = family_config("llama", vocab_size=VOCAB_SIZE)
    config.eos_token_id = IM_END
    oracle = save_random_model(directory, config)
    save_small_tokenizer(directory)
    with running_toka(f"model={directory}", *FLAGS, "tool_call_format=hermes", "logprobs_mode=sampled") as toka:
        yield Served(toka, oracle)
        assert toka.stop() == 0


class Answer(NamedTuple):
    """One choice, streamed or not."""

    prompt_ids: list[int]
    token_ids: list[int]
    names: list[str]
    logprobs: list[float]
    tops: list[dict[str, float]]
    finish_reason: str


def ask(toka: TokaProcess, endpoint: str, streams: bool = False, **fields: Any) -> list[Answer]:
    """The choices, with token ids and two top-k log-probabilities each; all numbers are finite."""
    body: dict[str, Any] = {"model": "default", "return_token_ids": True, "stream": streams, **fields}
    if endpoint == CHAT:
        body |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
        body["top_logprobs"] = body.pop("num_top", 2)
    else:
        body |= {"prompt": PROMPT, "logprobs": body.pop("num_top", 2)}
    response = httpx.post(toka.url + endpoint, json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not streams:
        whole = json.loads(response.text, parse_constant=not_json)
        answers = [to_answer([choice], whole.get("prompt_token_ids")) for choice in whole["choices"]]
        assert whole["usage"]["completion_tokens"] == sum(len(answer.token_ids) for answer in answers)
        return answers
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
    chunks = [json.loads(event, parse_constant=not_json) for event in events if event not in ("", "[DONE]")]
    prompt_ids = next((chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk), None)
    choices = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda choice: choice["index"])
    groups = itertools.groupby(choices, key=lambda choice: choice["index"])
    return [to_answer(list(parts), prompt_ids) for _, parts in groups]


def not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def to_answer(parts: list[dict[str, Any]], prompt_ids: list[int] | None) -> Answer:
    """parts: the choice, or its chunks."""
    names: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    for part in parts:
        own = part["logprobs"]
        if own is None:
            continue
        if "content" in own:
            names += [entry["token"] for entry in own["content"]]
            logprobs += [entry["logprob"] for entry in own["content"]]
            tops += [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in own["content"]]
        else:
            names += own["tokens"]
            logprobs += own["token_logprobs"]
            tops += own["top_logprobs"] or [{}] * len(own["tokens"])
            assert len(own["text_offset"]) == len(own["tokens"])
    ids = [token_id for part in parts for token_id in part.get("token_ids") or []]
    (reason,) = [part["finish_reason"] for part in parts if part["finish_reason"] is not None]
    if prompt_ids is None:
        prompt_ids = next(part["prompt_token_ids"] for part in parts if part["prompt_token_ids"])
    return Answer(prompt_ids, ids, names, logprobs, tops, reason)


class Ending(NamedTuple):
    fields: dict[str, Any]
    finish_reason: str = "stop"
    last_id: int | None = None
    num_tokens: int | None = None
    endpoints: tuple[str, ...] = (COMPLETIONS, CHAT)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}
ENDINGS = {
    "eos": Ending({"logit_bias": {str(IM_END): 6}}, last_id=IM_END),
    "eos at once": Ending({"logit_bias": {str(IM_END): 100}}, last_id=IM_END, num_tokens=1),
    "stop token": Ending({"stop_token_ids": [ord("z")], "logit_bias": {str(ord("z")): 6}}, last_id=ord("z")),
    "stop string of several tokens": Ending(
        {"stop": "ab", "logit_bias": {str(ord("a")): 30, str(ord("b")): 30}, "ignore_eos": True, "temperature": 2},
        last_id=ord("b"),
    ),
    "stop string inside a token": Ending(
        {"stop": "ell", "logit_bias": {str(HELLO): 7}, "ignore_eos": True}, last_id=HELLO
    ),
    "stop string from a token's middle to another's": Ending(
        {"stop": "llo w", "logit_bias": {str(HELLO): 30, str(SPACE_W): 30}, "ignore_eos": True}
    ),
    "length": Ending({"ignore_eos": True, "max_tokens": 5}, "length", num_tokens=5),
    "one token": Ending({"ignore_eos": True, "max_tokens": 1}, "length", num_tokens=1),
    "min_tokens": Ending({"min_tokens": 6, "logit_bias": {str(IM_END): 100}}, last_id=IM_END, num_tokens=7),
    "grammar": Ending({"guided_regex": "[a-c]{2}[0-9]"}),
    "choice": Ending({"guided_choice": ["hello world", "hell"]}),
    "tool call": Ending(
        {"tools": [TOOL], "tool_choice": "required", "logit_bias": {str(ord(space)): -100 for space in " \t\r\n"}},
        "tool_calls",
        endpoints=(CHAT,),
    ),
}


@pytest.mark.parametrize(
    ("name", "endpoint"), [(name, endpoint) for name, ending in ENDINGS.items() for endpoint in ending.endpoints]
)
def test_every_token_has_its_logprob_however_the_answer_ends(served: Served, name: str, endpoint: str) -> None:
    """Named by ids, the entries say which token each is of. Streams have the same ones."""
    ending = ENDINGS[name]
    common = {"max_tokens": 150, "seed": 3, "return_tokens_as_token_ids": True}
    for n in (1, 3):
        whole, streamed = (
            ask(served.toka, endpoint, streams, n=n, **common | ending.fields) for streams in (False, True)
        )
        assert len(whole) == len(streamed) == n
        for answer in (*whole, *streamed):
            assert answer.names == [f"token_id:{token_id}" for token_id in answer.token_ids]
            assert len(answer.logprobs) == len(answer.tops) == len(answer.token_ids) > 0
            assert all(-math.inf < value <= 0 for value in answer.logprobs)
            assert answer.finish_reason == ending.finish_reason
            assert ending.last_id in (None, answer.token_ids[-1])
            assert ending.num_tokens in (None, len(answer.token_ids))
            for own, value, top in zip(answer.names, answer.logprobs, answer.tops, strict=True):
                assert top.get(own, value) == value
                assert list(top.values()) == sorted(top.values(), reverse=True)
                assert all(key.startswith("token_id:") for key in top)
        assert [answer.token_ids for answer in streamed] == [answer.token_ids for answer in whole]
        for answer, other in zip(streamed, whole, strict=True):
            assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert_packed_alike(served.toka, endpoint, whole, n=n, **common | ending.fields)


def assert_packed_alike(toka: TokaProcess, endpoint: str, expected: list[Answer], **fields: Any) -> None:
    """The fingerprint has the same ids and log-probabilities."""
    body: dict[str, Any] = {"model": "default", "logprobs_in_fingerprint": True, **fields}
    if endpoint == CHAT:
        body |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": PROMPT, "logprobs": 2}
    packed = json.loads(httpx.post(toka.url + endpoint, json=body, timeout=60).json()["system_fingerprint"])
    assert packed["completion_ids"] == [answer.token_ids for answer in expected]
    chosen, top = (
        [np.frombuffer(base64.b64decode(text), "<f4") for text in packed[f"packed_{kind}_logprobs"]]
        for kind in ("chosen", "topk")
    )
    for answer, values, tops in zip(expected, chosen, top, strict=True):
        assert values == pytest.approx(answer.logprobs, abs=1e-4)
        assert len(tops) == 2 * len(values)
        assert np.isfinite(tops[::2]).all(), "one token is always possible"


RULES: dict[str, Any] = {"temperature": 0.7, "top_k": 60, "top_p": 0.9, "min_p": 1e-4, "repetition_penalty": 1.2}
BIAS = {"97": 3.0, "98": -2.0}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streams", [False, True])
def test_sampled_logprobs_are_those_of_the_distribution_that_transformers_logits_give(
    served: Served, endpoint: str, streams: bool
) -> None:
    """Asked for, and by the server's flag. Raw ones are those of the same tokens before all rules."""
    fields = {
        **RULES,
        "frequency_penalty": 0.5,
        "logit_bias": BIAS,
        "seed": 11,
        "max_tokens": 12,
        "n": 2,
        "num_top": 20,
    }
    by_ids = {"return_tokens_as_token_ids": True, "ignore_eos": True}
    by_mode = {
        mode: ask(
            served.toka, endpoint, streams, **fields, **by_ids, **({} if mode is None else {"logprobs_mode": mode})
        )
        for mode in (None, "sampled", "raw")
    }
    assert [answer.token_ids for answer in by_mode["raw"]] == [answer.token_ids for answer in by_mode["sampled"]]
    params = SamplingParams(**RULES, frequency_penalty=0.5)
    biases = tuple((int(token), bias) for token, bias in BIAS.items())
    for mode, answers in by_mode.items():
        row = Row(params, biases, as_sampled=mode != "raw")
        for answer in answers:
            text = answer.prompt_ids + answer.token_ids
            with torch.no_grad():
                logits = served.oracle(torch.tensor([text])).logits[0].double().numpy()
            num_prompt = len(answer.prompt_ids)
            for index, token_id in enumerate(answer.token_ids):
                end = num_prompt + index
                expected = distribution(logits[end - 1], row, text[:end], None, num_prompt)
                assert answer.logprobs[index] == pytest.approx(expected[token_id], abs=1e-3)
                top = {int(name.removeprefix("token_id:")): value for name, value in answer.tops[index].items()}
                num_possible = int(np.isfinite(expected).sum())
                assert len(top) - (token_id not in np.argsort(-expected)[:20]) <= min(20, num_possible)
                for other_id, value in top.items():
                    assert value == pytest.approx(expected[other_id], abs=1e-3)


def test_impossible_tokens_are_left_out_and_a_certain_one_has_probability_1(served: Served) -> None:
    for endpoint, streams in itertools.product((COMPLETIONS, CHAT), (False, True)):
        (answer,) = ask(served.toka, endpoint, streams, guided_choice=["hello"], num_top=20, seed=1)
        assert "".join(answer.names).removesuffix("<|im_end|>") == "hello"
        for name, value, top in zip(answer.names, answer.logprobs, answer.tops, strict=True):
            assert value <= 0
            assert len(top) < 20
            assert name in top
        (greedy,) = ask(served.toka, endpoint, streams, temperature=0, max_tokens=4)
        (raw,) = ask(served.toka, endpoint, streams, temperature=0, max_tokens=4, logprobs_mode="raw")
        assert greedy.logprobs == pytest.approx(raw.logprobs, abs=1e-5), "nothing is drawn"
        (only,) = ask(served.toka, endpoint, streams, top_k=1, max_tokens=4, ignore_eos=True)
        assert only.logprobs == [0] * 4
        assert [list(top.values()) for top in only.tops] == [[0]] * 4


def test_prompt_logprobs_are_raw_whatever_the_mode(served: Served) -> None:
    bodies = [
        {
            "model": "default",
            "prompt": PROMPT,
            "echo": True,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "max_tokens": 1,
            **RULES,
        }
        | {"logprobs_mode": mode, "return_tokens_as_token_ids": True}
        for mode in ("raw", "sampled")
    ]
    raw, sampled = (
        httpx.post(f"{served.toka.url}{COMPLETIONS}", json=body, timeout=60).json()["choices"][0] for body in bodies
    )
    num_prompt = len(raw["prompt_logprobs"])
    assert sampled["prompt_logprobs"] == raw["prompt_logprobs"]
    assert sampled["logprobs"]["token_logprobs"][:num_prompt] == raw["logprobs"]["token_logprobs"][:num_prompt]
    assert sampled["logprobs"]["top_logprobs"][:num_prompt] == raw["logprobs"]["top_logprobs"][:num_prompt]
    assert all(name.startswith("token_id:") for name in raw["logprobs"]["tokens"])


def test_a_mode_that_does_not_exist_is_refused(served: Served) -> None:
    for endpoint, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        body = {"model": "default", "logprobs_mode": "processed", **prompt}
        response = httpx.post(served.toka.url + endpoint, json=body, timeout=60)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "logprobs_mode"
        assert error["message"] == 'logprobs_mode must be "raw" or "sampled"'
