"""Results of steps, packed into one copy."""

import random

import numpy as np
import pytest
import torch

from tests.model.helpers.pretend_device import PretendTransfers, on_device, pretended
from tokasaurus.model.staging.packed import RING_SIZE
from tokasaurus.model.staging.results import HostResults, PackedResults

DTYPES = (torch.int32, torch.int64, torch.float32, torch.bool, torch.uint8)


def random_results(rng: random.Random) -> dict[str, torch.Tensor]:
    """Of any dtypes, in any order, with 1 or 2 dimensions, sometimes 0."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    shapes = [tuple(rng.randrange(7) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 8))]
    return {
        f"name {index}": torch.randint(0, 200, shape, generator=generator).to(rng.choice(DTYPES))
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
