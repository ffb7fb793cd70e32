"""Engines with an int8 KV cache: what they sample is as likely as they score it, whatever happens to its blocks; scores
are near those of a float32 cache; start and metrics know the cache's size and type."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.examples import few
from tests.helpers.tiny_model import (
    OPTIONS,
    VOCAB_SIZE,
    family_config,
    option_config,
    save_byte_tokenizer,
    save_random_model,
    save_tiny_model,
)
from tokasaurus import LLM, Sampling
from tokasaurus.text.tokenizer import Tokenizer

SMALL_FORWARDS: dict[str, Any] = {
    "dtype": "float32",
    "max_seqs_per_forward": 16,
    "max_tokens_per_forward": 64,
    "device": "cpu",
    "show": False,
}
GROUPS: dict[str, Any] = {"use_hydragen": True, "hydragen_min_group_size": 2, "hydragen_min_prefix_len": 16}
SHARED = "It was a bright cold day in April, and the clocks were striking thirteen; Winston Smith, "
PROMPTS = [f"{SHARED}his chin nuzzled into his breast, {number} times" for number in range(4)]
SAMPLING = Sampling(n=4, temperature=1, seed=7, max_tokens=60, ignore_eos=True)
CLOSE, NEAR = 0.005, 0.05
"""Mean differences of log-probabilities: computed in other ways, where a number near the middle of two codes may become
either, and with exact keys and values. The tiny models' matrices are large."""


def prompt_ids(directory: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(directory)
    return [tokenizer.encode(prompt, False) for prompt in PROMPTS]


def scored(llm: LLM, prompts: list[list[int]], token_ids: list[list[int]]) -> NDArray[np.float32]:
    """The log-probabilities of all completions, SAMPLING.n of each prompt."""
    scores = llm.score([prompt for prompt in prompts for _ in range(SAMPLING.n)], token_ids, progress=False)
    return np.concatenate([score.logprobs for score in scores])


@few(
    2,
    ("family", "flags"),
    [
        ("llama", {"kv_cache_num_tokens": 8192, "use_hydragen": False}),
        # Sequences outgrow the cache, since their lengths are underestimated: they are preempted, and computed again.
        (
            "qwen3",
            {"kv_cache_num_tokens": 480, "early_stopping_init_mean": 0.02, "track_early_stopping": False, **GROUPS},
        ),
        ("gemma2", {"kv_cache_num_tokens": 8192, "pp_size": 2, **GROUPS}),
        ("gemma3_text", {"kv_cache_num_tokens": 8192, "tp_size": 2, **GROUPS}),
    ],
)
def test_what_is_sampled_is_as_likely_as_it_is_scored(family: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """With layers that have windows and caps among them."""
    config = option_config(family, 0, vocab_size=VOCAB_SIZE) if family in OPTIONS else family_config(family)
    save_random_model(tmp_path, config)
    save_byte_tokenizer(tmp_path)
    prompts = prompt_ids(tmp_path)
    with LLM(str(tmp_path), **SMALL_FORWARDS, **flags, kv_cache_dtype="int8") as llm:
        samples = [sample for result in llm.generate(prompts, SAMPLING, progress=False) for sample in result.samples]
        token_ids = [sample.token_ids.tolist() for sample in samples]
        rescored = scored(llm, prompts, token_ids)
    sampled = np.concatenate([sample.logprobs for sample in samples if sample.logprobs is not None])
    assert len(sampled) == len(PROMPTS) * SAMPLING.n * SAMPLING.max_tokens
    assert np.abs(sampled - rescored).mean() < CLOSE
    with LLM(str(tmp_path), **SMALL_FORWARDS, kv_cache_dtype="float32", kv_cache_num_tokens=8192) as llm:
        exact = scored(llm, prompts, token_ids)
    assert 1e-6 < np.abs(rescored - exact).mean() < NEAR


def test_start_and_metrics_know_the_cache(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    flags = (f"model={tmp_path}", "device=cpu", "kv_cache_dtype=int8", "vllm_metrics=T", "kv_cache_num_tokens=4096")
    with running_toka(*flags) as toka:
        assert 'cache_dtype="int8"' in httpx.get(f"{toka.url}/metrics").text
        block_bytes = 3 * 2 * 2 * 16 * (16 + 2)  # layers, keys and values, KV heads, tokens; a head's numbers, a scale
        assert any(f"256 blocks of {block_bytes / 1024:.4g} KiB" in line for line in toka.lines)
        assert toka.stop() == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("device=cuda", "kv_cache_dtype=int8: does not run with device=cuda"),
        ("device=cpu cpu_isa=torch", "kv_cache_dtype=int8: does not run with cpu_isa=torch"),
        (
            "device=cpu attention_backend=torch",
            "kv_cache_dtype=int8: only the CPU kernels have it, not attention_backend=torch",
        ),
        ("device=cpu attention_backend=reference", "only the CPU kernels have it, not attention_backend=reference"),
        (
            "device=cpu page_size=8",
            "kv_cache_dtype=int8: the CPU kernels do not support page_size=8 (a multiple of 16)",
        ),
    ],
)
def test_it_is_refused_by_one_line_where_there_is_none(flags: str, reason: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    command = [sys.executable, "-m", "tokasaurus", f"model={tmp_path}", "port=1", "kv_cache_dtype=int8", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "int8" in line][-1].endswith(reason), done.stderr
