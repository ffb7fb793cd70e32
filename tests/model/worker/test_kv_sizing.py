"""The KV cache of a worker on a pretended CUDA device, whose memory is counted here."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.worker.kv_memory import CUDA_FRACTION, KVCachePlan
from tokasaurus.model.worker.kv_sizing import size_kv_cache

MIB = 1 << 20
SHAPE = KVShape(2, 4, 2, 64, 16, torch.bfloat16, torch.device("cuda", 0))
FREE, FORWARD, GRAPHS = 900 * MIB, 300 * MIB, 100 * MIB


class PretendedCuda:
    """What `torch.cuda` says of a device: a forward allocates and frees its memory, graphs are measured and dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        self.order: list[str] = []
        for name, function in {
            "mem_get_info": lambda _device: (FREE, FREE),
            "memory_allocated": lambda _device: self.allocated,
            "max_memory_allocated": lambda _device: self.peak,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def allocate(self, num_blocks: int) -> None:
        assert num_blocks == 1, "the padding block alone"
        self.order.append("cache")
        self.allocated += SHAPE.bytes_per_block

    def run_largest(self) -> None:
        self.order.append("forward")
        self.peak = max(self.peak, self.allocated + FORWARD)

    def measure_graphs(self) -> int:
        self.order.append("graphs")
        return GRAPHS


class Report:
    def note(self, measured_bytes: int, *names: str) -> None:
        pass

    part = kv_cache = staticmethod(lambda *_: nullcontext())


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KVCachePlan]:
    def size_on_cuda(*flags: str) -> KVCachePlan:
        cuda = PretendedCuda(monkeypatch)
        config = ServerConfig.parse(list(flags))
        plan = size_kv_cache(config, 2, SHAPE, cuda, None, cuda.run_largest, cuda.measure_graphs, Report())  # type: ignore[arg-type]
        assert cuda.order == ["cache", "forward", "graphs"]
        return plan

    return size_on_cuda


LEFT = (FREE - FORWARD - GRAPHS) // SHAPE.bytes_per_block


def test_an_automatic_cache_takes_its_share_of_what_forwards_and_graphs_leave(
    size: Callable[..., KVCachePlan],
) -> None:
    assert size().num_blocks == int((FREE - FORWARD - GRAPHS) * CUDA_FRACTION) // SHAPE.bytes_per_block - 1


def test_a_cache_of_a_given_size_has_to_fit_beside_the_largest_forward_and_the_graphs(
    size: Callable[..., KVCachePlan],
) -> None:
    largest = (LEFT - 1) * 16  # without the padding block
    assert size(f"kv_cache_num_tokens={largest}").num_blocks == LEFT - 1
    refused = rf"^kv_cache_num_tokens={largest + 1}: .* enough for at most {largest}$"
    with pytest.raises(UserError, match=refused):
        size(f"kv_cache_num_tokens={largest + 1}")
