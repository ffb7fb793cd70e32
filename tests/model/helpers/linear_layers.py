"""Random layers and input rows for gemm tests, and the tolerance of results."""

import torch

from tokasaurus.checkpoint.spec import NormSpec
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.decoder.layers import Norm

DTYPES = [torch.float32, torch.bfloat16]


# Largest error relative to the largest expected magnitude, which counts as at least 1: the rounding of a float32 sum,
# or of one bfloat16.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


def layer_kernels() -> LayerKernels:
    kernels = load_kernels()
    assert kernels is not None, "the tests need a C++ compiler"
    return LayerKernels(kernels)


def activation_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Type of the kernels' inputs and outputs on this machine, with weights of `weight_dtype`."""
    return layer_kernels().activation_dtype(weight_dtype)


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def make_norm(size: int, dtype: torch.dtype) -> Norm:
    norm = Norm(NormSpec(1e-5), size, dtype)
    fill(norm, seed=1)
    return norm


def random_rows(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    if expected.numel():
        error = float((result.double() - expected).abs().max() / expected.abs().max().clamp(min=1))
        assert error <= TOLERANCE[result.dtype]
