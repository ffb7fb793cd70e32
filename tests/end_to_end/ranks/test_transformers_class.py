"""A model that transformers' class computes, on several ranks over gloo: transformers' tokens, also after new weights
and after a sleep."""

from pathlib import Path

import httpx
import pytest

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.helpers.greedy_decoding import oracle_greedy

FLAGS = ("dtype=float32", "kv_cache_num_tokens=1024", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "rl=T")
PROMPT = [11, 205, 77, 140, 31, 9, 254, 60] * 5


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["tp_size=2", "pp_size=2", "tp_size=2 pp_size=2"])
def test_ranks_equal_transformers_with_old_and_new_weights(parallel: str, tmp_path: Path) -> None:
    oracles = [save_tiny_model(tmp_path / str(seed), tiny_config("flex_olmo"), seed) for seed in range(2)]
    expected = [oracle_greedy(oracle, PROMPT, 20) for oracle in oracles]
    save_byte_tokenizer(tmp_path / "0")
    with (
        running_toka(f"model={tmp_path / '0'}", *FLAGS, *parallel.split()) as toka,
        httpx.Client(base_url=toka.url, timeout=60) as http,
    ):
        assert_samples(http, *expected[0])
        assert http.post("/update_weights", json={"weight_dir": str(tmp_path / "1")}).status_code == 200
        assert_samples(http, *expected[1])
        assert http.post("/sleep", params={"level": 2}).status_code == 200
        assert http.post("/wake_up").status_code == 200
        assert_samples(http, *expected[1])


def assert_samples(http: httpx.Client, tokens: list[int], logprobs: list[float]) -> None:
    """Six samples at once, of a prompt in chunks."""
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json={**body, "n": 6, "return_token_ids": True, "logprobs": 1})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["token_ids"] == tokens
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
