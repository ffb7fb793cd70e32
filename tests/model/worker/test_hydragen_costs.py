"""Measured costs of prefix groups, on a backend with known costs and on the real backends."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.attention.helpers import flashinfer_double
from tests.model.helpers.steps import CPU
from tokasaurus.messages.status import DEFAULT_HYDRAGEN, HydragenCosts
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.worker import hydragen_costs
from tokasaurus.model.worker.hydragen_costs import describe, find_costs, fit_costs, measure_costs

SHAPE = KVShape(2, 4, 2, 16, 16, torch.float32, CPU)
PLENTY = 5000


class TimedBackend:
    """Knows the time of a device that reads each token of a segment once and multiplies it with each row of the
    segment. It is also the stopwatch of the measurement.

    read: seconds per token. multiply: seconds per token and row. per_group: seconds per segment of several rows.
    per_row: seconds to merge a row's two parts."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        read: float,
        multiply: float,
        per_group: float = 0.0,
        per_row: float = 0.0,
    ) -> None:
        self._costs = (read, multiply, per_group, per_row)
        self.now = 0.0
        self.num_rows = set[int]()
        monkeypatch.setattr(hydragen_costs, "make_stopwatch", lambda _device: self)

    def seconds(self, call: Callable[[], object]) -> float:
        before = self.now
        call()
        return self.now - before

    def plan(self, layout: PagedLayout) -> None:
        rows = [row for part in layout.parts for row in range(part.first_row, part.first_row + part.num_rows)]
        assert rows == list(range(len(rows)))
        self.num_rows.add(len(rows))
        for part in (*layout.parts, layout.prefix):
            assert part is None or int(part.block_table.min()) >= 1, "block 0 is for padding"

    def write(self, key: Tensor, value: Tensor, _layer_index: int) -> None:
        assert key.shape == value.shape == (key.shape[0], SHAPE.num_kv_heads, SHAPE.head_dim)

    def attend(
        self, query: Tensor, _layer_index: int, part: PagedPart, _output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        read, multiply, per_group, _ = self._costs
        num_rows = part.query_starts.diff()
        self.now += float((part.kv_lengths * (read + multiply * num_rows) + per_group * (num_rows > 1)).sum())
        return query, query[..., 0]

    def merge(self, first: tuple[Tensor, Tensor], _second: object, output: Tensor) -> Tensor:
        self.now += self._costs[3] * len(first[0])
        return output.copy_(first[0])


def assert_close(found: HydragenCosts, expected: HydragenCosts) -> None:
    for name in HydragenCosts.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("max_rows", [64, 40])
@pytest.mark.parametrize(
    ("read", "multiply", "per_group", "per_row"),
    [(1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 300.0, 7.0), (0.25, 0.75, 40.0, 0.0), (0.5, 2.0, 0.0, 30.0)],
)
def test_the_costs_of_the_device_are_found_in_tokens_of_a_row_alone(
    monkeypatch: pytest.MonkeyPatch, read: float, multiply: float, per_group: float, per_row: float, max_rows: int
) -> None:
    """A row alone takes read + multiply for each token."""
    backend = TimedBackend(monkeypatch, read, multiply, per_group, per_row)
    token_s = read + multiply
    expected = HydragenCosts(per_group / token_s, read / token_s, per_row / token_s, multiply / token_s)
    assert_close(measure_costs(backend, SHAPE, PLENTY, max_rows), expected)


def test_groups_that_never_save_have_costs_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measure_costs(TimedBackend(monkeypatch, 1.0, 0.0, per_row=2000.0), SHAPE, PLENTY, max_rows=64)
    assert costs.saved(512, 1024) < 0
    assert describe(costs) == "not expected to save time on this device"


def test_measured_groups_fit_in_a_forward_and_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_measured(num_blocks: int, max_rows: int) -> set[int]:
        backend = TimedBackend(monkeypatch, 1.0, 0.0)
        backend.num_rows = set()
        found = measure_costs(backend, SHAPE, num_blocks, max_rows)
        assert found == DEFAULT_HYDRAGEN or found == HydragenCosts(*map(pytest.approx, (0, 1, 0, 0), [1e-4] * 4))
        return backend.num_rows - {0}

    # 1,024 tokens, the longest prefix, take 64 blocks: for pairs of 128 rows 64 * 64 + 2 * 128, for more rows too many.
    assert rows_measured(PLENTY, max_rows=1000) == {128, 256}
    assert rows_measured(PLENTY, max_rows=20) == {16}
    # Eight rows in pairs, 16 by eights, or 32: 16 prefix blocks of 256 tokens for each group, 2 own blocks for a row.
    assert rows_measured(8 * 16 // 2 + 2 * 8, max_rows=1000) == {8, 16, 32}
    assert rows_measured(16 + 2 * 2, max_rows=1000) == {2}
    assert rows_measured(19, max_rows=1000) == set()
    assert rows_measured(PLENTY, max_rows=1) == set()


def test_fewer_rows_are_tried_if_the_device_has_no_memory_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TimedBackend(monkeypatch, 1.0, 0.0)
    attend = backend.attend

    def attend_few(
        query: Tensor, layer_index: int, part: PagedPart, _output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if part.num_rows > 16:
            raise torch.OutOfMemoryError("out of memory")
        return attend(query, layer_index, part)

    backend.attend = attend_few
    assert_close(measure_costs(backend, SHAPE, PLENTY, max_rows=64), HydragenCosts(0.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("is_of_groups", [False, True])
def test_rounds_that_another_process_disturbs_change_nothing(
    monkeypatch: pytest.MonkeyPatch, is_of_groups: bool
) -> None:
    """In a third of the rounds, it delays the attention of groups, or of rows alone."""
    backend = TimedBackend(monkeypatch, 1.0, 1.0)
    seconds, num_calls = backend.seconds, itertools.count()

    def seconds_disturbed(call: Callable[[], object]) -> float:
        taken, number = seconds(call), next(num_calls)
        is_hit = number // 6 % 3 == 0 and number % 2 == int(is_of_groups)  # six calls in a round
        return taken + (1e9 if is_hit else 0.0)

    backend.seconds = seconds_disturbed
    assert_close(measure_costs(backend, SHAPE, PLENTY, max_rows=1000), HydragenCosts(0.0, 0.5, 0.0, 0.5))


def test_a_start_reads_what_an_earlier_start_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    kernels = load_kernels()
    first = find_costs(TimedBackend(monkeypatch, 1.0, 1.0), SHAPE, PLENTY, 64, kernels)
    assert_close(first, HydragenCosts(0.0, 0.5, 0.0, 0.5))
    other = TimedBackend(monkeypatch, 1.0, 0.0)
    assert find_costs(other, SHAPE, PLENTY, 64, kernels) == first
    assert find_costs(other, SHAPE, PLENTY - 1000, 64, kernels) == first, "an automatic size of the KV cache varies"
    assert not other.num_rows, "nothing is measured"
    assert find_costs(other, SHAPE, PLENTY, 64, None) != first, "other code"
    assert find_costs(other, dataclasses.replace(SHAPE, num_heads=8), PLENTY, 64, kernels) != first
    assert find_costs(other, SHAPE, PLENTY, 4, kernels) != first, "other groups"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "file"))
    assert_close(find_costs(other, SHAPE, PLENTY, 64, kernels), HydragenCosts(0.0, 1.0, 0.0, 0.0))


def test_the_fit_has_no_negative_costs_and_the_smallest_error() -> None:
    """Times that only a negative cost of a row explains. The error is convex, so no better costs are nearby."""
    true = HydragenCosts(per_group=50.0, per_group_token=1.2, per_row=-20.0, per_row_token=0.3)
    points = [(size, length) for size in (2, 8, 32) for length in (256, 1024)]

    def ratio(costs: HydragenCosts, size: int, length: int) -> float:
        alone = size * (length + 32)
        return (alone - costs.saved(size, length)) / alone

    def error(costs: HydragenCosts) -> float:
        return sum((ratio(costs, *point) - ratio(true, *point)) ** 2 for point in points)

    found = fit_costs({point: ratio(true, *point) for point in points}, num_own_tokens=32)
    assert found.per_row == 0
    for name, step in (("per_group", 1.0), ("per_group_token", 0.01), ("per_row", 0.1), ("per_row_token", 0.001)):
        value = getattr(found, name)
        assert value >= 0
        for changed in (value + step, value - step):
            assert changed < 0 or error(dataclasses.replace(found, **{name: changed})) > error(found)


def test_a_fitted_group_of_one_row_never_saves() -> None:
    found = fit_costs({(8, 256): 0.2, (32, 256): 0.18, (8, 1024): 0.12, (32, 1024): 0.1}, num_own_tokens=32)
    assert found.saved(32, 1024) > 0
    assert found.saved(1, 1024) <= 1e-6


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_costs_can_be_measured_on_the_real_backends(name: str) -> None:
    backend = make_backend(name, SHAPE, load_kernels())
    backend.allocate(1201)
    found = measure_costs(backend, SHAPE, 1200, max_rows=64)
    assert found.saved(1, 1024) <= 1e-6
    assert describe(found)


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 64)])
def test_flashinfer_is_measured_with_the_lists_of_blocks_that_steps_have(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA cores and on tensor cores; its double checks each plan and run. The trials' blocks are those that rows
    alone read: the same rows attend to the same tokens, alone and in groups."""
    flashinfer_double.install(monkeypatch)
    shape = KVShape(2, *heads, 16, torch.bfloat16, CPU)
    backend = make_backend("flashinfer", shape, None)
    backend.allocate(701)
    plan, read = FlashInferBackend.plan, list[list[list[int]]]()

    def note(self: FlashInferBackend, layout: PagedLayout) -> None:
        plan(self, layout)
        if not layout.parts:
            return
        (part,) = layout.parts
        rows = list[list[int]]([[]] * part.num_rows)
        for each in (layout.prefix, part):
            if each is not None:
                assert each.block_table is None
                assert each.lists is not None
                starts, blocks = each.lists.host_starts.tolist(), each.lists.blocks.tolist()
                segments = [blocks[start:end] for start, end in itertools.pairwise(starts)]
                for segment, (first, end) in zip(segments, itertools.pairwise(each.query_starts.tolist()), strict=True):
                    rows[first:end] = [row + segment for row in rows[first:end]]
        read.append(rows)

    monkeypatch.setattr(FlashInferBackend, "plan", note)
    found = measure_costs(backend, shape, 700, max_rows=16)
    assert found.saved(1, 1024) <= 1e-6
    assert read
    assert all(alone == together for alone, together in zip(read[::2], read[1::2], strict=True))


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("page_size", [256, 512, 2048])
def test_blocks_longer_than_a_prefix_of_the_trials_are_not_measured(name: str, page_size: int) -> None:
    shape = dataclasses.replace(SHAPE, page_size=page_size)
    backend = make_backend(name, shape, load_kernels())
    backend.allocate(201)
    found = measure_costs(backend, shape, 200, max_rows=8)
    assert (found == DEFAULT_HYDRAGEN) == (page_size > 256)


def test_the_user_reads_what_groups_save() -> None:
    costs = HydragenCosts(0.0, 1.0, 0.0, 0.0)
    assert describe(costs) == "4 sequences save 75%, 32 sequences save 97% of attention to 1,024 shared tokens"
