"""The device, and the dtypes of weights, activations and KV cache, by flag, device and processor."""

import pytest
import torch

from tokasaurus.messages.status import UserError
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.worker.device import (
    choose_activation_dtype,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    is_compiled,
)

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def pretend_cuda_devices(count: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """-> the devices that become the current one, as they do."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("name", ["cuda", None])
def test_each_worker_has_a_cuda_device_of_its_own_as_the_current_one(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = pretend_cuda_devices(3, monkeypatch)
    expected = [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:2")]
    assert [choose_device(name, index) for index in range(3)] == expected
    assert current == expected


def test_a_worker_without_a_cuda_device_of_its_own_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_cuda_devices(2, monkeypatch)
    with pytest.raises(UserError, match="worker 3 has no device of its own; torch sees only 2"):
        choose_device("cuda", 2)
    assert current == []


@pytest.mark.parametrize(("name", "num_devices"), [("cpu", 2), (None, 0)])
def test_workers_share_the_cpu(name: str | None, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_cuda_devices(num_devices, monkeypatch)
    assert [choose_device(name, index) for index in (0, 5)] == [CPU, CPU]
    assert current == []


@pytest.mark.parametrize(
    ("torch_compile", "device", "expected"),
    [(None, "cuda", True), (None, "cpu", False), (True, "cpu", True), (False, "cuda", False)],
)
def test_layers_are_compiled_by_default_on_cuda_alone(torch_compile: bool | None, device: str, expected: bool) -> None:
    assert is_compiled(torch_compile, torch.device(device)) == expected


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
