"""Packed staging over pretended copies: contents, the order of copies and work, and the ring of buffers."""

import random
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.model.helpers.pretend_device import DEVICE, PretendEvent, PretendTransfers, on_host, pretended
from tokasaurus.model.staging.packed import RING_SIZE, PackedStaging

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
