"""A served GGUF model in several files, against transformers with the weights of the same model in one file."""

from pathlib import Path

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.end_to_end.helpers.toka_process import running_toka
from tokasaurus.checkpoint import cache_directory, resolve_checkpoint, with_safetensors

FLAGS = ("dtype=float32", "kv_cache_num_tokens=1024", "max_tokens_per_forward=64", "max_seqs_per_forward=8")
NUM_TOKENS = 24


def test_a_model_in_three_files_is_served_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    for name in ("kernels", "gemm", "hydragen"):  # else the server would compile and measure again
        (shared := cache_directory() / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).symlink_to(shared)
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    tokens = ["<|end|>", *(chr(ord("!") + index) for index in range(79))]
    kinds = [3] + [1] * 79
    tokenizer = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["a b"]}
    tokenizer["tokenizer.ggml.tokens"][-1] = "ab"
    weights, kind = random_weights("llama", tied=True), GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "whole.gguf", "llama", weights, kind, tokenizer=tokenizer)
    write_gguf(tmp_path / "split.gguf", "llama", weights, kind, tokenizer=tokenizer, tensors_of_part=8)
    parts = sorted(tmp_path.glob("split-0000?-of-00003.gguf"))
    assert len(parts) == 3
    plain = with_safetensors(resolve_checkpoint(str(tmp_path / "whole.gguf")).directory)
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    reference = AutoTokenizer.from_pretrained(plain)
    prompt_ids = reference("Hab?")["input_ids"]
    (row,) = oracle.generate(
        torch.tensor([prompt_ids]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    ).tolist()
    expected = row[len(prompt_ids) :]
    (tmp_path / "whole.gguf").unlink()
    with running_toka(f"model={parts[0]}", *FLAGS) as toka:
        body = {"model": "split", "prompt": "Hab?", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{toka.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice["text"] == reference.decode(expected, skip_special_tokens=True)
