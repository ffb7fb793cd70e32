"""Tensors in memory of huge pages."""

import pytest
import torch

from tokasaurus.model.kernels import huge_pages
from tokasaurus.model.kernels.huge_pages import HugePageTensors


def test_tensors_are_apart_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 1000)  # so that some begin a chunk, and one is more than it
    memory = HugePageTensors()
    shapes: list[tuple[int, ...]] = [(3, 5), (1,), (0,), (7, 11, 2), (40, 40), (2, 2), (15, 16)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = [torch.randn(shape).mul(100).to(dtype) for shape in shapes for dtype in dtypes]
    copies = [memory.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):  # after all were written
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
