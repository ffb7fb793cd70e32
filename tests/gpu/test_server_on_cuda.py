"""A whole server on a CUDA device, in float32, against transformers on the CPU."""

from pathlib import Path

import httpx
import pytest
import torch

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.helpers.greedy_decoding import oracle_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
NUM_TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, family)
    prompts = [[7 * index % 250 + 1 for index in range(1, 1 + length)] for length in (1, 5, 40, 130)]
    body = {"model": "default", "prompt": prompts, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
    with running_toka(f"model={tmp_path}", "device=cuda", "dtype=float32", "kv_cache_num_tokens=4096") as toka:
        answer = httpx.post(f"{toka.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.gauge("toka_graph_misses_total") == 0
        assert toka.stop() == 0
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for prompt, choice in zip(prompts, choices, strict=True):
        _, expected = oracle_greedy(oracle, prompt, NUM_TOKENS)
        # Where two tokens are as likely, the texts may part: until then, the logprobs are the same.
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=2e-3)


def test_samples_that_share_a_prefix_have_the_texts_of_separate_ones(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    prompt = [7 * index % 250 + 1 for index in range(300)]
    body = {"model": "default", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 1, "seed": 3, "n": 32}
    texts = []
    for flag in ("hydragen_min_group_size=2", "use_hydragen=F"):
        with running_toka(
            *(f"model={tmp_path}", "device=cuda", "dtype=float32", "kv_cache_num_tokens=8192", flag)
        ) as toka:
            answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
        texts.append({choice["index"]: choice["text"] for choice in answer.json()["choices"]})
    assert len(set(texts[0].values())) > 1
    assert texts[0] == texts[1]
