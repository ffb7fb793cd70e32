"""Servers whose layers have windows or states, against transformers' logits over whole sequences."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.end_to_end.helpers.scrape import scrape
from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.examples import few
from tests.helpers.tiny_model import VOCAB_SIZE, option_config, save_random_model
from tokasaurus import LLM, Sampling
from tokasaurus.checkpoint.families.states import FAMILIES as FAMILIES_WITH_STATES
from tokasaurus.library.results import Result

WINDOW, NEW_TOKENS = 40, 48
FLAGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "show": False, "max_seqs_per_forward": 16}
GROUPS: dict[str, Any] = {"use_hydragen": True, "hydragen_min_group_size": 2, "hydragen_min_prefix_len": 16}
SMALL: dict[str, Any] = {"kv_cache_num_tokens": 420, "early_stopping_init_mean": 0.02, "track_early_stopping": False}
"""Far more sequences are admitted than fit, so that preemption is constant."""

SAMPLING = Sampling(n=3, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True)


def save_model(family: str, directory: Path) -> PreTrainedModel:
    if family in FAMILIES_WITH_STATES:
        sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024}
        if family.startswith("qwen"):  # a stage of two layers has one with attention
            sizes["layer_types"] = ["linear_attention", "full_attention"] * 2
        return save_random_model(directory, option_config(family, 0, **sizes))
    window = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 8, window: WINDOW, "max_position_embeddings": 1024}
    return save_random_model(directory, option_config(family, 0, **sizes))


def make_prompts() -> list[list[int]]:
    """Some share more tokens than a window, some fewer, some none; shorter and longer than it; and whole blocks."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 250, 130).tolist()
    prompts = [shared + random.integers(0, 250, number).tolist() for number in (1, 14, 30, 62, 165)]
    return [*prompts, *(random.integers(0, 250, number).tolist() for number in (3, 64, 200, 256))]


@torch.inference_mode()
def assert_as_transformers(model: PreTrainedModel, prompts: list[list[int]], results: list[Result]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            token_ids = sample.token_ids.tolist()
            assert len(token_ids) == NEW_TOKENS
            logits = model(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
            expected = logits.float().log_softmax(-1)
            assert expected.argmax(-1).tolist() == token_ids
            of_tokens = expected[torch.arange(NEW_TOKENS), token_ids]
            np.testing.assert_allclose(sample.logprobs, of_tokens, atol=1e-4)


@few(
    5,
    ("family", "flags"),
    [
        ("gemma3_text", {"max_tokens_per_forward": 64, "kv_cache_num_tokens": 8192, **GROUPS}),
        ("gpt_oss", {"max_tokens_per_forward": 64, **SMALL}),
        ("qwen3_next", {"max_tokens_per_forward": 64, "kv_cache_num_tokens": 8192, **GROUPS}),
        ("qwen3_5_text", {"max_tokens_per_forward": 64, **SMALL}),
        ("llama4_text", {"max_tokens_per_forward": 50, "kv_cache_num_tokens": 1600}),
        ("gemma3_text", {"max_tokens_per_forward": 70, "kv_cache_num_tokens": 1600, "attention_backend": "torch"}),
        ("olmo3", {"max_tokens_per_forward": 64, "pp_size": 2, **SMALL}),
        ("gemma3_text", {"max_tokens_per_forward": 64, "pp_size": 2, **SMALL}),
        ("cohere2", {"max_tokens_per_forward": 37, "tp_size": 2, **SMALL}),
        ("gemma2", {"max_tokens_per_forward": 1024, "kv_cache_num_tokens": 1200, "torch_compile": True}),
        ("olmo3", {"max_tokens_per_forward": 19, "kv_cache_num_tokens": 1200, "dp_size": 2}),
        ("lfm2", {"max_tokens_per_forward": 50, "attention_backend": "torch", "dp_size": 2, **SMALL}),
        ("qwen3_5_text", {"max_tokens_per_forward": 37, "kv_cache_num_tokens": 1600, "pp_size": 2}),
        ("lfm2", {"max_tokens_per_forward": 19, "kv_cache_num_tokens": 1200, "tp_size": 2}),
        ("qwen3_next", {"max_tokens_per_forward": 1024, "kv_cache_num_tokens": 1200, "torch_compile": True}),
    ],
)
def test_answers_equal_transformers(family: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """From nothing cached, from the cache, after evictions, and as prompts that go on where answers ended."""
    model, prompts = save_model(family, tmp_path), make_prompts()
    with LLM(str(tmp_path), **FLAGS, **flags) as llm:
        first = llm.generate(prompts, SAMPLING, progress=False)
        assert_as_transformers(model, prompts, first)
        assert_as_transformers(model, prompts[::-1], llm.generate(prompts[::-1], SAMPLING, progress=False))
        longer = [
            prompt + result.samples[0].token_ids.tolist()[:33] for prompt, result in zip(prompts, first, strict=True)
        ]
        assert_as_transformers(model, longer, llm.generate(longer, SAMPLING, progress=False))
        scores = llm.score(prompts, [[1, 2, 3]] * len(prompts), progress=False)
    for prompt, score in zip(prompts, scores, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, 1, 2]]), use_cache=False).logits[0, len(prompt) - 1 :]
        expected = logits.float().log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 3])]
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)


def test_more_sequences_run_at_once_in_the_same_memory(tmp_path: Path) -> None:
    """Eight layers of which seven see 40 tokens: contexts of 800 tokens take 50 blocks and 7 x 4, not 8 x 50."""
    save_model("gemma3_text", tmp_path)
    prompts = [np.random.default_rng(number).integers(0, 250, 600).tolist() for number in range(12)]
    body = {"model": "default", "prompt": prompts, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    flags = ("dtype=float32", "kv_cache_num_tokens=2400", "max_seqs_per_forward=16", "max_tokens_per_forward=64")
    with running_toka(f"model={tmp_path}", *flags) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        page = scrape(server.url)
    assert len(answer["choices"]) == len(prompts)
    assert page.value("toka_preemptions_total") == 0
    assert page.value("toka_kv_blocks") == 8 * 2400 / 16
    assert page.value("toka_kv_blocks_used") == 0
