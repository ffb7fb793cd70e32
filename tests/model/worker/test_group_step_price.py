"""The measured price of a decode step with prefix groups, over graphs on a tape and a double of FlashInfer, by a clock
that advances only with what is launched."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedGraph
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import CPU, make_runner, one_thread
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.status import HydragenCosts
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import entry, group_step_price, hydragen_costs
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.model.worker.group_step_price import measure_step_price, with_step_price
from tokasaurus.model.worker.hydragen_costs import seconds_per_token
from tokasaurus.model.worker.warmup import ForwardLimits

REPLAY_S, ATTEND_S, MERGE_S = 1.0, 0.25, 0.0625
NUM_ROWS = 8


class Clock:
    """Advances when a graph is replayed, or when attention outside of graphs is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.with_groups: list[bool] = []
        """Of each decode step."""
        monkeypatch.setattr(group_step_price, "time", SimpleNamespace(perf_counter=lambda: self.now))
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
    """In pieces there is one replay more than layers; attention runs over the prefix, the two grouped rows and the
    others, and the first two are merged."""
    runner, limits, shape = make(tmp_path, monkeypatch)
    with one_thread():
        runner.record_graphs(LaunchTape(), [12, NUM_ROWS])
        clock = Clock(monkeypatch)
        found = measure_step_price(runner, limits, shape.page_size)
    assert found == pytest.approx(shape.num_layers * (REPLAY_S + 3 * ATTEND_S + MERGE_S))
    assert clock.with_groups.count(True) == clock.with_groups.count(False) > 0


def test_the_price_is_in_tokens_of_attention_in_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages, each of which runs the same layers here."""
    runner, limits, shape = make(tmp_path, monkeypatch)
    costs, details = HydragenCosts(1.0, 2.0, 3.0, 4.0), list[str]()
    with one_thread():
        runner.record_graphs(LaunchTape(), [NUM_ROWS])
        Clock(monkeypatch)
        monkeypatch.setattr(group_step_price, "seconds_per_token", lambda *_: 0.125)
        found = with_step_price(costs, runner, runner._backend, shape, 300, limits, 2 * shape.num_layers, details)
        monkeypatch.setattr(group_step_price, "seconds_per_token", lambda *_: None)
        unknown = with_step_price(costs, runner, runner._backend, shape, 300, limits, shape.num_layers, details)
    price_s = shape.num_layers * (REPLAY_S + 3 * ATTEND_S + MERGE_S)
    assert found == HydragenCosts(1.0, 2.0, 3.0, 4.0, pytest.approx(price_s / (0.125 * 2 * shape.num_layers)))
    assert unknown == costs
    num_tokens = price_s / (0.125 * 2 * shape.num_layers)
    assert details == [f"a decode step with groups takes {price_s * 1e3:.2g} ms more ({num_tokens:,.0f} tokens)"]


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
    monkeypatch.setattr(entry, "find_costs", lambda *_: HydragenCosts())
    measured = list[float]()

    def measure(*args: Any) -> float:
        measured.append(measure_step_price(*args))  # on the machine's clock: any number
        return 2.0 if sizes else measured[0]

    monkeypatch.setattr(group_step_price, "measure_step_price", measure)
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
