"""Dtypes of weights, activations and KV cache, by flag, device and processor."""

import pytest
import torch

from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.worker.device import choose_activation_dtype, choose_dtype, choose_kv_cache_dtype

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def kernels_with(has_bfloat16_arithmetic: bool, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = load_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "has_bfloat16_arithmetic", has_bfloat16_arithmetic)
    return kernels


def chosen(
    dtype: str | None, kv_cache_dtype: str | None, kernels: Kernels | None, is_compiled: bool = False
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """-> dtypes of weights, activations and KV cache."""
    weights = choose_dtype(dtype, CPU, kernels, is_compiled)
    activations = choose_activation_dtype(weights, kernels, is_compiled)
    return weights, activations, choose_kv_cache_dtype(kv_cache_dtype, weights, activations)


def test_kernels_that_multiply_bfloat16_use_it_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(True, monkeypatch)
    assert chosen(None, None, kernels) == (BFLOAT16, BFLOAT16, BFLOAT16)
    assert chosen("float32", None, kernels) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen(None, "float32", kernels) == (BFLOAT16, BFLOAT16, FLOAT32)


def test_other_kernels_widen_bfloat16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(False, monkeypatch)
    assert chosen(None, None, kernels) == (BFLOAT16, FLOAT32, FLOAT16)
    assert chosen("float32", None, kernels) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen(None, "bfloat16", kernels) == (BFLOAT16, FLOAT32, BFLOAT16)


def test_compiled_layers_compute_in_the_dtype_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with(False, monkeypatch)
    assert chosen(None, None, kernels, is_compiled=True) == (FLOAT32, FLOAT32, FLOAT32)
    assert chosen("bfloat16", None, kernels, is_compiled=True) == (BFLOAT16, BFLOAT16, BFLOAT16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_torch_uses_the_requested_dtype(dtype: str) -> None:
    assert chosen(dtype, None, None) == (getattr(torch, dtype),) * 3
