"""The Triton kernels of the layers on a CUDA device, against float64."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of float32, a few roundings and an approximate exponential; of the others one rounding, of 2^-11 or 2^-8."""
SIZES = ((1, 1), (3, 100), (1, 2048), (64, 2880), (1024, 4096), (7, 8192))
"""Tokens, and numbers of each."""
HEADS = ((9, 3, 64), (32, 8, 64), (32, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128), (7, 1, 80), (16, 16, 256))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_tokens", "size"), SIZES)
def test_add_norm_equals_float64(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    from tests.model.decoder.helpers.layer_kernels import LayerKernels

    LayerKernels(CUDA, TOLERANCES).check_add_norm(num_tokens, size, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_tokens", "size"), SIZES)
def test_silu_mul_equals_float64(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    from tests.model.decoder.helpers.layer_kernels import LayerKernels

    LayerKernels(CUDA, TOLERANCES).check_silu_mul(num_tokens, size, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_heads_equals_float64(heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool) -> None:
    from tests.model.decoder.helpers.layer_kernels import LayerKernels

    for num_tokens in (1, 7, 1024):
        LayerKernels(CUDA, TOLERANCES).check_rotate_heads(num_tokens, heads, dtype, has_norm)


def test_a_key_that_overflows_is_found() -> None:
    from tests.model.decoder.helpers.layer_kernels import LayerKernels

    LayerKernels(CUDA, TOLERANCES).check_overflow()
