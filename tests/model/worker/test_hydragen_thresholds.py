"""Thresholds found by trying, on backends whose times are known and on the real ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.model.helpers.steps import CPU
from tokasaurus.messages.lifecycle import DEFAULT_HYDRAGEN, HydragenThresholds
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.worker import hydragen_thresholds
from tokasaurus.model.worker.hydragen_thresholds import measure_thresholds

SHAPE = KVShape(2, 4, 2, 16, 16, torch.float32, CPU)
PLENTY = 5000


class TimedBackend:
    """Advances a clock by what a device would take that reads a segment's tokens once and multiplies them with each of
    its rows; per_part: for each part, and for putting two together."""

    def __init__(self, read: float, multiply: float, per_part: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._costs = (read, multiply, per_part)
        self._now = 0.0
        monkeypatch.setattr(hydragen_thresholds, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def plan(self, layout: PagedLayout) -> None:
        rows = [row for part in layout.parts for row in range(part.first_row, part.first_row + part.num_rows)]
        assert rows == list(range(len(rows)))
        for part in (*layout.parts, layout.prefix):
            assert part is None or int(part.block_table.min()) >= 1, "no block is that of padding"

    def write(self, key: Tensor, value: Tensor, _layer_index: int) -> None:
        assert key.shape == value.shape == (key.shape[0], SHAPE.num_kv_heads, SHAPE.head_dim)

    def attend(self, query: Tensor, _layer_index: int, part: PagedPart) -> tuple[Tensor, Tensor]:
        read, multiply, per_part = self._costs
        num_rows = part.query_starts.diff()
        self._now += per_part + float((part.kv_lengths * (read + multiply * num_rows)).sum())
        return query, query[..., 0]

    def merge(self, first: tuple[Tensor, Tensor], _second: object, _dtype: torch.dtype) -> Tensor:
        self._now += self._costs[2]
        return first[0]


@pytest.mark.parametrize(
    ("read", "multiply", "per_part", "expected"),
    [
        # 64 rows in groups of g read 1024 * 64 / g tokens of prefixes and 64 * 32 others: 6144 at 16, 4096 at 32.
        (1.0, 0.0, 0.0, HydragenThresholds(16, 64)),
        (1.0, 1.0, 0.0, HydragenThresholds(2, 64)),  # 65536 / g + 69632: 102400 in pairs, 71680 at 32
        (1.0, 0.2, 0.0, HydragenThresholds(8, 64)),  # 65536 / g + 15565: 23757 at 8, 17613 at 32
        (1.0, 1.0, 2000.0, HydragenThresholds(2, 256)),  # in pairs at 128 22384, alone 22480; at 256 34672 and 38864
        (0.0, 1.0, 0.0, None),  # nothing is gained
        (1.0, 1.0, 1e6, None),
    ],
)
def test_thresholds_are_those_from_which_a_known_device_gains(
    read: float,
    multiply: float,
    per_part: float,
    expected: HydragenThresholds | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TimedBackend(read, multiply, per_part, monkeypatch)
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=1000) == expected


def test_groups_are_no_larger_than_a_forward_and_no_larger_than_the_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TimedBackend(1.0, 0.0, 0.0, monkeypatch)
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=20) == HydragenThresholds(16, 64)
    # Eight rows, 16 blocks of a prefix for each pair and 2 of its own for each; 256 * 8 / g + 256: 768 at 4, 512 at 8.
    assert measure_thresholds(backend, SHAPE, 8 * 16 // 2 + 2 * 8, max_rows=1000) == HydragenThresholds(4, 64)
    assert measure_thresholds(backend, SHAPE, 19, max_rows=1000) == DEFAULT_HYDRAGEN
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=1) == DEFAULT_HYDRAGEN


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_the_real_backends_can_be_tried(name: str) -> None:
    backend = make_backend(name, SHAPE, load_kernels())
    backend.allocate(1201)
    found = measure_thresholds(backend, SHAPE, 1200, max_rows=64)
    assert found is None or (2 <= found.min_group_size <= 32 and 64 <= found.min_prefix_len <= 1024)


def test_a_bad_moment_does_not_make_it_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lasts, groups take as long as another process lets them."""
    backend = TimedBackend(1.0, 1.0, 0.0, monkeypatch)
    attend, num_calls = backend.attend, 0

    def attend_disturbed(query: Tensor, layer_index: int, part: PagedPart) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        if part.is_partial and num_calls <= 7 * 5 * 3:
            backend._now += 1e9
        return attend(query, layer_index, part)

    backend.attend = attend_disturbed
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=1000) == HydragenThresholds(2, 64)
