"""The checks of a start: what is right passes, in every family; what is wrong is found and switched off."""

import ctypes
import logging
import random
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.examples import few
from tests.helpers.installed_triton import needs_interpreter, needs_triton, run_python
from tests.helpers.tiny_model import FAMILIES, option_config, save_random_model, save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.device_sampling import finish_on_device
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler, TapedGraph
from tests.model.helpers.greedy_decoding import greedy_in_a_mixed_batch, load
from tests.model.helpers.steps import CPU, StepDriver, load_runner, make_runner, one_thread
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused
from tokasaurus.model import triton_choice
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, Scores
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import DecodeStepStruct, Kernels, load_kernels
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.weights import fill_randomly
from tokasaurus.model.execution import device_batch
from tokasaurus.model.execution import runner as runner_module
from tokasaurus.model.execution.graphs import StepGraphs
from tokasaurus.model.execution.recorded_inputs import fill_inputs_by_torch
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import attention_choice, device, entry
from tokasaurus.model.worker.entry import StartedWorker, load_worker, start_worker
from tokasaurus.model.worker.kernel_checks import check_layers, measure_one_call_decode
from tokasaurus.model.worker.self_check import (
    Checks,
    Measured,
    compared,
    measure_attention,
    measure_graphs,
    measure_group_graphs,
)
from tokasaurus.model.worker.start import PhaseLog
from tokasaurus.model.worker.warmup import ForwardLimits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def shape_of(dtype: torch.dtype, heads: tuple[int, int, int] = (8, 2, 64), page_size: int = 16) -> KVShape:
    return KVShape(2, *heads, page_size, dtype, CPU)


def check_attention(backend: AttentionBackend, shape: KVShape) -> None:
    wrong = Checks().describe_wrong("attention", lambda: measure_attention(backend, shape))
    assert wrong is None, wrong


def build(name: str, shape: KVShape, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    flashinfer_double.install(monkeypatch, any_dtype=True)
    return make_backend(name, shape, load_kernels() if name == "cpu" else None, max_graph_rows=4)


@pytest.mark.parametrize("heads", [(8, 2, 64), (9, 3, 64), (28, 4, 128), (3, 3, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_right_backends_are_far_within_the_tolerance(
    name: str, dtype: torch.dtype, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(dtype, heads)
    measured = list(measure_attention(build(name, shape, monkeypatch), shape))
    names = [what.removeprefix("attention ") for what, _, _ in measured]
    assert names[:4] == ["(decode)", "(prefill)", "(decode and prefill)", "(prefix group)"]
    assert names[4:] == (["(recorded decode)"] * 2 if name == "flashinfer" else [])
    for what, error, tolerance in measured:
        assert error < tolerance / 2, what


def test_layers_that_differ_are_compared_with_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = AttentionSpec(8, 2, 64, 0.125)
    layers, sinks = (usual, replace(usual, window=5, softcap=1.0)), (None, torch.linspace(0, 9, 8))
    shape = replace(shape_of(torch.float32), layers=layers, sinks=sinks)
    check_attention(build("torch", shape, monkeypatch), shape)


def windowed(dtype: torch.dtype, window: int) -> KVShape:
    """Three layers of two kinds."""
    usual = AttentionSpec(8, 2, 64, 0.125)
    limited = replace(usual, scale=0.2, window=window, softcap=20.0)
    sinks = (torch.linspace(0, 3, 8), None, torch.linspace(0, 3, 8))
    return replace(shape_of(dtype), num_layers=3, layers=(limited, usual, limited), sinks=sinks)


@pytest.mark.parametrize("window", [1, 20, 1000, 9999])
@pytest.mark.parametrize("name", ["torch", "flashinfer", "cpu"])
def test_one_layer_of_each_kind_is_compared_with_a_full_window(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = windowed(torch.float32 if name == "cpu" else torch.bfloat16, window)
    measured = list(measure_attention(build(name, shape, monkeypatch), shape))
    recorded, groups = name == "flashinfer", name != "flashinfer"
    for layer, is_full in ((2, window < 9999), (1, False)):
        found = [what.name for what in measured if f", layer {layer})" in what.name]
        assert len(found) == 3 + groups + 2 * recorded + (2 + recorded) * is_full
        assert (f"attention (full windows, layer {layer})" in found) is is_full
    assert all(", layer 0" not in what.name for what in measured)
    for what, error, tolerance in measured:
        assert error < tolerance / 2, what


@pytest.mark.parametrize("window", [5, 300, 4096])
@pytest.mark.parametrize("by", [-1, 1])
def test_windows_that_are_off_by_one_are_found(window: int, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = windowed(torch.bfloat16, window), FlashInferBackend._options

    def other(backend: FlashInferBackend, kind: Scores) -> dict[str, object]:
        return options(backend, kind if kind.window is None else kind._replace(window=kind.window + by))

    monkeypatch.setattr(FlashInferBackend, "_options", other)
    measured = measure_attention(build("flashinfer", shape, monkeypatch), shape)
    wrong = [what.name for what in measured if not what.is_right]
    assert {"attention (full windows, layer 2)"} <= set(wrong)
    if by == 1:
        assert {"attention (decode with a full window, layer 2)"} <= set(wrong)
        assert {"attention (recorded full window, layer 2)"} <= set(wrong)


@pytest.mark.parametrize("chunk", [5, 300, 8192, 9999])
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_chunks_that_are_off_by_one_are_found(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = AttentionSpec(8, 2, 64, 0.125)
    shape, before, after = (
        replace(shape_of(torch.float32), layers=(replace(usual, chunk=size), usual))
        for size in (chunk, chunk - 1, chunk + 1)
    )
    names = [f"attention ({what}, layer 0)" for what in ("decode at a chunk's ends", "prompt across chunks")]
    measured = list(measure_attention(build(name, shape, monkeypatch), shape))
    assert all(error < tolerance / 2 for _, error, tolerance in measured)
    assert [what.name for what in measured if "chunk" in what.name] == (names if chunk < 9999 else [])
    for other in (before, after):
        found = measure_attention(build(name, other, monkeypatch), shape)
        wrong = {what.name for what in found if not what.is_right}
        assert wrong >= ({*names} if chunk < 9999 else set())


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_the_cpu_kernels_pass_with_any_page_size(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(torch.float32, page_size=page_size)
    check_attention(build("cpu", shape, monkeypatch), shape)


class Wrong:
    """The plain backend, wrong in one way."""

    def __init__(self, backend: AttentionBackend, what: str) -> None:
        self._backend, self._what = backend, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        if self._what != "does not write":
            self._backend.write(key, value, layer)

    def attend(
        self, query: torch.Tensor, layer: int, part: Any, output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        asked = query * 1.2 if self._what == "scale" else query
        found, lse = self._backend.attend(asked, layer, part)
        match self._what:
            case "base-2 LSE":
                lse = None if lse is None else lse * 1.4427
            case "heads":
                found = found.flip(1)
            case "NaN":
                found[-1, -1, -1] = torch.nan
        return found if output is None else output.copy_(found), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["does not write", "base-2 LSE", "scale", "heads", "NaN"])
def test_wrong_backends_are_found(what: str, dtype: torch.dtype) -> None:
    shape = shape_of(dtype)
    with pytest.raises(AssertionError, match=r"^attention \(.*\) differs by .*, allowed is "):
        check_attention(Wrong(TorchBackend(shape), what), shape)


@pytest.mark.parametrize("fault", ["raises", "computes wrongly", "is built by a compiler that fails"])
def test_what_fails_is_left_out_with_one_line_or_refused_by_name(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer_double.install(monkeypatch)
    on_cuda = KVShape(2, 8, 2, 64, 16, torch.float32, torch.device("cuda", 0))
    monkeypatch.setattr("tokasaurus.model.attention.choose.missing_tools", lambda _environment: ["nvcc", "ninja"])

    def broken(_shape: KVShape, _max_graph_rows: int, _is_asked_for: bool) -> AttentionBackend:
        if fault == "raises":
            raise KeyError(torch.float32)
        if fault == "is built by a compiler that fails":
            raise RuntimeError("Ninja build failed\nx.cu: error: static assertion failed\nmore")
        return Wrong(TorchBackend(shape_of(torch.float32)), "heads")

    monkeypatch.setattr("tokasaurus.model.attention.choose._build_flashinfer", broken)

    def measure(backend: AttentionBackend, _shape: KVShape) -> Iterator[Measured]:
        return measure_attention(backend, shape_of(torch.float32)) if isinstance(backend, Wrong) else iter(())

    monkeypatch.setattr(attention_choice, "measure_attention", measure)
    checks = Checks()
    with caplog.at_level(logging.WARNING):
        chosen = attention_choice.choose_backend(ServerConfig.parse([]), on_cuda, None, 0, checks)
    assert isinstance(chosen, TorchBackend)
    assert checks.switched_off == ["attention_backend=flashinfer"]
    reason = next(result.failure for result in checks.results if result.failure is not None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"attention_backend=flashinfer is switched off: {reason}; others are slower")
    assert "compiled by nvcc and ninja, which must be installed" in line
    assert "\n" not in line
    assert ("static assertion failed" in line) == (fault == "is built by a compiler that fails")
    named = ServerConfig.parse(["attention_backend=flashinfer"])
    with pytest.raises(FlagRefused, match=r"^attention_backend=flashinfer: "):
        attention_choice.choose_backend(named, on_cuda, None, 0, checks)


def test_ranks_choose_alike() -> None:
    shape = shape_of(torch.float32)
    answers = iter([False, True])
    kernels = load_kernels()
    assert kernels is not None
    checks = Checks(all_agree=lambda _works: next(answers))
    assert isinstance(attention_choice.choose_backend(ServerConfig.parse([]), shape, kernels, 0, checks), TorchBackend)
    named = ServerConfig.parse(["attention_backend=cpu"])
    with pytest.raises(FlagRefused, match=r"^attention_backend=cpu: it fails on another rank$"):
        attention_choice.choose_backend(named, shape, kernels, 0, Checks(all_agree=lambda _works: False))


def test_a_backend_asked_for_by_name_that_fails_is_a_refused_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen2")
    flashinfer_double.install(monkeypatch)

    def fail(_self: FlashInferBackend, *_: Any) -> None:
        raise OSError("cannot load x.so")

    monkeypatch.setattr(flashinfer_backend.FlashInferBackend, "__init__", fail)
    config = ServerConfig.parse(["attention_backend=flashinfer", "kv_cache_num_tokens=100"])
    with pytest.raises(FlagRefused, match=r"^attention_backend=flashinfer: OSError: cannot load x\.so$") as raised:
        start_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda _: None)
    assert raised.value.exit_code == 2


def test_a_check_that_fails_is_noted_with_one_line_and_by_name_refused(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks()
    right, other = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1.0, torch.nan, 4.5])

    def measure_wrong() -> Iterator[Measured]:
        yield compared("first", right, right, 0.1)
        yield compared("second", other, right, 0.1)
        yield compared("third", right, right, 0.1)

    def measure_right() -> Iterator[Measured]:
        yield compared("of zeros", torch.zeros(2), torch.zeros(2), 0.0)
        yield compared("within", other, right, 0.125)

    def fail() -> Iterator[Measured]:
        yield compared("first", right, right, 0.1)
        raise KeyError("no such\nkernel")

    assert checks.passes("good", measure_right, "good is", "worse")
    assert not checks.passes("bad", measure_wrong, "bad is", "it is slow")
    assert not checks.passes("broken", fail, "broken is", "it is slow")
    expected = ["second differs by 0.12, allowed is 0.1", "KeyError: 'no such\\nkernel'"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"{name} is switched off: {why}; it is slow" for name, why in zip(("bad", "broken"), expected, strict=True)
    ]
    assert checks.switched_off == ["bad", "broken"]
    with pytest.raises(FlagRefused, match=f"^bad=T: {expected[0]}$"):
        checks.passes("bad", measure_wrong, "bad is", "it is slow", flag="bad=T")
    found = [(result.feature, result.failure) for result in checks.results]
    assert found[:7] == [("good", None)] * 2 + [
        ("bad", None),
        ("bad", expected[0]),
        ("bad", None),
        ("broken", None),
        ("broken", expected[1]),
    ]


def test_memory_that_is_missing_is_no_fault_of_what_is_checked() -> None:
    def fail() -> Iterator[Measured]:
        raise torch.OutOfMemoryError
        yield

    with pytest.raises(torch.OutOfMemoryError):
        Checks().passes("feature", fail, "it is", "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [([1.0, torch.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, torch.nan]), ([1.0, torch.inf], [1.0, 2.0]), ([1.0], [0.0])],
)
def test_what_is_not_finite_or_should_be_zero_is_not_right(found: list[float], expected: list[float]) -> None:
    assert not compared("x", torch.tensor(found), torch.tensor(expected), 0.5).is_right


def test_ranks_switch_off_alike(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks(all_agree=lambda _works: False)
    assert not checks.passes("feature", lambda: iter(()), "feature is", "slow")
    assert checks.switched_off == ["feature"]
    assert [record.getMessage() for record in caplog.records] == [
        "feature is switched off: it fails on another rank; slow"
    ]


@needs_triton
@needs_interpreter
@pytest.mark.long
def test_wrong_kernels_are_switched_off() -> None:
    assert run_python("-m", "tests.model.worker.helpers.interpreted_kernels") == "all found\n"


@pytest.mark.parametrize("wrong_group", ["attention", "steps", None])
def test_a_group_of_kernels_that_is_wrong_is_switched_off_alone(
    wrong_group: triton_choice.KernelGroup | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off = set[triton_choice.KernelGroup]()
    monkeypatch.setattr(triton_choice, "_switched_off", off)
    right = torch.ones(1)

    def measure() -> Iterator[Measured]:
        yield compared("x", right if wrong_group in off else right + 1, right, 0.1)

    checks = Checks()
    passes = checks.passes("feature", measure, "it is", "slow", groups=["attention", "steps"])
    assert passes == (wrong_group is not None)
    assert off == {wrong_group} - {None}
    expected = "feature" if wrong_group is None else f"triton_{wrong_group}"
    assert checks.switched_off == [expected]
    (line,) = [record.getMessage() for record in caplog.records]
    of_kernels = f"the Triton kernels of {wrong_group} are switched off: x differs by 1, allowed is 0.1; without them, "
    assert line.startswith("it is switched off: x differs" if wrong_group is None else of_kernels)
    off.clear()
    with pytest.raises(FlagRefused, match=r"^feature=T: x differs by 1, allowed is 0\.1$"):
        Checks().passes("feature", measure, "it is", "slow", "feature=T", ["layers"])
    assert off == set()


FLAGS = ["kv_cache_num_tokens=1024", "use_hydragen=F", "max_tokens_per_forward=256", "max_seqs_per_forward=16"]
NUM_BLOCKS = 60

Graph = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_compilations() -> Iterator[None]:
    """In a process, all compilers of all tests share the limit of one function's compilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def start(directory: Path, *flags: str) -> StartedWorker:
    usual = [flag for flag in FLAGS if not any(flag.split("=")[0] == other.split("=")[0] for other in flags)]
    return start_worker(
        ServerConfig.parse([*usual, *flags]), resolve_checkpoint(str(directory)), Mesh(), 0, lambda _: None
    )


def tokens_of(worker: StartedWorker) -> list[list[int]]:
    driver = StepDriver(worker.runner, num_blocks=worker.limits.num_kv_blocks)
    return greedy_in_a_mixed_batch(driver, [[3, 4, 5], [7] * 20], 8, random.Random(0))[0]


def compiled_wrongly(fault: str) -> Callable[..., Any]:
    """In the place of Compiler._compile_graph: each layer's result is wrong in one way."""

    def compile_graph(_self: Compiler, graph: Graph, _inputs: object, **_: object) -> Graph:
        def change(result: torch.Tensor) -> torch.Tensor:
            match fault:
                case "scale":
                    return result * 1.1
                case "last row":
                    return torch.cat((result[:-1], result[-1:].flip(-1)))
            return result.masked_fill(torch.arange(len(result))[:, None] == 1, torch.nan)

        def call(*arguments: Any) -> Any:
            results = graph(*arguments)
            return tuple(change(x) if isinstance(x, torch.Tensor) and x.ndim == 2 else x for x in results)

        return call

    return compile_graph


@few(1, "fault", ["NaN", "scale", "last row"])
def test_layers_that_are_compiled_wrongly_run_uncompiled(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "qwen2")
    expected = tokens_of(start(tmp_path, "torch_compile=F"))
    monkeypatch.setattr(device, "is_compiled", lambda flag, *_: flag is not False)  # as on CUDA
    with unittest.mock.patch.object(Compiler, "_compile_graph", compiled_wrongly(fault)):
        worker = start(tmp_path)
        assert tokens_of(worker) == expected
        assert worker.limits.switched_off == ("torch_compile",)
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert line.startswith("torch_compile is switched off: l")
        assert line.endswith("; the layers run uncompiled, which is slower")
        with pytest.raises(FlagRefused, match=r"^torch_compile=T: (layers|logits) \(.*\): .* row differs by "):
            start(tmp_path, "torch_compile=T")


def test_layers_that_do_not_compile_count_as_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(device, "is_compiled", lambda flag, *_: flag is not False)  # as on CUDA
    with unittest.mock.patch.object(Compiler, "_compile_graph", side_effect=RuntimeError("no Triton")):
        assert start(tmp_path).limits.switched_off == ("torch_compile",)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_layers_pass_in_every_family_and_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    """The CPU kernels' layers, with the weights of a test model and with random ones."""
    save_tiny_model(tmp_path, family)
    config = ServerConfig.parse([*FLAGS, f"dtype={dtype}"])
    checkpoint = resolve_checkpoint(str(tmp_path))
    for fill in (None, lambda model, filled: fill_randomly(iter(model.weight_shards()), filled.note)):
        loaded = load_worker(config, checkpoint, Mesh(), 0, PhaseLog(lambda _: None), fill, Checks(is_thorough=True))
        assert check_layers(loaded)
        names = [result.measured.name for result in loaded.checks.results if result.feature == "layers"]
        assert names == [
            f"layers ({forward}): {row} row"
            for forward in ("prefill", "decode and prefill", "decode")
            for row in ("worst", "median")
        ]


@pytest.mark.parametrize("fault", ["raises", "stale hidden states"])
def test_wrong_layers_of_the_cpu_kernels_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    checkpoint = resolve_checkpoint(str(tmp_path))
    config, checks = ServerConfig.parse(FLAGS), Checks(is_thorough=True)
    loaded = load_worker(config, checkpoint, Mesh(), 0, PhaseLog(lambda _: None), checks=checks)

    def run(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("illegal instruction")
        return hidden

    monkeypatch.setattr(loaded.runner.executor, "run", run)
    assert not check_layers(loaded)
    failures = [result.failure for result in loaded.checks.results if result.failure is not None]
    assert len(failures) == (1 if fault == "raises" else 6), "a thorough check goes on after a wrong result"


@pytest.mark.parametrize(
    ("num_blocks", "limits"),
    [(NUM_BLOCKS, {}), (1, {}), (2, {}), (NUM_BLOCKS, {"context_length": 1}), (NUM_BLOCKS, {"max_tokens": 8})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_decode_steps_in_one_call_pass(
    dtype: torch.dtype, num_blocks: int, limits: dict[str, int], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    measured = measure_decode(load_runner(tmp_path, dtype), num_blocks, **limits)
    assert len(measured) == 2
    assert all(one.is_right for one in measured), measured


@pytest.mark.parametrize("fault", ["drawn otherwise", "other noise", "keys not stored"])
def test_wrong_decode_steps_in_one_call_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    runner = load_runner(tmp_path, torch.float32)
    (cache,) = runner._backend.caches
    no_keys = np.zeros(NUM_BLOCKS, np.uint64)
    original = Kernels.decode_step

    def decode_step(kernels: Kernels, step: DecodeStepStruct) -> None:
        before = cache.clone()
        if fault == "other noise":
            step.sequence_keys = no_keys.ctypes.data
        original(kernels, step)
        if fault == "drawn otherwise":
            last = (ctypes.c_int64 * step.num_rows).from_address(step.sampled)
            last[step.num_rows - 1] ^= 1
        if fault == "keys not stored":
            cache.copy_(before)

    monkeypatch.setattr(Kernels, "decode_step", decode_step)
    assert not all(one.is_right for one in measure_decode(runner))


def measure_decode(runner: ModelRunner, num_blocks: int = NUM_BLOCKS, **limits: int) -> list[Measured]:
    assert runner.decodes_in_one_call
    return list(measure_one_call_decode(runner, 16, num_blocks, limits_of(runner._model, limits)))


def recorded(directory: Path, monkeypatch: pytest.MonkeyPatch, backend: str, compiled: bool = False) -> ModelRunner:
    """A runner with graphs of 3 and 11 rows, which draw tokens too, and of 30 tokens."""
    flashinfer_double.install(monkeypatch, any_dtype=True)
    monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
    monkeypatch.setattr(runner_module, "draw_and_finish", finish_on_device)
    tape = LaunchTape()
    model, info = load(directory)
    compiler = TapedCompiler(tape) if compiled else None
    runner = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, compiler=compiler)
    runner.record_graphs(tape, [11, 3], chunk_sizes=[30])
    return runner


def measure(runner: ModelRunner, num_blocks: int = NUM_BLOCKS, **limits: int) -> list[Measured]:
    return list(measure_graphs(runner, runner._model, 16, num_blocks, limits_of(runner._model, limits)))


def limits_of(model: Decoder, others: dict[str, int]) -> ForwardLimits:
    usual = {"max_tokens": 256, "max_seqs": 16, "context_length": 64, "vocab_size": model.vocab_size}
    return ForwardLimits(**(usual | others))


@few(2, ("backend", "compiled"), [("torch", False), ("flashinfer", False), ("torch", True), ("flashinfer", True)])
def test_right_graphs_pass(backend: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with one_thread():
        runner = recorded(tmp_path, monkeypatch, backend, compiled)
        measured = measure(runner)
    assert runner._compiler is None or runner._compiler.num_compilations == 1, "the check compiles nothing again"
    assert all(one.is_right for one in measured), measured
    rows = [f"{what}: {row} row" for what in ("", ", logits") for row in ("worst", "median")]
    kinds = [*rows, ": share of tokens"]
    decodes = [
        f"graph of {size} rows{pieces}{kind}" for size in (3, 11) for pieces in ("", " in pieces") for kind in kinds
    ]
    with_prompts = [f"graph of 30 tokens with prompts{kind}" for kind in rows]  # no prompt fits into 3 tokens
    assert [one.name for one in measured] == decodes + with_prompts


@pytest.mark.parametrize(
    ("num_blocks", "limits"),
    [
        (1, {}),
        (2, {}),
        (NUM_BLOCKS, {"context_length": 17}),
        (NUM_BLOCKS, {"context_length": 2}),
        (NUM_BLOCKS, {"context_length": 1}),
        (NUM_BLOCKS, {"max_tokens": 16}),
    ],
)
def test_right_graphs_pass_where_there_is_little_room(
    num_blocks: int, limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        measured = measure(recorded(tmp_path, monkeypatch, "flashinfer"), num_blocks, **limits)
    assert measured
    assert all(one.is_right for one in measured), measured


@few(1, "compiled", [False, True])
def test_right_graphs_with_prefix_groups_pass(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with one_thread():
        runner = recorded(tmp_path, monkeypatch, "flashinfer", compiled)
        runner.record_groups([11, 3])
        measured = measure_groups(runner)
        assert all(one.is_right for one in measured), measured
        kinds = [*(f"{what}: {row} row" for what in ("", ", logits") for row in ("worst", "median"))]
        names = [f"graph of {size} rows with prefix groups{kind}" for size in (3, 11) for kind in kinds]
        assert [one.name for one in measured if "share" not in one.name] == names
        assert not measure_groups(runner, context_length=1), "no step can have groups"


GROUP_FAULTS = {
    "no prefix": "the prefixes are empty",
    "stale prefixes": "each step has the groups of the first",
    "stale LSE": "rows that are in no group keep what they had in one",
    "nothing is replayed": "",
}


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_wrong_graphs_with_prefix_groups_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        runner = recorded(tmp_path, monkeypatch, "flashinfer")
        runner.record_groups([11, 3])
        backend = runner._backend
        assert isinstance(backend, FlashInferBackend)
        prefixes = backend._prefixes
        assert prefixes is not None
        match fault:
            case "no prefix":
                after_plans(monkeypatch, lambda _num_rows: prefixes._query_starts.zero_())
            case "stale prefixes":
                first = dict[int, torch.Tensor]()

                def keep(num_rows: int) -> None:
                    starts = prefixes._query_starts
                    starts.copy_(first.setdefault(num_rows, starts.clone()))

                after_plans(monkeypatch, keep)
            case "stale LSE":
                lse = torch.zeros_like(prefixes.lse)
                after_plans(monkeypatch, lambda num_rows: prefixes.lse[:num_rows].copy_(lse[:num_rows]))
            case "nothing is replayed":
                monkeypatch.setattr(TapedGraph, "replay", lambda _graph: None)
        wrong = [one.name for one in measure_groups(runner) if not one.is_right]
    assert wrong


def after_plans(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], object]) -> None:
    """`call` gets the rows of each step with recorded prefixes, after its plan."""
    plan = FlashInferBackend._run_prefix_plan

    def plan_and_call(self: FlashInferBackend, *arguments: Any) -> None:
        plan(self, *arguments)
        call(arguments[-2].num_rows)

    monkeypatch.setattr(FlashInferBackend, "_run_prefix_plan", plan_and_call)


def measure_groups(runner: ModelRunner, **limits: int) -> list[Measured]:
    return list(measure_group_graphs(runner, runner._model, 16, NUM_BLOCKS, limits_of(runner._model, limits)))


@pytest.mark.parametrize("fault", ["", "raises", "no memory", "wrong"])
def test_recordings_with_prefix_groups_that_fail_cost_nothing_else(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer_double.install(monkeypatch)
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())
    of_groups = ["use_hydragen=T", "hydragen_min_group_size=2", "hydragen_min_prefix_len=16"]  # nothing is measured
    sizes = ["max_tokens_per_forward=256", "max_seqs_per_forward=8"]
    flags = ["cpu_isa=torch", "dtype=bfloat16", "attention_backend=flashinfer", *of_groups, *sizes]
    if fault == "wrong":
        monkeypatch.setattr(flashinfer_double.PrefillWrapper, "run_planned", lambda *_: None)
    elif fault:
        error = RuntimeError("no\nmore") if fault == "raises" else torch.OutOfMemoryError("no\nmore")

        def fail(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(FlashInferBackend, "prepare_groups", once(fail, FlashInferBackend.prepare_groups))
    worker = start(tmp_path, *flags)
    assert worker.runner.graph_sizes == [4, 8]
    assert worker.runner.group_graph_sizes == ([] if fault else [4, 8])
    assert worker.limits.switched_off == (("group_graphs",) if fault else ())
    assert worker.runner.max_recorded_groups == (0 if fault else 4)
    lines = [r.getMessage() for r in caplog.records if "prefix groups is switched off" in r.getMessage()]
    assert len(lines) == bool(fault)
    if fault and fault != "wrong":
        what, without = "one graph for a decode step with prefix groups is switched off", "such steps replay pieces"
        assert lines[0].startswith(f"{what}: RuntimeError: no; {without}")


def test_layers_with_windows_have_no_prefix_groups_with_flashinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recordings, its warm-up, and what it tells the manager."""
    flashinfer_double.install(monkeypatch)
    save_random_model(tmp_path, option_config("gemma2", 0))
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())
    flags = ["cpu_isa=torch", "dtype=bfloat16", "max_tokens_per_forward=256", "max_seqs_per_forward=8"]
    worker = start(tmp_path, *flags, "attention_backend=flashinfer", "use_hydragen=T")
    assert (worker.runner.graph_sizes, worker.runner.group_graph_sizes) == ([4, 8], [])
    assert worker.limits.switched_off == ()
    assert worker.limits.hydragen is None
    (line,) = [record.getMessage() for record in caplog.records if "use_hydragen" in record.getMessage()]
    assert line.startswith("use_hydragen=T does nothing: ")
    torch_worker = start(tmp_path, *flags, "attention_backend=torch", "use_hydragen=T")
    assert torch_worker.limits.hydragen is not None


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_layers_with_chunks_have_no_prefix_groups(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A chunk may begin in the prefix, or in what follows. The same layers without chunks have groups."""
    flags = [f"attention_backend={backend}", "use_hydragen=T"]
    flags += ["hydragen_min_group_size=2", "hydragen_min_prefix_len=16"]  # nothing is measured
    save_random_model(tmp_path, option_config("llama4_text", 0))
    assert start(tmp_path, *flags).limits.hydragen is None
    (line,) = [record.getMessage() for record in caplog.records if "use_hydragen" in record.getMessage()]
    assert line.startswith("use_hydragen=T does nothing: ")
    assert line.endswith("chunks")
    save_random_model(tmp_path, option_config("llama4_text", 0, attention_chunk_size=None, layer_types=None))
    assert start(tmp_path, *flags).limits.hydragen is not None


def once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """The first call is `first`'s, all others are `then`'s."""
    calls = iter([first])
    return lambda *arguments: next(calls, then)(*arguments)


FAULTS: dict[str, str] = {
    "another LM head": "logits",
    "stale tokens": "row",
    "stale positions": "row",
    "stale plans": "row",
    "other noise": "share of tokens",
    "stale tokens of prompts": "tokens with prompts",
    "padding is not left out": "tokens with prompts",
    "nothing is replayed": "row",
    "the last piece is not replayed": "row",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_graphs_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    logits = Decoder.logits
    if fault == "another LM head":
        monkeypatch.setattr(Decoder, "logits", lambda model, hidden: -logits(model, hidden.flip(0)))
    with one_thread():
        runner = recorded(tmp_path, monkeypatch, "flashinfer")
        monkeypatch.setattr(Decoder, "logits", logits)
        graphs = runner._graphs
        assert graphs is not None
        original = TapedGraph.replay
        match fault:
            case "stale tokens":
                keep_first(monkeypatch, graphs.inputs.token_ids)
            case "stale positions":
                keep_first(monkeypatch, graphs.inputs.positions)
            case "other noise":
                run = StepGraphs.run

                def run_without_noise(graphs: StepGraphs, batch: Any, *others: Any) -> Any:
                    keys = batch.sampling.noise_keys.clone()
                    batch.sampling.noise_keys.zero_()
                    output = run(graphs, batch, *others)
                    batch.sampling.noise_keys.copy_(keys)
                    return output

                monkeypatch.setattr(StepGraphs, "run", run_without_noise)
            case "stale plans":
                plan, planned = FlashInferBackend.plan_recorded, set[int]()

                def plan_once(backend: FlashInferBackend, layout: Any) -> None:
                    if len(layout.kv_indices) not in planned:
                        planned.add(len(layout.kv_indices))
                        plan(backend, layout)

                monkeypatch.setattr(FlashInferBackend, "plan_recorded", plan_once)
            case "stale tokens of prompts":
                run = StepGraphs.run

                def run_stale(graphs: StepGraphs, batch: Any, *others: Any) -> Any:
                    if batch.num_sampled < len(batch.token_ids):
                        batch.token_ids.fill_(1)
                    return run(graphs, batch, *others)

                monkeypatch.setattr(StepGraphs, "run", run_stale)
            case "padding is not left out":
                run = StepGraphs.run

                def write_padding(graphs: StepGraphs, batch: Any, *others: Any) -> Any:
                    num_tokens = len(batch.token_slots)
                    kv_indices = graphs.inputs.memory.kv_indices
                    kv_indices[num_tokens : len(batch.token_ids)] = kv_indices[num_tokens - 1]
                    return run(graphs, batch, *others)

                monkeypatch.setattr(StepGraphs, "run", write_padding)
            case "nothing is replayed":
                monkeypatch.setattr(TapedGraph, "replay", lambda _graph: None)
            case "the last piece is not replayed":
                lasts = {id(recording.last) for recording in graphs._recordings.values()}
                monkeypatch.setattr(TapedGraph, "replay", lambda g: None if id(g) in lasts else original(g))
        wrong = [one.name for one in measure(runner) if not one.is_right]
    assert wrong
    assert all(FAULTS[fault] in name for name in wrong), wrong


def keep_first(monkeypatch: pytest.MonkeyPatch, buffer: torch.Tensor) -> None:
    """The first rows of the buffer keep what a step of as many rows is first given there."""
    fill = device_batch.fill_inputs
    first = dict[int, torch.Tensor]()

    def fill_once(*arguments: Any) -> None:
        fill(*arguments)
        num_rows = len(arguments[3].slots)
        buffer[:num_rows].copy_(first.setdefault(num_rows, buffer[:num_rows].clone()))

    monkeypatch.setattr(device_batch, "fill_inputs", fill_once)


def test_graphs_switched_off_at_the_start_leave_right_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    expected = tokens_of(start(tmp_path, "cpu_isa=torch", "dtype=float32"))
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())
    monkeypatch.setattr(StepGraphs, "run", without_its_inputs(StepGraphs.run))
    worker = start(tmp_path, "cpu_isa=torch", "dtype=float32")
    assert worker.limits.switched_off == ("use_cudagraphs",)
    assert tokens_of(worker) == expected
    (line,) = [r.getMessage() for r in caplog.records if "use_cudagraphs" in r.getMessage()]
    assert line.startswith("use_cudagraphs is switched off: graph of 4 rows")


@needs_triton
def test_a_wrong_kernel_that_fills_inputs_of_graphs_is_switched_off_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokasaurus.model.execution import triton_inputs

    save_tiny_model(tmp_path, "llama")
    uses_triton = triton_choice.uses_triton
    monkeypatch.setattr(triton_choice, "_switched_off", set())
    for module in (triton_choice, device_batch):
        monkeypatch.setattr(
            module, "uses_triton", lambda _, group: group == "steps" and uses_triton(torch.device("cuda"), group)
        )
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())

    def fill_other_tokens(staged: Any, slots: Any, *others: Any) -> None:
        fill_inputs_by_torch(staged, slots._replace(last_tokens=slots.last_tokens + 1), *others)

    monkeypatch.setattr(triton_inputs, "fill_inputs", fill_other_tokens)
    worker = start(tmp_path, "cpu_isa=torch", "dtype=float32")
    assert worker.limits.switched_off == ("triton_steps",)
    assert worker.runner.graph_sizes == [4, 8]


@few(1, "when", ["at the start", "at the estimate"])
def test_recordings_that_raise_leave_a_server_without_graphs(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    flags = ["cpu_isa=torch", "dtype=float32"]
    expected = tokens_of(start(tmp_path, *flags))
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])

    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    class Broken(LaunchTape):
        begin = fail

    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: Broken())
    monkeypatch.setattr(entry, "graph_bytes", fail if when == "at the estimate" else lambda *_: 0)
    size_kv_cache = entry.size_kv_cache

    def size_as_on_cuda(*arguments: Any, measure_graphs: Callable[[], int], **named: Any) -> Any:
        assert measure_graphs() == 0
        return size_kv_cache(*arguments, measure_graphs=measure_graphs, **named)

    monkeypatch.setattr(entry, "size_kv_cache", size_as_on_cuda)
    worker = start(tmp_path, *flags)
    assert worker.limits.switched_off == ("use_cudagraphs",)
    assert worker.runner.graph_sizes == []
    assert tokens_of(worker) == expected
    (line,) = [r.getMessage() for r in caplog.records if "use_cudagraphs" in r.getMessage()]
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert line == f"use_cudagraphs is switched off: {reason}; steps are slower without"
    with pytest.raises(FlagRefused, match=f"^use_cudagraphs=T: {reason}$"):
        start(tmp_path, *flags, "use_cudagraphs=T")


def load_with_wrong_logits_on_one_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    torch.set_num_threads(1)
    flags = ["dtype=float32", "device=cpu", "tp_size=2", "max_tokens_per_forward=64", "max_seqs_per_forward=8"]
    config, checkpoint = ServerConfig.parse(flags), resolve_checkpoint(str(rendezvous.parent))
    logits = Decoder.logits

    def wrong(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(model, hidden)
        return found * 1.1 if rank == 1 and not model._compiler.has_failed else found

    with (
        joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh,
        unittest.mock.patch.object(device, "is_compiled", return_value=True),
        unittest.mock.patch.object(Compiler, "_compile_graph", lambda _self, graph, *_, **__: graph),
        unittest.mock.patch.object(Decoder, "logits", wrong),
    ):
        loaded = load_worker(config, checkpoint, mesh, rank, PhaseLog(lambda _: None))
        answers.send(loaded.checks.switched_off)


@pytest.mark.long
def test_what_is_wrong_on_one_rank_is_switched_off_on_all(tmp_path: Path) -> None:
    """A rank that left the check at its first wrong result would leave the others in a collective."""
    save_tiny_model(tmp_path, "llama")
    assert run_ranks(2, tmp_path, 1, load_with_wrong_logits_on_one_rank) == [[["torch_compile"]]] * 2


def without_its_inputs(run: Graph) -> Graph:
    def call(graphs: StepGraphs, batch: Any, *others: Any) -> Any:
        batch.token_ids.zero_()
        return run(graphs, batch, *others)

    return call
