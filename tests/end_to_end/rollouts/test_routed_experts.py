"""Trainers that replay the experts of roll-outs: a real server's answers, read as vLLM's and SGLang's clients do,
against transformers' routers."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

from tests.end_to_end.helpers.rollouts import RolloutServer, rollout_server
from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.tiny_model import option_config, save_random_model
from tests.model.helpers.routed_experts import assert_are_of, oracle_experts

PROMPT = [72, 101, 108, 108, 111] * 9
BODY = {"model": "default", "prompt": PROMPT, "max_tokens": 20, "temperature": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("experts")
    return directory, save_random_model(directory, option_config("qwen3_moe", 1))


@pytest.fixture(scope="module")
def experts(oracle: tuple[Path, PreTrainedModel]) -> Iterator[RolloutServer]:
    with rollout_server(oracle[0]) as server:
        yield server


def of_vllm(choice: dict[str, Any]) -> NDArray[Any]:
    """As verifiers and prime-rl read it."""
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    assert found.dtype == np.uint8
    return np.asarray(found)


def of_sglang(meta_info: dict[str, Any], num_tokens: int) -> NDArray[Any]:
    """As slime reads it, whose configuration says how many layers and experts of a token there are."""
    found = np.frombuffer(base64.b64decode(meta_info["routed_experts"]), dtype=np.int32)
    return found.reshape(num_tokens, 3, 3)


def test_completions_have_the_experts_of_prompt_and_samples(
    experts: RolloutServer, oracle: tuple[Path, PreTrainedModel]
) -> None:
    """All samples but one find the prompt cached, and the later request does."""
    for body in (BODY | {"n": 4}, BODY | {"prompt": [PROMPT[:30], PROMPT + PROMPT]}):
        choices = experts.post("/v1/completions", body | {"return_routed_experts": True})["choices"]
        for choice in choices:
            assert_are_of(oracle[1], choice["prompt_token_ids"] + choice["token_ids"], of_vllm(choice))
    (choice,) = experts.post("/v1/completions", BODY)["choices"]
    assert "routed_experts" not in choice


def test_experts_are_of_the_tokens_asked_for(experts: RolloutServer, oracle: tuple[Path, PreTrainedModel]) -> None:
    """routed_experts_prompt_start alone asks for them, as vLLM's clients send it."""
    for first in (0, 7, len(PROMPT), 400):
        (choice,) = experts.post("/v1/completions", BODY | {"routed_experts_prompt_start": first})["choices"]
        assert_are_of(oracle[1], PROMPT + choice["token_ids"], of_vllm(choice), first)


def test_streams_end_with_them(experts: RolloutServer, oracle: tuple[Path, PreTrainedModel]) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "Hello"}], "stream": True, "return_routed_experts": True}
    del body["prompt"]
    with experts.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    tokens = list(events[0]["prompt_token_ids"])
    tokens += [token for event in events for token in event["choices"][0].get("token_ids", [])]
    with_experts = [event for event in events if "routed_experts" in event["choices"][0]]
    assert with_experts == events[-1:]
    assert_are_of(oracle[1], tokens, of_vllm(events[-1]["choices"][0]))


def test_token_routes_of_vllm_and_sglang_have_them(
    experts: RolloutServer, oracle: tuple[Path, PreTrainedModel]
) -> None:
    sampling = {"max_tokens": 9, "routed_experts_prompt_start": 3}
    answer = experts.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})
    (choice,) = answer["choices"]
    assert_are_of(oracle[1], PROMPT + choice["token_ids"], of_vllm(choice), 3)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    for first in (0, 5):
        asked = {"return_routed_experts": True, "routed_experts_start_len": first}
        answer = experts.post("/generate", body | asked)
        own = of_sglang(answer["meta_info"], len(PROMPT) + 8 - first)
        assert_are_of(oracle[1], PROMPT + answer["output_ids"], own, first)
    assert "routed_experts" not in experts.post("/generate", body)["meta_info"]


def test_aborted_roll_outs_have_those_of_their_tokens(
    experts: RolloutServer, oracle: tuple[Path, PreTrainedModel]
) -> None:
    """Many, so that they take longer than the abort."""
    body = BODY | {"prompt": [7], "max_tokens": 500, "ignore_eos": True, "return_routed_experts": True, "n": 48}
    with ThreadPoolExecutor(1) as pool:
        before = experts.toka.gauge("toka_generation_tokens_total")
        asked = pool.submit(experts.post, "/v1/completions", body)
        wait_for(lambda: experts.toka.gauge("toka_generation_tokens_total") > before + 5, 60)
        experts.post("/pause", mode="abort")
        experts.post("/resume")
        choices = asked.result()["choices"]
    assert any(choice["finish_reason"] == "abort" for choice in choices)
    for choice in choices[:8]:
        assert_are_of(oracle[1], [7] + choice["token_ids"], of_vllm(choice))


def test_a_model_without_experts_refuses_in_one_line(server: RolloutServer) -> None:
    for path, body in (
        ("/v1/completions", BODY),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}}),
        ("/generate", {"input_ids": PROMPT}),
    ):
        asks = {"return_routed_experts": True}
        asked = body | ({"sampling_params": asks} if path.startswith("/inference") else asks)
        answer = server.http.post(path, json=asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].endswith("is not possible: the model has no experts")
        assert error["param"].endswith("return_routed_experts")
    choice = server.post("/v1/completions", BODY | {"routed_experts_prompt_start": 0})["choices"][0]
    assert "routed_experts" not in choice


@pytest.mark.parametrize("flags", [[], pytest.param(["tp_size=2", "ep=T"], marks=pytest.mark.long)])
def test_tokens_of_each_expert_are_counted_on_demand(flags: list[str], oracle: tuple[Path, PreTrainedModel]) -> None:
    """Only tokens of requests are counted, none of the warm-up."""
    with rollout_server(oracle[0], "expert_counts=T", *flags) as server:
        (choice,) = server.post("/v1/completions", BODY | {"ignore_eos": True})["choices"]
        families = text_string_to_metric_families(server.http.get("/metrics").text)
    chosen = oracle_experts(oracle[1], PROMPT + choice["token_ids"])[:-1]
    layers = [index for index, layer in enumerate(oracle[1].model.layers) if hasattr(layer.mlp, "experts")]
    expected = {
        (str(layer), str(expert)): np.count_nonzero(chosen[:, layer] == expert)
        for layer in layers
        for expert in range(oracle[1].config.num_experts)
    }
    (found,) = (family.samples for family in families if family.name == "toka_expert_tokens")
    assert {(sample.labels["layer"], sample.labels["expert"]): sample.value for sample in found} == expected


def test_tokens_of_experts_are_not_counted_by_default(experts: RolloutServer) -> None:
    experts.post("/v1/completions", BODY)
    assert "toka_expert_tokens_total{" not in experts.http.get("/metrics").text


@pytest.mark.long
@pytest.mark.parametrize("flags", [["tp_size=2"], ["tp_size=2", "ep=T"], ["torch_compile=T"], ["dp_size=2"]])
def test_parts_of_a_model_and_compiled_layers_tell_them_too(
    flags: list[str], oracle: tuple[Path, PreTrainedModel]
) -> None:
    with rollout_server(oracle[0], *flags) as server:
        for choice in server.post("/v1/completions", BODY | {"return_routed_experts": True, "n": 4})["choices"]:
            assert_are_of(oracle[1], PROMPT + choice["token_ids"], of_vllm(choice))


@pytest.mark.long
def test_pipeline_stages_refuse(oracle: tuple[Path, PreTrainedModel]) -> None:
    with rollout_server(oracle[0], "pp_size=2") as server:
        answer = server.http.post("/v1/completions", json=BODY | {"return_routed_experts": True})
        assert answer.status_code == 400
        assert "pipeline stages do not tell each other" in answer.json()["error"]["message"]
