"""The memory reserved for forwards is enough for the largest ones, and less than twice what they use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.tiny_model import save_byte_tokenizer


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_forwards_use_more_than_half_of_the_reserved_memory_and_no_more_than_all(
    dtype: str, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    # In a process of its own: in this one, memory freed by earlier tests would be reused.
    command = [sys.executable, "-m", "tests.model.helpers.largest_forward", str(tmp_path), dtype]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert found["reserved"] / 2 < found["grown"] <= found["reserved"], found
