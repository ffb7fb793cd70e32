"""All tests that need a CUDA device: `python -m tests.gpu`. Without one, one line says so, and the exit code is 0."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    print("skipped: torch sees no CUDA device")
    sys.exit(0)
sys.exit(pytest.main(["-rs", str(Path(__file__).parent)]))
