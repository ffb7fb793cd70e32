"""A server that uses FlashInfer on a CUDA device, against transformers in float32."""

import statistics
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import family_config, save_byte_tokenizer
from tests.model.helpers.greedy_decoding import oracle_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("flashinfer", reason="pip install flashinfer-python")


def test_a_servers_logprobs_are_as_near_to_float32_as_the_torch_backends(tmp_path: Path) -> None:
    oracle = save_model(tmp_path)
    errors = {name: logprob_errors(tmp_path, oracle, name, "cuda") for name in ("torch", "flashinfer")}
    assert errors["flashinfer"] <= 1.5 * errors["torch"] + 1e-3


def save_model(directory: Path) -> PreTrainedModel:
    """A tiny model with a head size that FlashInfer has kernels for."""
    config = family_config("qwen3")
    config.head_dim = 64
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    oracle.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return oracle


def logprob_errors(directory: Path, oracle: PreTrainedModel, backend: str, device: str) -> float:
    """Mean error of the first greedy token's log-probability, over prompts in one batch with shared prefixes."""
    few_shots = [7 * index % 250 + 1 for index in range(100)]
    prompts = [few_shots + [3 * index % 250 for index in range(1, length)] for length in range(2, 60)]
    flags = (f"model={directory}", f"device={device}", "dtype=bfloat16", "kv_cache_num_tokens=16384")
    with running_toka(*flags, f"attention_backend={backend}", "hydragen_min_group_size=2") as toka:
        body = {"model": "default", "prompt": prompts, "max_tokens": 16, "temperature": 0, "logprobs": 1}
        answer = httpx.post(f"{toka.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=600)
        assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    expected = [oracle_greedy(oracle, prompt, 1)[1][0] for prompt in prompts]
    pairs = zip(choices, expected, strict=True)
    return statistics.mean(abs(choice["logprobs"]["token_logprobs"][0] - right) for choice, right in pairs)
