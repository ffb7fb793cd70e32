"""Decode steps as graphs, recorded on a CPU by a tape that replays operations into the same memory."""

import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.examples import few
from tests.helpers.installed_triton import needs_interpreter, needs_triton, run_python
from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.decode_steps import (
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    STEP,
    Sampled,
    assert_same,
    decode_every_number_of_rows,
)
from tests.model.execution.helpers.device_sampling import sample_on_device
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler, TapedGraph, address
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tokasaurus.checkpoint import fit_to_tensors, read_model_info, weight_files
from tokasaurus.model.buffer_sizes import graph_sizes
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution import runner as runner_module
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh


def make_taped(directory: Path, backend: str, compiled: bool = False) -> tuple[ModelRunner, Decoder, LaunchTape]:
    tape = LaunchTape()
    compiler: Compiler | None = TapedCompiler(tape) if compiled else None
    model, info = load(directory)
    runner = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, compiler=compiler)
    runner.record_graphs(tape, graph_sizes(MAX_ROWS, STEP))
    return runner, model, tape


@few(
    2,
    ("family", "backend", "compiled"),
    [("llama", "cpu", False), ("qwen3", "torch", True), *((family, "torch", False) for family in FAMILIES)],
)
def test_replays_give_the_tokens_of_eager_steps_at_every_size(
    family: str, backend: str, compiled: bool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family)
    model, info = load(tmp_path)
    with one_thread():
        runner, _, tape = make_taped(tmp_path, backend, compiled)
        assert len(tape.graphs) == 3 * (info.num_layers + 1), "11, 8 and 4 rows"
        eager = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        assert_same(decode_every_number_of_rows(runner), decode_every_number_of_rows(eager))


@few(1, "compiled", [False, True])
def test_prefix_groups_that_change_with_every_step_replay_the_same_graphs(compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    sampled = []
    with one_thread():
        runner, _, _ = make_taped(tmp_path, "torch", compiled)
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        for each in (runner, eager):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS), 16, seed=3)
            samples.run(12, grouped=True)
            assert samples.num_grouped > 20
            sampled.append(samples.sampled)
    assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))


@few(1, "compiled", [False, True])
def test_graphs_read_and_write_only_parameters_tables_and_their_own_buffers(compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    runner, model, tape = make_taped(tmp_path, "torch", compiled)
    assert runner._graphs is not None
    own = [value for value in vars(runner._graphs).values() if isinstance(value, torch.Tensor)]
    table = [value for value in vars(model._rotary).values() if isinstance(value, torch.Tensor)]
    # Compiled code declares that attention changes the cache, and copies one element of it.
    caches = runner._backend.caches if compiled else []
    known = {address(tensor) for tensor in (*own, *table, *model.parameters(), *caches)}
    assert tape.outside_addresses() <= known
    assert {address(tensor) for tensor in own} <= tape.outside_addresses(), "each buffer is used"


@needs_triton
@needs_interpreter
@pytest.mark.long
def test_replays_of_the_layers_triton_kernels_give_the_tokens_of_the_modules() -> None:
    """Interpreted. Around attention with prefix groups, and with attention recorded too."""
    assert run_python("-W", "ignore", "-m", "tests.model.execution.helpers.interpreted_graphs") == "all equal\n"


def test_sizes_are_multiples_below_the_largest_and_begin_with_it() -> None:
    assert graph_sizes(11, 4) == [11, 8, 4]
    assert graph_sizes(16, 8) == [16, 8]
    assert graph_sizes(3, 16) == [3]


@few(1, "compiled", [False, True])
def test_steps_without_prefix_groups_replay_attention_too(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's double reads what is planned from the buffers of its recordings alone."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the models are in float32
    save_tiny_model(tmp_path, "qwen3")
    model, info = load(tmp_path)
    with one_thread():
        runner, _, tape = make_taped(tmp_path, "flashinfer", compiled)
        assert len(tape.graphs) == 3 * (info.num_layers + 1 + 1), "around attention, and with it"
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        assert_same(decode_every_number_of_rows(runner), decode_every_number_of_rows(eager))
        sampled = []
        for each in (runner, eager):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS, seed=1), 16, seed=3)
            samples.run(8, grouped=True)
            sampled.append(samples.sampled)
        assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))


def test_recorded_attention_in_bfloat16_asks_for_what_flashinfer_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strict double: a float32 output would be refused. Prefix groups are merged around the recordings."""
    flashinfer_double.install(monkeypatch)
    save_tiny_model(tmp_path, "llama")
    files = weight_files(tmp_path)
    info = fit_to_tensors(read_model_info(tmp_path), files)
    model = build_decoder(info, Mesh(), torch.bfloat16)
    model.materialize(CPU, info.context_length)
    load_weights(files, model.weight_shards(), model.ignores, lambda _: None)
    sizes = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SLOTS, "dtype": torch.bfloat16}
    with one_thread():
        recorded, eager = (make_runner(model, info, "flashinfer", **sizes) for _ in range(2))
        recorded.record_graphs(LaunchTape(), graph_sizes(MAX_ROWS, STEP))
        sampled = []
        for each in (recorded, eager):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS, seed=1), 16, seed=3)
            samples.run(6, grouped=True)
            samples.run(6, grouped=False)
            assert samples.num_grouped > 10
            sampled.append(samples.sampled)
        assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))


def test_a_plain_decode_step_launches_nothing_between_its_inputs_and_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    save_tiny_model(tmp_path, "llama")
    runner, _, _ = make_taped(tmp_path, "flashinfer")
    driver = StepDriver(runner, num_blocks=NUM_BLOCKS)
    for slot in (1, 2, 3):
        driver.open(slot, [5, slot, 7])
        driver.run([], [(slot, 3)])
    replayed: list[TapedGraph] = []
    original = TapedGraph.replay
    monkeypatch.setattr(TapedGraph, "replay", lambda graph: (replayed.append(graph), original(graph)))
    driver.run([3, 1, 2], [])
    assert len(replayed) == 1
    assert sum("flashinfer_double" in str(function) for function, *_ in replayed[0].operations) == 3, (
        "one for each layer"
    )


def test_sampling_is_replayed_with_the_rows_parameters_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits, temperatures and seeds differ by row and change with each step. Penalties and top log-probabilities are
    not in the graph, nor log-probabilities of the distribution that is drawn from, unless it is the model's own."""
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        model, info = load(tmp_path)
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
        monkeypatch.setattr(runner_module, "sample_by_triton", sample_on_device)
        runner, _, tape = make_taped(tmp_path, "torch")
        assert len(tape.graphs) == 3 * (info.num_layers + 1 + 1)
        num_sampled = []
        monkeypatch.setattr(ModelRunner, "_sample", count_calls(ModelRunner._sample, num_sampled))
        assert_same(decode_with_every_option(runner), decode_with_every_option(eager))
    of_graphs, of_eager = num_sampled.count(runner), num_sampled.count(eager)
    assert of_eager == 7 + 20 + 4 + 4
    assert of_graphs == 7 + 4 + 2, "prompts, and the steps with more than the graphs compute"


def test_only_decode_steps_above_the_largest_size_miss_all_graphs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    runner, _, _ = make_taped(tmp_path, "torch")
    driver, slots = StepDriver(runner, num_blocks=NUM_BLOCKS), list(range(1, MAX_ROWS + 2))
    missed = []
    original = ModelRunner.run
    runner.run = lambda step: missed.append((result := original(runner, step)).missed_graphs) or result
    for slot in slots:
        driver.open(slot, [slot, 2])
    driver.run([], [(slot, 2) for slot in slots])
    driver.run(slots[:-1], [])
    driver.run(slots, [])
    assert missed == [False, False, True]


def count_calls(method: Callable[..., Any], calls: list[ModelRunner]) -> Callable[..., Any]:
    def call(runner: ModelRunner, *args: Any) -> Any:
        calls.append(runner)
        return method(runner, *args)

    return call


def decode_with_every_option(runner: ModelRunner) -> list[Sampled]:
    driver = StepDriver(runner, num_blocks=NUM_BLOCKS)
    params = ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2})
    steps = []
    for slot, options in enumerate(params, start=1):
        driver.open(slot, [slot, 4, 9], temperature=1.0 + slot / 4, seed=slot, **options)
        steps.append(driver.run([], [(slot, 3)]))
    rng = random.Random(0)
    steps += [driver.run(rng.sample([1, 2, 3, 4], rng.randint(1, 4)), []) for _ in range(20)]
    driver.open(5, [3, 1], num_top=2)
    steps.append(driver.run([], [(5, 2)]))
    steps += [driver.run([1, 5, 3], []) for _ in range(4)]
    for slot, temperature in ((6, 0.5), (7, 1.0)):
        driver.open(slot, [3, slot], temperature, logprobs_as_sampled=True)
        steps.append(driver.run([], [(slot, 2)]))
    return steps + [driver.run([1, slot], []) for slot in (6, 6, 7, 7)]


@few(1, "compiled", [False, True])
@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_dropped_graphs_are_freed_at_once_without_the_cyclic_collector(
    backend: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NCCL group is destroyed right after: it would wait for as long as a graph holds its collectives."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    save_tiny_model(tmp_path, "llama")
    runner, _, tape = make_taped(tmp_path, backend, compiled)
    graphs = [weakref.ref(graph) for graph in tape.graphs]
    gc.collect()
    gc.disable()
    try:
        tape.graphs.clear()
        assert all(graph() is not None for graph in graphs)
        runner.drop_graphs()
        assert all(graph() is None for graph in graphs)
    finally:
        gc.enable()


class Graph:
    def capture_begin(self, **_options: Any) -> None:
        pass

    def capture_end(self) -> None:
        pass


def test_garbage_is_collected_and_set_aside_once_for_all_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    for name, value in {
        "graph_pool_handle": lambda: 0,
        "Stream": lambda _device: None,
        "synchronize": lambda _device: None,
        "stream": lambda _stream: nullcontext(),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = CudaRecorder(torch.device("cuda", 0))
    for _ in range(3):
        with recorder.preparing():
            recorder.begin()
            assert isinstance(recorder.end(), Graph)
    assert calls == ["collect", "freeze"]
