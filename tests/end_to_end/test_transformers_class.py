"""A real server of a model that transformers' own class computes: mixed experts, whose family the table lacks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.helpers.greedy_decoding import oracle_greedy

FLAGS = ("dtype=float32", "kv_cache_num_tokens=1024", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "rl=T")
PROMPT = [11, 205, 77, 140, 31, 9, 254, 60] * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("mixtral")
    oracle = save_tiny_model(directory, tiny_config("mixtral"))
    save_byte_tokenizer(directory)
    return directory, oracle


@pytest.fixture(scope="module")
def http(model: tuple[Path, PreTrainedModel]) -> Iterator[httpx.Client]:
    with running_toka(f"model={model[0]}", *FLAGS) as toka, httpx.Client(base_url=toka.url, timeout=60) as client:
        yield client


def sampled(http: httpx.Client, num_samples: int = 1) -> list[list[int]]:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json={**body, "n": num_samples, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_samples_equal_transformers(model: tuple[Path, PreTrainedModel], http: httpx.Client) -> None:
    expected, _ = oracle_greedy(model[1], PROMPT, 20)
    assert sampled(http) == [expected]
    assert sampled(http, 6) == [expected] * 6


def test_texts_are_the_same_after_a_sleep_without_weights(
    model: tuple[Path, PreTrainedModel], http: httpx.Client
) -> None:
    expected, _ = oracle_greedy(model[1], PROMPT, 20)
    assert http.post("/sleep", params={"level": 2}).status_code == 200
    assert http.post("/wake_up").status_code == 200
    assert sampled(http) == [expected]


def test_a_plan_counts_the_parameters_of_the_class(model: tuple[Path, PreTrainedModel]) -> None:
    directory, oracle = model
    command = [sys.executable, "-m", "tokasaurus", "plan", str(directory), "dtype=float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["workers"][0]["parts"]
    assert "CUDA graphs" not in [part["name"] for part in parts]
    (weights,) = [part for part in parts if part["name"] == "weights"]
    assert weights["bytes"] == 4 * sum(parameter.numel() for parameter in oracle.parameters())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("tp_size=2",), "tp_size and pp_size must be 1 for a model that transformers' class computes"),
        (("model_impl=native",), "model_type 'mixtral' is not supported"),
        (("torch_compile=T",), "torch_compile=T: there is none for a model that transformers' class computes"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    flags: tuple[str, ...], words: str, model: tuple[Path, PreTrainedModel]
) -> None:
    command = [sys.executable, "-m", "tokasaurus", f"model={model[0]}", "port=0", *FLAGS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr + done.stdout


def test_encoders_and_states_are_refused_with_the_reason(tmp_path: Path) -> None:
    tiny_config("mamba").save_pretrained(tmp_path)
    torch.save({}, tmp_path / "nothing.bin")
    command = [sys.executable, "-m", "tokasaurus", "check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "MambaForCausalLM keeps a state beside keys and values" in done.stderr
