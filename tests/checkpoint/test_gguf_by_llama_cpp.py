"""The files of families with experts that other tests read are what llama.cpp reads: it gives transformers'
log-probabilities for them."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.helpers.gguf_families import WITH_EXPERTS, write_family_gguf
from tests.helpers.tiny_model import option_config, save_random_model

# What llama.cpp takes to be every model's: as many KV heads as others, no biases, the width of shared experts by the
# number of KV heads, and YaRN's limits as whole channels, which published models have or are close to.
_PUBLISHED: dict[tuple[str, int], dict[str, Any]] = {
    ("olmoe", 0): {"num_key_value_heads": 4},
    ("dots1", 1): {"num_key_value_heads": 4, "attention_bias": False},
    ("ernie4_5_moe", 0): {"moe_intermediate_size": 24},
    ("hunyuan_v1_moe", 1): {"attention_bias": False},
    ("gpt_oss", 0): {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        }
    },
}

# Reads a file's path, token ids, and where to save scores. In a process of its own, which llama.cpp may abort.
_PROGRAM = """
import sys
import numpy as np
from llama_cpp import Llama
token_ids = [int(each) for each in sys.argv[2].split(",")]
model = Llama(sys.argv[1], n_ctx=256, n_batch=64, logits_all=True, verbose=True, type_k=0, type_v=0, flash_attn=False)
model.eval(token_ids)
np.save(sys.argv[3], model.scores[: len(token_ids)])
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="no test installs llama-cpp-python: it compiles 20 minutes")
@pytest.mark.parametrize(("family", "number", "sizes"), WITH_EXPERTS)
def test_llama_cpp_computes_what_transformers_does(
    family: str, number: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    config = option_config(family, number, **sizes | _PUBLISHED.get((family, number), {}))
    oracle = save_random_model(tmp_path / "saved", config)
    path, scores, token_ids = tmp_path / "model.gguf", tmp_path / "scores.npy", torch.arange(40) * 5
    write_family_gguf(path, oracle, num_tokens=config.vocab_size)
    arguments = [str(path), ",".join(map(str, token_ids.tolist())), str(scores)]
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0].log_softmax(-1)
    found = torch.from_numpy(np.load(scores)).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
