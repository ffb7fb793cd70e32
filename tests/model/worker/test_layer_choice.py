"""Compiled layers or our Triton kernels: which a start takes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.steps import StepDriver, one_thread
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.config import ServerConfig
from tokasaurus.model import triton_choice
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import CompiledExecutor, ModuleExecutor
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import device, entry, kernel_checks
from tokasaurus.model.worker.device import is_compiled
from tokasaurus.model.worker.entry import StartedWorker, start_worker
from tokasaurus.model.worker.self_check import Checks

FLAGS = [
    *("kv_cache_num_tokens=1024", "use_hydragen=F", "max_tokens_per_forward=256", "max_seqs_per_forward=16"),
    *("dtype=float32", "cpu_isa=torch"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("flag", "on", "has_triton", "is_plain", "expected"),
    [
        (None, CUDA, True, True, False),
        (None, CUDA, True, False, True),
        (None, CUDA, False, True, True),
        (None, CPU, True, False, False),
        (True, CUDA, True, True, True),
        (True, CPU, True, True, True),
        (False, CUDA, False, False, False),
    ],
)
def test_layers_are_compiled_where_our_kernels_do_not_compute_them(
    flag: bool | None,
    on: torch.device,
    has_triton: bool,
    is_plain: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_model(tmp_path, "llama")
    first, *others = resolve_checkpoint(str(tmp_path)).info.spec.layers
    layers = [first if is_plain else replace(first, residual_multiplier=0.5), *others]
    monkeypatch.setattr(triton_choice, "_has_triton", lambda: has_triton)
    assert is_compiled(flag, on, layers) is expected


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
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler compiles nothing."""
    monkeypatch.setattr(device, "is_compiled", lambda flag, _, layers: is_compiled(flag, CUDA, layers))
    monkeypatch.setattr(Compiler, "_compile_graph", lambda _self, graph, *_, **__: graph)
    monkeypatch.setattr(triton_choice, "_switched_off", set())
    monkeypatch.setattr(triton_choice, "_has_triton", lambda: True)
    monkeypatch.setattr(executors, "uses_triton", lambda _device, group: group not in triton_choice._switched_off)
    for module in (entry, kernel_checks):
        monkeypatch.setattr(module, "groups_in_use", lambda _, *groups: [one for one in groups if one == "layers"])
    for module in (executors, kernel_checks):
        monkeypatch.setattr(module, "FusedExecutor", Own)
    with one_thread():
        yield


def start(directory: Path, *flags: str) -> tuple[StartedWorker, int]:
    """-> the worker, and how often the own kernels ran in a step of it."""
    config = ServerConfig.parse([*FLAGS, *flags])
    worker = start_worker(config, resolve_checkpoint(str(directory)), Mesh(), 0, lambda _: None)
    Own.num_runs = 0
    driver = StepDriver(worker.runner, num_blocks=worker.limits.num_kv_blocks)
    driver.open(1, [3, 4, 5])
    assert len(driver.run([], [(1, 3)])) == 1
    return worker, Own.num_runs


@pytest.mark.usefixtures("as_on_cuda")
def test_a_start_takes_our_kernels_unless_compiled_layers_are_asked_for(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    worker, num_own = start(tmp_path)
    assert (type(worker.runner.executor), num_own) == (Own, 1)
    worker, num_own = start(tmp_path, "torch_compile=T")
    assert (type(worker.runner.executor), num_own) == (CompiledExecutor, 0)


@pytest.mark.usefixtures("as_on_cuda")
def test_own_kernels_that_compute_wrongly_are_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(Own, "factor", 1.5)
    worker, num_own = start(tmp_path)
    assert num_own == 0
    assert worker.limits.switched_off == ("triton_layers",)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the Triton kernels of layers are switched off: layers (")
    assert "torch_compile=T compiles them" in line
    assert type(worker.runner.executor) is ModuleExecutor


def test_a_compiler_that_fails_on_another_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, checks = Compiler(is_required=False), Checks()
    monkeypatch.setattr(kernel_checks, "check_layers", lambda *_: True)
    start: Any = SimpleNamespace(
        compiler=compiler,
        checks=checks,
        config=SimpleNamespace(torch_compile=None),
        least=lambda value: min(value, 0),
    )
    kernel_checks.compile_layers(start)
    assert compiler.has_failed
    assert checks.switched_off == ["torch_compile"]
