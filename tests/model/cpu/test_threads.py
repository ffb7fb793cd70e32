"""Work divided among more threads than there are cores, so that some start late."""

from collections.abc import Iterator

import pytest
import torch

from tests.model.helpers.linear_layers import assert_close, fill, layer_kernels, make_norm, random_rows
from tokasaurus.model.decoder.layers import Linear


@pytest.fixture(params=[1, 2, 7])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
def test_all_work_is_done_when_a_call_returns() -> None:
    """Small loops in quick succession, on data that is overwritten right after each call."""
    linear, norm = Linear(64, 256, bias=False, dtype=torch.float32), make_norm(64, torch.float32)
    fill(linear)
    weight = linear.weight.double()
    linear.pack(layer_kernels())
    for num_rows in [1, 3, 70, 2, 200] * 40:
        x = random_rows(num_rows, 64, torch.float32)
        result = linear(x, norm)
        x.zero_()
        assert_close(result, norm(random_rows(num_rows, 64, torch.float32)).double() @ weight.T)


@pytest.mark.usefixtures("num_threads")
def test_a_call_waits_for_threads_that_are_still_computing() -> None:
    """Nine long work items: with two threads or more, some are still computing when the last item is claimed."""
    linear = Linear(512, 9 * 32, bias=False, dtype=torch.float32)
    fill(linear)
    weight = linear.weight.clone()
    linear.pack(layer_kernels())
    x = random_rows(1000, 512, torch.float32)
    expected = x @ weight.T
    for factor in range(1, 31):
        scaled = x * factor
        result = linear(scaled).clone()
        torch.testing.assert_close(result, expected * factor, atol=1e-3 * factor, rtol=1e-4)
