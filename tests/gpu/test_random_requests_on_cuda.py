"""Ten thousand random requests on a CUDA device leave nothing behind."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.tiny_model import family_config, save_byte_tokenizer

NUM_REQUESTS = 10_000
NUM_CLIENTS = 48
FEW_SHOTS = [7 * index % 250 + 1 for index in range(200)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_random_requests_leave_no_block_and_no_memory(tmp_path: Path) -> None:
    """Far more than the KV cache holds at once; some clients leave before the end."""
    save_model(tmp_path)
    flags = ("device=cuda", "dtype=bfloat16", "kv_cache_num_tokens=8192", "max_seqs_per_forward=64")
    with running_toka(f"model={tmp_path}", *flags) as toka:
        run_requests(toka, NUM_REQUESTS // 10, seed=0)
        before = torch.cuda.mem_get_info()[0]  # of the whole device: the worker's memory is a part of it
        run_requests(toka, NUM_REQUESTS, seed=1)
        assert abs(torch.cuda.mem_get_info()[0] - before) < 64 << 20
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.gauge("toka_graph_misses_total") == 0
        assert toka.stop() == 0


def save_model(directory: Path) -> None:
    """A tiny model with a head size that FlashInfer has kernels for."""
    from transformers import AutoModelForCausalLM

    config = family_config("qwen3")
    config.head_dim = 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    save_byte_tokenizer(directory)


def run_requests(toka: TokaProcess, count: int, seed: int) -> None:
    """Requests of random shapes; afterwards, no sequence runs and no block is in use."""
    bodies = [make_body(random.Random(f"{seed} {index}")) for index in range(count)]
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    with httpx.Client(base_url=toka.url, timeout=300, limits=limits) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        statuses = list(pool.map(lambda body: send(client, body), bodies))
    assert set(statuses) == {200}
    wait_for(lambda: toka.gauge("toka_requests_running") == 0, timeout_s=60)
    assert toka.gauge("toka_kv_blocks_used") == 0


def make_body(rng: random.Random) -> dict[str, object]:
    prompt = FEW_SHOTS[: rng.choice([0, 0, 100, 200])] + [rng.randrange(250) for _ in range(rng.randint(1, 120))]
    body: dict[str, object] = {"model": "default", "prompt": prompt, "max_tokens": rng.randint(1, 60)}
    body |= {"n": rng.choice([1, 1, 1, 2, 8]), "temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(1000)}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {"65": 2}}
    if rng.random() < 0.2:
        body |= {"top_p": 0.8, "top_k": 20}
    if rng.random() < 0.2:
        body["logprobs"] = 3
    if rng.random() < 0.1:
        body |= {"stream": True}
    return body


def send(client: httpx.Client, body: dict[str, object]) -> int:
    """The status; of a stream, only the beginning is read."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if "stream" in body:
            next(answer.iter_lines())
        else:
            answer.read()
        return answer.status_code
