"""Packed staging over pretended copies: contents, the order of copies and work, and the ring of buffers."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model.helpers.pretend_device import DEVICE, PretendEvent, PretendTransfers, on_device, on_host, pretended
from tokasaurus.messages.forward import ForwardInput, TokenMasks
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.buffer_sizes import RING_SIZE, sizes_for
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.staging.packed import HostResults, PackedResults, PackedStaging
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, longest_last_tokens, widest_prefill

DTYPES = (np.int32, np.int64, np.float32, np.uint8, np.bool_)


def random_array(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Of any dtype, with 1 to 3 dimensions, some of them 0; not always contiguous."""
    shape = tuple(rng.integers(0, 9, rng.integers(1, 4)).tolist())
    array = rng.integers(0, 2**31, shape).astype(DTYPES[rng.integers(len(DTYPES))])
    return array.T if rng.random() < 0.3 else array


def check(staged: list[tuple[Tensor, np.ndarray[Any, Any]]]) -> None:
    for tensor, array in staged:
        assert tensor.device == DEVICE
        assert np.array_equal(on_host(tensor).numpy(), array)


def test_every_array_arrives_in_one_copy() -> None:
    rng = np.random.default_rng(0)
    with pretended():
        transfers = PretendTransfers()
        staging = PackedStaging(transfers)
        for _ in range(50):
            staging.begin()
            arrays = [random_array(rng) for _ in range(rng.integers(0, 30))]
            staged = [(staging.to_device(array), array) for array in arrays]
            num_before = len(transfers.uploads)
            staging.send()
            check(staged)
            staging.finish()
            assert len(transfers.uploads) - num_before == any(array.size for array in arrays)


def test_a_step_that_does_not_fit_arrives_in_several_copies_from_buffers_that_stay() -> None:
    rng = np.random.default_rng(1)
    arrays = [random_array(rng) for _ in range(200)]
    with pretended():
        transfers = PretendTransfers()
        staging = PackedStaging(transfers, num_bytes=64)
        num_copies = []
        for _ in range(3 * RING_SIZE):
            num_before = len(transfers.uploads)
            staging.begin()
            staged = [(staging.to_device(array), array) for array in arrays]
            staging.send()
            check(staged)
            staging.finish()
            num_copies.append(len(transfers.uploads) - num_before)
            if len(num_copies) == RING_SIZE:
                addresses = [buffer.data_ptr() for buffer in transfers.buffers]
    assert min(num_copies) > 2
    assert [buffer.data_ptr() for buffer in transfers.buffers] == addresses
    assert len(set(num_copies)) == 1


def test_soon_no_buffer_is_added_whatever_the_order_of_large_and_small_arrays() -> None:
    arrays = [np.arange(20), np.arange(3), np.arange(4000), np.arange(30), np.arange(5)]
    with pretended():
        transfers = PretendTransfers()
        staging = PackedStaging(transfers, num_bytes=256)

        def stage(some: list[np.ndarray[Any, Any]]) -> None:
            staging.begin()
            staged = [(staging.to_device(array), array) for array in some]
            staging.send()
            check(staged)
            staging.finish()

        orders = (arrays[:2] + arrays[3:], arrays, arrays[::-1], arrays[:2])
        for some in orders * 4 * RING_SIZE:
            stage(some)
        num_buffers = len(transfers.buffers)
        for some in orders * RING_SIZE:
            stage(some)
        assert len(transfers.buffers) == num_buffers


def test_a_buffer_is_written_again_only_after_its_copy() -> None:
    """No copy runs until the host waits for it: at the latest when its buffer is due."""
    rng = np.random.default_rng(2)
    with pretended():
        staging = PackedStaging(PretendTransfers(is_late=True))
        steps: list[list[tuple[Tensor, np.ndarray[Any, Any]]]] = []
        for step in range(30):
            staging.begin()
            if step >= RING_SIZE:
                check(steps[step - RING_SIZE])
            arrays = [random_array(rng) + 1 for _ in range(5)]
            arrays.append(np.full(4, step + 1))
            steps.append([(staging.to_device(array), array) for array in arrays])
            staging.send()
            staging.finish()
            last, expected = steps[step][-1]
            assert not np.array_equal(on_host(last).numpy(), expected), "the copy does not run before"


def test_a_copy_waits_for_the_step_that_reads_its_buffer() -> None:
    finished: list[PretendEvent] = []

    class Recording(PretendTransfers):
        def record(self) -> PretendEvent:
            finished.append(PretendEvent())
            return finished[-1]

    with pretended():
        transfers = Recording()
        staging = PackedStaging(transfers)
        created, finished[:] = list(finished), []
        assert len(created) == RING_SIZE
        for _ in range(12):
            staging.begin()
            staging.to_device(np.zeros(3, np.int32))
            staging.send()
            staging.finish()
    waited_for = [after for _, after in transfers.uploads]
    assert set(waited_for[:RING_SIZE]) == set(created)
    assert waited_for[RING_SIZE:] == finished[:-RING_SIZE]
    sources = [source for source, _ in transfers.uploads]
    assert len(set(sources)) == RING_SIZE
    assert sources[RING_SIZE:] == sources[:-RING_SIZE]


def test_work_runs_in_order_once_the_arrays_are_there() -> None:
    rng = random.Random(3)
    with pretended():
        staging = PackedStaging(PretendTransfers())
        for _ in range(10):
            staging.begin()
            order: list[int] = []
            values = [rng.randrange(1000) for _ in range(20)]

            def note(tensor: Tensor, value: int, order: list[int] = order) -> None:
                assert on_host(tensor).tolist() == [value]
                order.append(value)

            for value in values:
                tensor = staging.to_device(np.array([value]))
                staging.then(lambda tensor=tensor, value=value: note(tensor, value))
            assert not order
            staging.send()
            staging.finish()
            assert order == values


def test_nothing_is_staged_after_sending() -> None:
    with pretended():
        staging = PackedStaging(PretendTransfers())
        staging.begin()
        staging.send()
        with pytest.raises(AssertionError, match="before they are sent"):
            staging.to_device(np.zeros(1, np.int32))


TENSOR_DTYPES = (torch.int32, torch.int64, torch.float32, torch.bool, torch.uint8)


def random_results(rng: random.Random) -> dict[str, torch.Tensor]:
    """Of any dtypes, in any order, with 1 or 2 dimensions, sometimes 0."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    shapes = [tuple(rng.randrange(7) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 8))]
    return {
        f"name {index}": torch.randint(0, 200, shape, generator=generator).to(rng.choice(TENSOR_DTYPES))
        for index, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("is_late", [False, True])
def test_all_results_of_a_step_arrive_by_one_copy(is_late: bool) -> None:
    rng = random.Random(4)
    with pretended():
        transfers = PretendTransfers(is_late)
        results = PackedResults(transfers, num_bytes=100)
        for step in range(1, 40):
            expected = random_results(rng)
            fetched = results.fetch({name: on_device(tensor) for name, tensor in expected.items()})
            arrays = fetched.arrays()
            assert set(arrays) == set(expected)
            for name, tensor in expected.items():
                assert torch.equal(torch.from_numpy(arrays[name]), tensor)
            assert transfers.num_downloads == step


@pytest.mark.parametrize("is_late", [False, True])
def test_results_that_are_read_late_are_not_overwritten(is_late: bool) -> None:
    """More steps than there are buffers before any result is read."""
    rng = random.Random(5)
    with pretended():
        results = PackedResults(PretendTransfers(is_late))
        steps = [random_results(rng) for _ in range(4 * RING_SIZE)]
        fetched = [results.fetch({name: on_device(tensor) for name, tensor in step.items()}) for step in steps]
        for _ in range(2):
            for step, one in zip(steps, fetched, strict=True):
                for name, tensor in step.items():
                    assert np.array_equal(one.arrays()[name], tensor.numpy())


def test_results_on_the_host_are_not_copied() -> None:
    tensor = torch.arange(5)
    assert HostResults().fetch({"x": tensor}).arrays()["x"].ctypes.data == tensor.data_ptr()


PAGE_SIZE = 16
LIMITS = {
    "Llama 3": ForwardLimits(max_tokens=8192, max_seqs=1024, context_length=8192, vocab_size=128_256),
    "many rows": ForwardLimits(max_tokens=4096, max_seqs=4096, context_length=1024, vocab_size=32_000),
    "few rows": ForwardLimits(max_tokens=16_384, max_seqs=16, context_length=32_768, vocab_size=151_936),
}


class Counting(PretendTransfers):
    """Remembers the bytes of each upload."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: PretendEvent) -> PretendEvent:
        self.num_bytes.append(source.numel())
        return super().upload(source, target, after)


def with_masks(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """A mask for every row."""
    num_rows = len(step.slots)
    bits = np.full((num_rows, -(-limits.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    return dataclasses.replace(step, masks=TokenMasks(np.arange(num_rows, dtype=np.int32), bits))


@pytest.mark.parametrize("name", LIMITS)
def test_the_largest_steps_fit_in_one_buffer_and_fill_a_good_part_of_it(name: str) -> None:
    limits = LIMITS[name]
    sizes = sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, num_top=20)
    widest = widest_prefill(limits)
    steps = [widest, decode_after(widest), longest_last_tokens(limits)]
    with pretended():
        transfers = Counting()
        staging = PackedStaging(transfers, sizes.inputs)
        slots = SlotTable(SlotTableSize(limits.max_seqs + 1, limits.context_length // PAGE_SIZE), DEVICE)
        slots.rules.allocate(PAGE_SIZE)
        backend = TorchBackend(KVShape(1, 2, 1, 8, PAGE_SIZE, torch.float32, DEVICE, torch.float32))
        backend.allocate(1)
        for step in steps:
            staging.begin()
            slots.apply(step.changes, staging)
            batch = build_batch(with_masks(step, limits), slots, PAGE_SIZE, staging)
            backend.plan(batch.layout)
            staging.send()
            staging.finish()
    assert len(transfers.buffers) == 2 * RING_SIZE, "no buffer was added"
    assert len(transfers.num_bytes) == len(steps)
    assert sizes.inputs / 2 < max(transfers.num_bytes) <= sizes.inputs
