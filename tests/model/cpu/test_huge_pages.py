"""Memory in huge pages: tensors in it, and touching it in the background."""

import ctypes
import mmap
import sys

import pytest
import torch

from tests.helpers.limits import join
from tests.model.helpers.peak_memory import reset_peak
from tokasaurus.model.cpu import bindings
from tokasaurus.model.cpu.bindings import HugePageTensors, load_kernels, touch_in_background


def test_tensors_do_not_overlap_and_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small, so that some tensors begin a chunk and one is larger than a chunk.
    monkeypatch.setattr(bindings, "_CHUNK_BYTES", 1000)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_allocated_at_once_and_becomes_resident_when_touched() -> None:
    num_bytes = 96 << 20
    before = reset_peak()
    memory = bindings.allocate_huge_pages(num_bytes).view(3, -1)
    assert reset_peak() - before < 8 << 20
    for thread in touch_in_background(memory, load_kernels(), num_threads=2):
        join(thread)
    assert reset_peak() - before >= num_bytes
    assert not memory.any()


def test_touching_does_not_overwrite_concurrent_writes() -> None:
    memory = bindings.allocate_huge_pages(64 << 20).view(4, -1)
    expected = torch.randint(256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    threads = touch_in_background(memory, load_kernels(), num_threads=3)
    memory.copy_(expected)
    for thread in threads:
        join(thread)
    assert torch.equal(memory, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system which pages are resident")
def test_the_beginning_of_every_area_is_touched_before_the_rest_of_any() -> None:
    """With 3 areas of 4 chunks, of which 9 chunks are already claimed, the last chunk of each area is touched."""
    area_bytes = 8 << 20
    memory = mmap.mmap(-1, 3 * area_bytes)  # in small pages
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    num_claimed = ctypes.c_int64(9)
    load_kernels().library.toka_touch(
        ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(3), ctypes.c_int64(area_bytes), ctypes.byref(num_claimed)
    )
    num_pages = len(tensor) // mmap.PAGESIZE
    is_resident = (ctypes.c_ubyte * num_pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(len(tensor)), is_resident) == 0
    areas = torch.tensor(list(is_resident)).view(3, 4, -1)
    assert not areas[:, :3].any()
    assert areas[:, 3].all()
