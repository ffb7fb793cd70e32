"""A real server of a model that transformers' own class computes: mixed experts, whose family the table lacks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.end_to_end.helpers.toka_process import running_toka, wait_for
from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.helpers.greedy_decoding import oracle_greedy
from tokasaurus import LLM, Sampling

FLAGS = ("dtype=float32", "kv_cache_num_tokens=1024", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "rl=T")
PROMPT = [11, 205, 77, 140, 31, 9, 254, 60] * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("flex_olmo")
    oracle = save_tiny_model(directory, tiny_config("flex_olmo"))
    save_byte_tokenizer(directory)
    return directory, oracle


@pytest.fixture(scope="module")
def http(model: tuple[Path, PreTrainedModel]) -> Iterator[httpx.Client]:
    with running_toka(f"model={model[0]}", *FLAGS) as toka, httpx.Client(base_url=toka.url, timeout=60) as client:
        yield client


def sampled(http: httpx.Client, num_samples: int = 1, prompt: list[int] = PROMPT) -> list[list[int]]:
    body = {"model": "default", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
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


@pytest.mark.long
def test_replicas_have_new_weights_also_after_a_death(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory, old = model
    new = save_tiny_model(tmp_path, tiny_config("flex_olmo"), seed=5)
    prompts = [[number, *PROMPT[number:]] for number in range(8)]
    with (
        running_toka(f"model={directory}", *FLAGS, "dp_size=2") as toka,
        httpx.Client(base_url=toka.url, timeout=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def answers() -> list[list[int]]:
            return [tokens for (tokens,) in pool.map(lambda prompt: sampled(client, prompt=prompt), prompts)]

        assert answers() == [oracle_greedy(old, prompt, 20)[0] for prompt in prompts]
        answer = client.post("/update_weights", json={"weight_dir": str(tmp_path), "version": "new"})
        assert answer.status_code == 200, answer.text
        expected = [oracle_greedy(new, prompt, 20)[0] for prompt in prompts]
        assert answers() == expected
        os.kill(toka.children()["toka-worker1-0"], signal.SIGKILL)
        wait_for(lambda: client.get("/ready").json()["replicas_up"] == 1, 60)
        wait_for(lambda: client.get("/ready").json()["replicas_up"] == 2, 200)
        assert answers() == expected


@pytest.mark.long
def test_a_program_and_a_batch_get_what_a_server_gives(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory, oracle = model
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [f"prompt {number} of a batch" for number in range(5)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    expected = [oracle_greedy(oracle, prompt, 20)[0] for prompt in prompts]
    with LLM(str(directory), dtype="float32", kv_cache_num_tokens=1024, show=False) as llm:
        results = llm.generate(texts, Sampling(temperature=0, max_tokens=20, ignore_eos=True))
        assert [result.samples[0].token_ids.tolist() for result in results] == expected
    body = {"model": "default", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": text}}
        for index, text in enumerate(texts)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = (f"model={directory}", f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out.jsonl'}", *FLAGS[:-1])
    done = subprocess.run(
        [sys.executable, "-m", "tokasaurus", "batch", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answers = [line["response"]["body"]["choices"][0]["text"] for line in found]
    assert answers == [tokenizer.decode(tokens) for tokens in expected]


def test_a_plan_counts_the_parameters_of_the_class(model: tuple[Path, PreTrainedModel]) -> None:
    directory, oracle = model
    command = [sys.executable, "-m", "tokasaurus", "plan", str(directory), "dtype=float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["workers"][0]["parts"]
    assert "CUDA graphs" in [part["name"] for part in parts]
    (weights,) = [part for part in parts if part["name"] == "weights"]
    assert weights["bytes"] == 4 * sum(parameter.numel() for parameter in oracle.parameters())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("tp_size=4",), "KV heads (2) cannot be divided among tp_size=4; tp_size may be 1, 2"),
        (("model_impl=native",), "model_type 'flex_olmo' is not supported"),
        (
            ("tp_size=2", "torch_compile=T", "async_tp_threshold=64"),
            "async_tp_threshold: there is none for a model that transformers' class computes",
        ),
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
