"""What compiled layers launch on CUDA, counted in the code that Inductor makes for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA, but no device")
@pytest.mark.parametrize(("family", "kernels"), [("llama", 6), ("qwen3", 8)])
def test_compiled_layers_launch_few_kernels_beside_gemms_and_attention(family: str, kernels: int) -> None:
    """Four layers, with what comes before the first and after the last. The kernels count by 32 bits."""
    command = [sys.executable, "-m", "tests.model.decoder.helpers.cuda_launches", family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"kernels": 4 * kernels, "gemms": 16, "index_types": ["i32"]}
