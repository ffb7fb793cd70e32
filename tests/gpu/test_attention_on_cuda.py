"""Paged attention on a CUDA device, in the dtypes of a served model, against float64 on the CPU."""

import pytest
import torch

from tests.model.helpers.float64_attention import attention_beside_float64
from tests.model.helpers.paged_problems import Segment
from tokasaurus.model.attention.backend import KVShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_are_not_rounded_to_16_bits(dtype: torch.dtype, head_dim: int) -> None:
    """Rounded to bfloat16, they would change the LSE by up to 0.05. The output has the rounding of the weights."""
    shape = KVShape(1, 6, 2, head_dim, 16, dtype, torch.device("cuda"))
    segments = [Segment(1, 600), Segment(1, 33), Segment(40, 200)]
    (output, lse), (expected, expected_lse) = attention_beside_float64("torch", shape, segments)
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-4, rtol=0)
    torch.testing.assert_close(output.double(), expected, atol=1e-2, rtol=0)
