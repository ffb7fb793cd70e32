"""Devices are counted as torch counts them."""

from types import SimpleNamespace

import pytest
import torch

from tokasaurus.monitoring import cuda_devices as found_by
from tokasaurus.monitoring.cuda_devices import CudaDevices, cuda_devices

GIB = 1 << 30


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8f3,MIG-1", 2),
        ("3", 1),
        (" 2 , 1 ", 2),
        ("NoDevFiles", 0),
        ("0,none", 1),
    ],
)
def test_visible_devices_are_counted_as_torch_counts_them(
    listed: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_by, "_memory_of_devices", lambda: [GIB] * 4)
    monkeypatch.setattr(found_by, "_torch_build", lambda: SimpleNamespace(cuda="12.8", hip=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert cuda_devices() == CudaDevices(count, GIB)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cuda_devices() == CudaDevices(4, GIB)


def test_devices_that_torch_cannot_use_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_by, "_torch_build", lambda: SimpleNamespace(cuda=None, hip=None))
    monkeypatch.setattr(found_by, "_memory_of_devices", lambda: [GIB] * 2)
    assert cuda_devices() == CudaDevices(0, 0, num_unused=2)
    monkeypatch.setattr(found_by, "_memory_of_devices", lambda: None)
    assert cuda_devices() == CudaDevices(0, 0)


def test_devices_are_found_as_by_torch() -> None:
    found = cuda_devices()
    assert found is None or found.count == torch.cuda.device_count()
    assert found_by._torch_build().cuda == torch.version.cuda
