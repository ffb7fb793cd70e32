"""Measured Hydragen thresholds, on a backend with known costs and on the real backends."""

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
    """Advances a clock by the time of a device that reads each token of a segment once and multiplies it with each row
    of the segment.

    read: seconds per token. multiply: seconds per token and row. per_part: seconds per part, and per merge of two."""

    def __init__(self, read: float, multiply: float, per_part: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._costs = (read, multiply, per_part)
        self._now = 0.0
        monkeypatch.setattr(hydragen_thresholds, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def plan(self, layout: PagedLayout) -> None:
        rows = [row for part in layout.parts for row in range(part.first_row, part.first_row + part.num_rows)]
        assert rows == list(range(len(rows)))
        for part in (*layout.parts, layout.prefix):
            assert part is None or int(part.block_table.min()) >= 1, "block 0 is for padding"

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
        (1.0, 1.0, 2000.0, HydragenThresholds(2, 256)),  # pairs: 22384 at 128, 34672 at 256; alone: 22480, 38864
        (0.0, 1.0, 0.0, None),  # groups save nothing
        (1.0, 1.0, 1e6, None),
    ],
)
def test_thresholds_are_the_sizes_from_which_groups_save_time(
    read: float,
    multiply: float,
    per_part: float,
    expected: HydragenThresholds | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TimedBackend(read, multiply, per_part, monkeypatch)
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=1000) == expected


def test_measured_groups_fit_in_a_forward_and_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TimedBackend(1.0, 0.0, 0.0, monkeypatch)
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=20) == HydragenThresholds(16, 64)
    # Eight rows: 16 prefix blocks for each pair, 2 own blocks for each row. 256 * 8 / g + 256: 768 at 4, 512 at 8.
    assert measure_thresholds(backend, SHAPE, 8 * 16 // 2 + 2 * 8, max_rows=1000) == HydragenThresholds(4, 64)
    assert measure_thresholds(backend, SHAPE, 19, max_rows=1000) == DEFAULT_HYDRAGEN
    assert measure_thresholds(backend, SHAPE, PLENTY, max_rows=1) == DEFAULT_HYDRAGEN


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_thresholds_can_be_measured_on_the_real_backends(name: str) -> None:
    backend = make_backend(name, SHAPE, load_kernels())
    backend.allocate(1201)
    found = measure_thresholds(backend, SHAPE, 1200, max_rows=64)
    assert found is None or (2 <= found.min_group_size <= 32 and 64 <= found.min_prefix_len <= 1024)


def test_a_slow_period_during_measurement_does_not_disable_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the slow period, another process delays the attention of groups."""
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
