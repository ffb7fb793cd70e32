"""Compiled layers or own kernels: which a start takes. Neither is what it is on CUDA: torch's modules compute both."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import StepDriver, one_thread
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.config import ServerConfig
from tokasaurus.model import triton_choice
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import ModuleExecutor
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import device, entry, kernel_checks, layer_choice
from tokasaurus.model.worker.entry import StartedWorker, start_worker
from tokasaurus.model.worker.layer_choice import LayerTimes, describe_choice, takes_own_kernels, time_layers
from tokasaurus.model.worker.self_check import Checks

FLAGS = [
    *("kv_cache_num_tokens=1024", "use_hydragen=F", "max_tokens_per_forward=256", "max_seqs_per_forward=16"),
    *("dtype=float32", "cpu_isa=torch"),
]


@pytest.mark.parametrize(
    ("times", "takes_own"),
    [
        ([(64, 1.0, 0.9)], True),
        ([(64, 1.0, 1.1)], False),
        ([(64, 1.0, 0.99)], False),  # within the noise of a measurement
        ([(64, 1.0, 0.8), (1024, 10.0, 11.0)], True),  # a fifth less, a tenth more
        ([(64, 1.0, 0.9), (1024, 10.0, 12.5)], False),
    ],
)
def test_own_kernels_are_taken_where_they_are_clearly_faster_on_the_whole(
    times: list[tuple[int, float, float]], takes_own: bool
) -> None:
    of_layers = [LayerTimes(*one) for one in times]
    assert takes_own_kernels(of_layers) is takes_own
    assert describe_choice(of_layers).startswith("own kernels: " if takes_own else "compiled: ")


def test_the_log_says_what_both_take() -> None:
    assert describe_choice([LayerTimes(64, 0.00071, 0.00062), LayerTimes(1024, 0.0045, 0.0041)]) == (
        "own kernels: the layers take 0.62 ms with own kernels, 0.71 compiled (64 tokens) and 4.1 ms with own kernels, "
        "4.5 compiled (1,024 tokens)"
    )


def test_the_shortest_round_of_the_slowest_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of each way, which loads code, does not count."""
    save_tiny_model(tmp_path, "llama")
    model, _ = load(tmp_path)
    calls: list[tuple[str, int]] = []

    def way(name: str) -> Any:
        return SimpleNamespace(run=lambda hidden, *_: calls.append((name, len(hidden))))

    scripted = {"compiled": iter([0.1, 5.0, 3.0, 4.0] * 2), "own": iter([0.1, 2.5, 2.0, 9.0] * 2)}

    def seconds(call: Callable[[], object]) -> float:
        call()
        return next(scripted[calls[-1][0]])

    monkeypatch.setattr(layer_choice, "make_stopwatch", lambda _device: SimpleNamespace(seconds=seconds))
    others_ns = iter([-1, -2_700_000_000, -1, -1])  # another rank's, with their signs turned
    monkeypatch.setattr(layer_choice, "least_of_ranks", lambda value, *_: min(value, next(others_ns)))
    times = time_layers(way("compiled"), way("own"), model, Mesh(), max_tokens=200)
    assert times == [LayerTimes(64, 3.0, 2.7), LayerTimes(200, 3.0, 2.0)]
    assert calls == [(name, count) for count in (64, 200) for _ in range(4) for name in ("compiled", "own")]


class Own(ModuleExecutor):
    """In the place of the Triton kernels."""

    factor = 1.0
    num_runs = 0

    @staticmethod
    def computes(_layer: LayerSpec) -> bool:
        return True

    def run(self, hidden: Tensor, *others: Any) -> Tensor:
        Own.num_runs += 1
        return super().run(hidden, *others) * self.factor


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """-> seconds of both ways, to be set; the compiler compiles nothing."""
    seconds = {"compiled": 1.0, "own": 1.0}

    def timed(compiled: Any, own: Any, *_: Any) -> list[LayerTimes]:
        assert isinstance(own, Own)
        assert compiled.plain is own
        return [LayerTimes(64, seconds["compiled"], seconds["own"])]

    monkeypatch.setattr(device, "is_compiled", lambda flag, _device: flag is not False)
    monkeypatch.setattr(Compiler, "_compile_graph", lambda _self, graph, *_, **__: graph)
    monkeypatch.setattr(triton_choice, "_switched_off", set())
    monkeypatch.setattr(executors, "uses_triton", lambda _device, group: group not in triton_choice._switched_off)
    for module in (entry, kernel_checks):
        monkeypatch.setattr(module, "groups_in_use", lambda _, *groups: [one for one in groups if one == "layers"])
    for module in (executors, kernel_checks, layer_choice):
        monkeypatch.setattr(module, "FusedExecutor", Own)
    monkeypatch.setattr(layer_choice, "time_layers", timed)
    with one_thread():
        yield seconds


def start(directory: Path, *flags: str) -> tuple[StartedWorker, str, int]:
    """-> the worker, the details of its phase, and how often the own kernels ran in a step of it."""
    details = {}
    config = ServerConfig.parse([*FLAGS, *flags])
    worker = start_worker(
        config, resolve_checkpoint(str(directory)), Mesh(), 0, lambda done: details.update({done.phase: done.detail})
    )
    Own.num_runs = 0
    driver = StepDriver(worker.runner, num_blocks=worker.limits.num_kv_blocks)
    driver.open(1, [3, 4, 5])
    assert len(driver.run([], [(1, 3)])) == 1
    return worker, details.get("compiled layers", ""), Own.num_runs


def test_a_start_takes_the_faster_layers_unless_they_are_asked_for(
    as_on_cuda: dict[str, float], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama")
    as_on_cuda["own"] = 0.8
    _, described, num_own = start(tmp_path)
    assert described.startswith("own kernels: the layers take 800 ms with own kernels, 1e+03 compiled")
    assert num_own == 1
    _, described, num_own = start(tmp_path, "torch_compile=T")
    assert (described, num_own) == ("", 0)
    as_on_cuda["own"] = 1.2
    _, described, num_own = start(tmp_path)
    assert described.startswith("compiled: ")
    assert num_own == 0


def test_own_kernels_that_compute_wrongly_are_never_taken(
    as_on_cuda: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    as_on_cuda["own"] = 0.1
    monkeypatch.setattr(Own, "factor", 1.5)
    worker, described, num_own = start(tmp_path)
    assert (described, num_own) == ("", 0)
    assert worker.limits.switched_off == ("triton_layers",)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the Triton kernels of layers are switched off: layers (")
    assert type(worker.runner.executor.plain) is ModuleExecutor, "for forwards that are too large for compiled layers"


def test_a_compiler_that_fails_on_another_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are compared in collectives: a rank that took part alone would wait for ever."""
    compiler, checks = Compiler(is_required=False), Checks()
    monkeypatch.setattr(layer_choice, "check_layers", lambda *_: True)
    monkeypatch.setattr(layer_choice, "time_layers", None)
    start: Any = SimpleNamespace(
        compiler=compiler,
        checks=checks,
        runner=SimpleNamespace(executor=None),
        config=SimpleNamespace(torch_compile=None),
        least=lambda value: min(value, 0),
    )
    assert layer_choice.compile_layers(start) == ""
    assert compiler.has_failed
    assert checks.switched_off == ["torch_compile"]


def test_a_start_on_a_cpu_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(layer_choice, "time_layers", None)
    _, described, _ = start(tmp_path)
    assert described == ""


def test_layers_are_timed_without_attention_by_the_clock(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    model, _ = load(tmp_path)

    class Slow(ModuleExecutor):
        def run(self, *arguments: Any) -> Tensor:
            for _ in range(20):
                torch.mm(torch.ones(300, 300), torch.ones(300, 300))
            return super().run(*arguments)

    with one_thread():
        times = time_layers(Slow(model), ModuleExecutor(model), model, Mesh(), max_tokens=64)
    assert [one.num_tokens for one in times] == [64]
    assert times[0].compiled_s > times[0].own_s > 0
