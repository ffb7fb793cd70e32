"""Measured costs of prefix groups, on a backend with known costs and on the real backends."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedGraph
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import CPU, make_runner, one_thread
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.status import DEFAULT_HYDRAGEN, HydragenCosts
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import entry, hydragen_costs
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.model.worker.hydragen_costs import (
    describe_savings,
    find_costs,
    fit_costs,
    measure_costs,
    measure_step_price,
    seconds_per_token,
    with_step_price,
)
from tokasaurus.model.worker.warmup import ForwardLimits

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
    assert describe_savings(costs) == "not expected to save time on this device"


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


def test_a_device_without_memory_for_any_trial_has_the_default_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def attend(*_: object) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    backend = TimedBackend(monkeypatch, 1.0, 1.0)
    kernels = load_kernels()
    with monkeypatch.context() as full:
        full.setattr(backend, "attend", attend)
        assert measure_costs(backend, SHAPE, PLENTY, 64) == DEFAULT_HYDRAGEN
        assert find_costs(backend, SHAPE, PLENTY, 64, kernels) == DEFAULT_HYDRAGEN
    assert_close(find_costs(backend, SHAPE, PLENTY, 64, kernels), HydragenCosts(0.0, 0.5, 0.0, 0.5))


def disturb(backend: TimedBackend, is_of_groups: bool, calm_rounds: Callable[[int], bool]) -> None:
    """Another process delays the attention of groups, or of rows alone, except in rounds that are calm."""
    seconds, num_calls = backend.seconds, itertools.count()

    def seconds_disturbed(call: Callable[[], object]) -> float:
        taken, number = seconds(call), next(num_calls)
        is_hit = number % 2 == int(is_of_groups) and not calm_rounds(number // NUM_CALLS)
        return taken * (1.0 + number % 7) if is_hit else taken

    backend.seconds = seconds_disturbed


NUM_CALLS = 16
"""Of a round: four sizes of groups, two lengths, alone and in groups."""


@pytest.mark.parametrize("is_of_groups", [False, True])
def test_rounds_that_another_process_disturbs_change_nothing(
    monkeypatch: pytest.MonkeyPatch, is_of_groups: bool
) -> None:
    """Three of four are disturbed."""
    backend = TimedBackend(monkeypatch, 1.0, 1.0)
    disturb(backend, is_of_groups, lambda number: number % 4 == 3)
    assert_close(measure_costs(backend, SHAPE, PLENTY, max_rows=1000), HydragenCosts(0.0, 0.5, 0.0, 0.5))


@pytest.mark.parametrize("is_of_groups", [False, True])
def test_a_start_on_a_busy_machine_is_corrected_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_of_groups: bool
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    monkeypatch.setattr(hydragen_costs, "_MAX_SECONDS", 0.0)  # the busy start gives up at once
    kernels = load_kernels()
    busy = TimedBackend(monkeypatch, 1.0, 1.0)
    disturb(busy, is_of_groups, lambda _: False)
    found = find_costs(busy, SHAPE, PLENTY, 1000, kernels)
    assert abs(found.saved(32, 1024) / (32 * 1024) - 0.5) > 0.1
    monkeypatch.undo()
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    calm = TimedBackend(monkeypatch, 1.0, 1.0)
    second = find_costs(calm, SHAPE, PLENTY, 1000, kernels)
    assert_close(second, HydragenCosts(0.0, 0.5, 0.0, 0.5))
    other = TimedBackend(monkeypatch, 1.0, 0.0)
    assert find_costs(other, SHAPE, PLENTY, 1000, kernels) == second
    assert not other.num_rows, "a settled measurement is read, and nothing is measured"


@pytest.mark.parametrize(
    "damaged",
    [
        *("", "{}", "null", "[[2, 256]]", "[[2, 256, true, []]]", '[[2, 256, true, ["a"]]]'),
        pytest.param("[[2, 256, true, [1, 1, 1]]]", id="no times alone"),
    ],
)
def test_a_damaged_file_of_times_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: str
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    kernels = load_kernels()
    first = find_costs(TimedBackend(monkeypatch, 1.0, 1.0), SHAPE, PLENTY, 64, kernels)
    (path,) = (tmp_path / "hydragen").iterdir()
    whole = path.read_text()
    path.write_text(damaged)
    assert find_costs(TimedBackend(monkeypatch, 1.0, 1.0), SHAPE, PLENTY, 64, kernels) == first
    assert path.read_text() == whole


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
    assert describe_savings(found)


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
    assert describe_savings(costs) == "4 sequences save 75%, 32 sequences save 97% of attention to 1,024 shared tokens"


REPLAY_S, ATTEND_S, MERGE_S = 1.0, 0.25, 0.0625
NUM_ROWS = 8


class Clock:
    """Advances when a graph is replayed, or when attention outside of graphs is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.with_groups: list[bool] = []
        """Of each decode step."""
        monkeypatch.setattr(hydragen_costs, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(TapedGraph, "replay", self._timed(TapedGraph.replay, REPLAY_S))
        monkeypatch.setattr(flashinfer_double._Wrapper, "run", self._timed(flashinfer_double._Wrapper.run, ATTEND_S))
        monkeypatch.setattr(FlashInferBackend, "merge", self._timed(FlashInferBackend.merge, MERGE_S))
        run = ModelRunner.run

        def noted(runner: ModelRunner, step: ForwardInput) -> object:
            if step.num_decode:
                self.with_groups.append(step.groups is not None)
            return run(runner, step)

        monkeypatch.setattr(ModelRunner, "run", noted)

    def _timed(self, method: Callable[..., object], seconds: float) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            self.now += seconds
            return method(*args, **options)

        return call


def make(
    directory: Path, monkeypatch: pytest.MonkeyPatch, page_size: int = 16
) -> tuple[ModelRunner, ForwardLimits, KVShape]:
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    save_tiny_model(directory, "llama")
    model, info = load(directory)
    runner = make_runner(model, info, "flashinfer", page_size, num_blocks=300)
    limits = ForwardLimits(64, 12, info.context_length, info.vocab_size)
    heads = info.num_heads, info.num_kv_heads, info.head_dim
    return runner, limits, KVShape(info.num_layers, *heads, page_size, torch.float32, CPU)


def test_the_price_is_a_replay_and_the_launches_of_attention_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces there are two replays more than layers, and else one; attention runs over the prefix, the two grouped
    rows and the others, and the first two are merged."""
    runner, limits, shape = make(tmp_path, monkeypatch)
    with one_thread():
        runner.record_graphs(LaunchTape(), [12, NUM_ROWS])
        clock = Clock(monkeypatch)
        found = measure_step_price(runner, limits, shape.page_size)
    assert found == pytest.approx(REPLAY_S + shape.num_layers * (REPLAY_S + 3 * ATTEND_S + MERGE_S))
    assert clock.with_groups.count(True) == clock.with_groups.count(False) > 0


def test_the_price_is_in_tokens_of_attention_in_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages, each of which runs the same layers here."""
    runner, limits, shape = make(tmp_path, monkeypatch)
    costs, details = HydragenCosts(1.0, 2.0, 3.0, 4.0), list[str]()
    with one_thread():
        runner.record_graphs(LaunchTape(), [NUM_ROWS])
        Clock(monkeypatch)
        monkeypatch.setattr(hydragen_costs, "seconds_per_token", lambda *_: 0.125)
        found = with_step_price(costs, runner, runner._backend, shape, 300, limits, 2 * shape.num_layers, details)
        monkeypatch.setattr(hydragen_costs, "seconds_per_token", lambda *_: None)
        unknown = with_step_price(costs, runner, runner._backend, shape, 300, limits, shape.num_layers, details)
    price_s = REPLAY_S + shape.num_layers * (REPLAY_S + 3 * ATTEND_S + MERGE_S)
    assert found == HydragenCosts(1.0, 2.0, 3.0, 4.0, pytest.approx(price_s / (0.125 * 2 * shape.num_layers)))
    assert unknown == costs
    num_tokens = price_s / (0.125 * 2 * shape.num_layers)
    assert details == [f"a decode step with groups takes {price_s * 1e3:.2g} ms more ({num_tokens:,.0f} tokens)"]


def test_a_step_in_one_graph_and_one_in_pieces_have_prices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in a graph takes no time of its own here."""
    runner, limits, shape = make(tmp_path, monkeypatch)
    details = list[str]()
    with one_thread():
        runner.record_graphs(LaunchTape(), [12, NUM_ROWS])
        runner.record_groups([12, NUM_ROWS])
        Clock(monkeypatch)
        monkeypatch.setattr(hydragen_costs, "seconds_per_token", lambda *_: 0.125)
        monkeypatch.setattr(TapedGraph, "replay", slower_with_prefixes(monkeypatch, 0.5))
        found = with_step_price(HydragenCosts(), runner, runner._backend, shape, 300, limits, 1, details)
    price_s = REPLAY_S + shape.num_layers * (REPLAY_S + 3 * ATTEND_S + MERGE_S)
    assert found == HydragenCosts(
        per_step=pytest.approx(price_s / 0.125), per_recorded_step=pytest.approx(0.5 / 0.125), recorded_groups=6
    )
    assert details == [
        f"a decode step with groups takes 5e+02 ms more (4 tokens), with over 6 groups {price_s * 1e3:.2g} ms more "
        f"({price_s / 0.125:,.0f} tokens)"
    ]


def slower_with_prefixes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Callable[[TapedGraph], None]:
    """`TapedGraph.replay` that takes `seconds` more of the clock if the graph attends to prefixes."""
    replay, clock = TapedGraph.replay, hydragen_costs.time.perf_counter

    def call(graph: TapedGraph) -> None:
        nonlocal extra_s
        extra_s += seconds * any("run_prefix" in str(function) for function, *_ in graph.operations)
        replay(graph)

    extra_s = 0.0
    monkeypatch.setattr(hydragen_costs, "time", SimpleNamespace(perf_counter=lambda: clock() + extra_s))
    return call


def test_without_graphs_or_room_for_a_shared_block_there_is_no_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, limits, shape = make(tmp_path, monkeypatch)
    clock = Clock(monkeypatch)
    assert measure_step_price(runner, limits, shape.page_size) == 0
    with one_thread():
        runner.record_graphs(LaunchTape(), [NUM_ROWS])
        short = ForwardLimits(64, 12, shape.page_size + 1, limits.vocab_size)
        assert measure_step_price(runner, short, shape.page_size) == 0
        assert measure_step_price(runner, ForwardLimits(64, 1, 500, limits.vocab_size), shape.page_size) == 0
    assert not clock.with_groups


def test_a_token_takes_the_time_of_rows_alone_for_each_token_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that takes a second for each row and token."""
    flashinfer_double.install(monkeypatch)
    shape = KVShape(2, 8, 2, 64, 16, torch.bfloat16, CPU)
    backend = FlashInferBackend(shape, flashinfer_double.Library())
    backend.allocate(701)
    now = 0.0
    attend = FlashInferBackend.attend

    def attend_slowly(self: FlashInferBackend, query: torch.Tensor, layer: int, part: object, *rest: object) -> object:
        nonlocal now
        now += float((part.query_starts.diff() * part.kv_lengths).sum())
        assert not part.is_partial
        return attend(self, query, layer, part, *rest)

    def seconds(call: Callable[[], object]) -> float:
        before = now
        call()
        return now - before

    monkeypatch.setattr(FlashInferBackend, "attend", attend_slowly)
    monkeypatch.setattr(hydragen_costs, "make_stopwatch", lambda _device: SimpleNamespace(seconds=seconds))
    assert seconds_per_token(backend, shape, 700, max_rows=16) == pytest.approx(1.0)
    assert seconds_per_token(backend, shape, 10, max_rows=16) is None


@pytest.mark.parametrize("sizes", [[], [8, 4]])
def test_a_start_with_graphs_tells_the_manager_the_price(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: sizes)
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())
    monkeypatch.setattr(hydragen_costs, "find_costs", lambda *_: HydragenCosts())
    measured = list[float]()

    def measure(*args: Any) -> float:
        measured.append(measure_step_price(*args))  # on the machine's clock: any number
        return 2.0 if sizes else measured[0]

    monkeypatch.setattr(hydragen_costs, "measure_step_price", measure)
    flags = ["dtype=float32", "kv_cache_num_tokens=8000", "cpu_isa=torch", "max_tokens_per_forward=64"]
    config = ServerConfig.parse([*flags, "max_seqs_per_forward=8"])
    details: list[str] = []
    worker = start_worker(
        config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda done: details.append(done.detail)
    )
    assert bool(worker.runner.graph_sizes) == bool(sizes)
    assert (worker.limits.hydragen.per_step > 1000) is bool(sizes)
    assert any("a decode step with groups takes 2e+03 ms more" in detail for detail in details) is bool(sizes)
    if not sizes:
        assert measured == [0.0]
        assert worker.limits.hydragen.per_step == 0
