"""Steps as graphs, recorded on a CPU by a tape that replays operations into the same memory."""

import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.examples import few
from tests.helpers.installed_triton import needs_interpreter, needs_triton, run_python
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, option_config, save_random_model, save_tiny_model
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
from tests.model.execution.helpers.device_sampling import finish_on_device
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler, TapedGraph, address
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.pretend_device import HostTransfers
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tokasaurus.checkpoint import fit_to_tensors, read_model_info, weight_files
from tokasaurus.model.attention.backend import PagedLayout
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.buffer_sizes import (
    MAX_GRAPH_TOKENS,
    chunk_sizes,
    graph_sizes,
    group_graph_sizes,
    max_graph_groups,
)
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution import runner as runner_module
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import DeviceSlots
from tokasaurus.model.parallel.mesh import Mesh

pytestmark = pytest.mark.cuda_path

CHUNK_SIZES = [40, 24]
GROUP_SIZES = [11, 4]
NUM_PIECES = 3 + 2
"""Recordings around attention: of 11, 8 and 4 rows, which have a graph of the LM head besides, and of the chunks."""


def make_taped(
    directory: Path, backend: str, compiled: bool = False, max_rows: int = MAX_ROWS
) -> tuple[ModelRunner, Decoder, LaunchTape]:
    tape = LaunchTape()
    compiler: Compiler | None = TapedCompiler(tape) if compiled else None
    model, info = load(directory)
    runner = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, compiler=compiler)
    runner.record_graphs(tape, graph_sizes(max_rows, STEP), chunk_sizes=CHUNK_SIZES)
    return runner, model, tape


def count_launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward of any model that is launched, from now on."""
    counts: list[int] = []
    forward = Decoder.forward

    def count(model: Decoder, token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        counts.append(len(token_ids))
        return forward(model, token_ids, *others)

    monkeypatch.setattr(Decoder, "forward", count)
    return counts


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
        assert len(tape.graphs) == NUM_PIECES * (info.num_layers + 1) + 3
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


@few(2, ("family", "compiled"), [("llama", False), ("qwen3", True), ("qwen3", False), ("llama", True)])
def test_steps_with_prompts_replay_all_but_attention(
    family: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decode rows and prefix groups; only steps of more tokens than any size launch their layers."""
    save_tiny_model(tmp_path, family)
    model, info = load(tmp_path)
    with one_thread():
        runner, _, _ = make_taped(tmp_path, "torch", compiled)
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        sampled, launched, num_tokens = [], count_launched(monkeypatch), list[int]()
        for each in (runner, eager):
            driver = StepDriver(each, 16, num_blocks=NUM_BLOCKS)
            run = each.run
            driver.runner = SimpleNamespace(
                run=lambda step, run=run: (num_tokens.append(int(step.num_tokens.sum())), run(step))[1]
            )
            samples = Samples(driver, 16, seed=3)
            samples.run(6, grouped=True)
            assert samples.num_grouped > 10
            sampled.append(samples.sampled)
            if each is runner:
                of_graphs, wanted = len(launched), num_tokens.copy()
    assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))
    assert of_graphs == sum(count > max(CHUNK_SIZES) for count in wanted) < len(wanted) / 4
    # Padding has written to the padding block alone.
    for recorded, cache in zip(runner._backend.caches, eager._backend.caches, strict=True):
        torch.testing.assert_close(recorded[:, :, 1:], cache[:, :, 1:])


def test_a_step_with_a_prompt_may_have_every_output(tmp_path: Path) -> None:
    """Prompt log-probabilities of a chunk, beside rows with limits and top log-probabilities."""
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    results = []
    with one_thread():
        runner, _, _ = make_taped(tmp_path, "torch")
        for each in (runner, make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)):
            driver = StepDriver(each, num_blocks=NUM_BLOCKS)
            driver.open(1, [5, 3, 9], temperature=0.7, top_p=0.8, num_top=3)
            steps, outputs = [driver.run([], [(1, 3)])], [(driver.top, driver.logprobs_by_slot)]
            driver.open(2, list(range(30)), num_prompt_top=2)
            for decode, prefill in (([1], [(2, 11)]), ([1], [(2, 19)]), ([2, 1], [])):
                steps.append(driver.run(decode, prefill))
                outputs.append((driver.top, driver.logprobs_by_slot))
            results.append((steps, outputs))
    (steps, outputs), (expected, expected_outputs) = results
    assert_same(steps, expected)
    assert [len(by_slot.get(2, ())) for _, by_slot in outputs] == [0, 11, 18, 0]
    np.testing.assert_allclose(numbers_in(outputs), numbers_in(expected_outputs), atol=1e-4)


def numbers_in(value: Any) -> list[float]:
    """All numbers in dictionaries, sequences and dataclasses, in order."""
    if is_dataclass(value):
        value = astuple(value)
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers_in(item)]
    return [] if value is None else [float(value)]


@few(1, "compiled", [False, True])
def test_graphs_read_and_write_only_parameters_tables_and_their_own_buffers(compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    runner, model, tape = make_taped(tmp_path, "torch", compiled)
    assert runner._graphs is not None
    inputs = runner._graphs.inputs
    own = [inputs.token_ids, inputs.positions, inputs.memory.kv_indices]
    table = [value for value in vars(model._rotary).values() if isinstance(value, torch.Tensor)]
    known = {address(tensor) for tensor in (*own, *table, *model.parameters(), *runner._backend.caches)}
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


def test_sizes_for_prompts_go_on_where_those_of_decode_steps_end() -> None:
    """At most 1/16 of a forward is padding, or less than the step between two sizes of decode steps."""
    assert chunk_sizes(1024, 16, 8192) == list(range(2048, 1024, -64))
    assert chunk_sizes(1024, 16, 1100) == [1100, 1088]
    assert chunk_sizes(1024, 16, 1024) == []
    assert chunk_sizes(2500, 16, 8192) == []
    for largest in (1, 16, 100, 256):
        sizes = chunk_sizes(largest, 16, 8192)
        assert len(sizes) < 64
        assert sizes[0] == MAX_GRAPH_TOKENS
        for size, below in pairwise([*sizes, largest]):
            assert below < size
            assert size - below <= max(16 + 1, below / 16 + 64)


def test_few_sizes_are_recorded_with_prefix_groups() -> None:
    """A step is padded by less than half of its rows, and has room for groups of two rows each, or some number."""
    assert group_graph_sizes(graph_sizes(1024)) == [1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16]
    assert group_graph_sizes(graph_sizes(1000))[:2] == [1000, 768]
    assert group_graph_sizes(graph_sizes(100)) == [100, 96, 64, 48, 32, 16]
    assert group_graph_sizes([2]) == [2]
    assert group_graph_sizes([1]) == []
    for largest in (1024, 4096):
        sizes = group_graph_sizes(graph_sizes(largest))
        assert len(sizes) <= 16
        assert all(size <= 2 * below for size, below in pairwise(sizes))
        assert all(size < 1.5 * (below + 1) for size, below in pairwise(sizes) if size > 32)
    assert [max_graph_groups(size, 1024) for size in (1024, 256, 16)] == [128, 128, 8]
    assert [max_graph_groups(size, 64) for size in (64, 32, 16)] == [16, 16, 8]


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
        assert len(tape.graphs) == NUM_PIECES * (info.num_layers + 1) + 3 + 3, "around attention, and with it"
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        assert_same(decode_every_number_of_rows(runner), decode_every_number_of_rows(eager))
        sampled = []
        for each in (runner, eager):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS, seed=1), 16, seed=3)
            samples.run(8, grouped=True)
            sampled.append(samples.sampled)
        assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))


@few(1, "family", ["granite_swa", "gemma2"])
def test_layers_with_windows_caps_and_sinks_replay_attention_by_their_own_plans(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's double finds a plan that another one has replaced in its memory."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the models are in float32
    save_random_model(tmp_path, option_config(family, 0))
    model, info = load(tmp_path)
    with one_thread():
        runner, _, tape = make_taped(tmp_path, "flashinfer")
        assert len(tape.graphs) == NUM_PIECES * (info.num_layers + 1) + 3 + 3, "around attention, and with it"
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        assert_same(decode_every_number_of_rows(runner), decode_every_number_of_rows(eager))


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


@few(1, "compiled", [False, True])
def test_decode_steps_with_prefix_groups_replay_one_graph_with_attention(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of groups and of rows in them change with every step; rows in no group come between steps in which
    they were in one. FlashInfer's double reads what is planned from the buffers of its recordings alone."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the models are in float32
    save_tiny_model(tmp_path, "qwen3")
    model, info = load(tmp_path)
    with one_thread():
        runner, _, tape = make_taped(tmp_path, "flashinfer", compiled, max_rows=16)
        num_before = len(tape.graphs)
        runner.record_groups([16, 4])
        assert len(tape.graphs) == num_before + 2
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        planned = note_plans(monkeypatch)
        sampled = []
        for each in (runner, eager):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS, seed=1), 16, seed=5)
            samples.run(20, grouped=True)
            assert samples.num_grouped > 20
            sampled.append(samples.sampled)
    assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))
    num_groups = [sum(size > 0 for size in sizes) for sizes, _ in planned]
    assert {len(sizes) for sizes, _ in planned} == {16 // 2, 4 // 2}, "a recording has a fixed number of groups"
    assert len(set(num_groups)) > 1
    assert {sum(sizes) < num_rows for sizes, num_rows in planned} == {False, True}, "all rows in groups, and some"


def note_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Of each step with prefix groups that replays one graph from now on: rows of each group, and rows of the step."""
    planned: list[tuple[list[int], int]] = []
    plan = FlashInferBackend.plan_recorded

    def note(backend: FlashInferBackend, layout: PagedLayout) -> None:
        if layout.prefix is not None:
            planned.append((layout.prefix.query_starts.diff().tolist(), layout.parts[0].num_rows))
        plan(backend, layout)

    monkeypatch.setattr(FlashInferBackend, "plan_recorded", note)
    return planned


def test_more_prefix_groups_than_a_recording_has_room_for_take_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then fewer again; and steps of more rows than the largest recording with groups."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the models are in float32
    monkeypatch.setattr(runner_module, "max_graph_groups", lambda num_rows, _: min(2, num_rows // 2))
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    results = []
    with one_thread():
        runner, _, _ = make_taped(tmp_path, "flashinfer")
        runner.record_groups([8])
        planned = note_plans(monkeypatch)
        for each in (runner, make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)):
            driver = StepDriver(each, num_blocks=NUM_BLOCKS)
            for slot in range(1, 10):
                shares = (slot - 1, 2) if slot % 2 == 0 else None
                driver.open(slot, [slot // 2 * 2 + (shares is None)] * 2 + [7] * 33, shares=shares)
                driver.run([], [(slot, driver.remaining(slot))])
            slots = [1, 2, 3, 4, 5, 6, 7]
            groups = [(2, 2)] * 3, [(2, 2)], [(2, 2)] * 2, [(2, 2)] * 3, [(2, 2)]
            steps = [driver.run(slots, [], of_step) for of_step in groups[:-1]]
            results.append([*steps, driver.run([*slots, 8, 9], [], groups[-1])])
    assert_same(*results)
    assert [sizes for sizes, _ in planned] == [[2, 0], [2, 2]]


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
    """Steps with prompts replay that of a decode step. Limits, temperatures and seeds differ by row and change with
    each step. Penalties and top log-probabilities are not in the graph, nor log-probabilities of the distribution that
    is drawn from, unless it is the model's own."""
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        model, info = load(tmp_path)
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
        monkeypatch.setattr(runner_module, "draw_and_finish", finish_on_device)
        runner, _, tape = make_taped(tmp_path, "torch")
        assert len(tape.graphs) == NUM_PIECES * (info.num_layers + 1) + 3 + 3
        num_sampled = []
        monkeypatch.setattr(ModelRunner, "_sample", count_calls(ModelRunner._sample, num_sampled))
        assert_same(decode_with_every_option(runner), decode_with_every_option(eager))
    of_graphs, of_eager = num_sampled.count(runner), num_sampled.count(eager)
    assert of_eager == 7 + 20 + 4 + 4
    assert of_graphs == 2 + 4 + 2, "what the graphs do not compute of prompts' last tokens and of decode steps"


def test_a_prompt_of_one_token_that_fills_a_size_is_sampled_by_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of the step sample, as in a decode step, but what recorded sampling reads is of a step before."""
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        model, info = load(tmp_path)
        eager = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
        monkeypatch.setattr(runner_module, "draw_and_finish", finish_on_device)
        runner, _, _ = make_taped(tmp_path, "torch")
        results = []
        for each in (runner, eager):
            driver = StepDriver(each, num_blocks=NUM_BLOCKS)
            for slot in (1, 2, 3):
                driver.open(slot, [slot, 4, 9], temperature=1.0, seed=slot)
            driver.open(4, [7], temperature=1.0, seed=4)
            steps = [driver.run([], [(slot, 3) for slot in (1, 2, 3)]), driver.run([1, 2, 3], [])]
            results.append([*steps, driver.run([3, 1, 2], [(4, 1)]), driver.run([1, 2, 3, 4], [])])
        assert runner.graph_sizes[0] == 4
        assert_same(*results)


OPTIONS: list[dict[str, Any]] = [
    *({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}),
    *({"num_top": 3}, {"temperature": 0.7, "logprobs_as_sampled": True}, {"num_prompt_top": 2}),
]


def run_at_random(runner: ModelRunner, seed: int) -> list[tuple[Any, ...]]:
    """Sequences come and go. Prompts of one token up to some blocks, in chunks; shared blocks, of which some tokens are
    computed again; prefix groups. -> all results of each step."""
    rng, driver, results = random.Random(seed), StepDriver(runner, num_blocks=NUM_BLOCKS), list[tuple[Any, ...]]()
    decoding, prefilling, prompts = list[int](), list[int](), dict[int, list[int]]()
    free = list(range(1, MAX_ROWS + 3))
    for _ in range(40):
        while free and len(decoding) + len(prefilling) < rng.choice([1, 4, 5, 8, 11, 13]):
            slot, shares = free.pop(0), None
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 1, 2, 15, 16, 17, 30]))]
            shared = prompts[rng.choice(decoding)] if decoding and rng.random() < 0.5 else []
            if num_shared := len(shared) // 16:
                shares = next(other for other in decoding if prompts[other] is shared), num_shared
                prompt = shared[: 16 * num_shared] + prompt
            again = rng.choice([0, 3]) if num_shared else 0
            driver.open(slot, prompt, seed=slot, shares=shares, num_recomputed=again, **rng.choice(OPTIONS))
            prompts[slot] = prompt
            prefilling.append(slot)
        decode = rng.sample(decoding, rng.choice([len(decoding), rng.randint(0, len(decoding))]))
        num_grouped = rng.randint(2, len(decode)) if len(decode) > 1 else 0
        num_blocks = driver.num_shared_blocks(decode[:num_grouped]) if num_grouped else 0
        prefill = []
        for slot in rng.sample(prefilling, rng.randint(0, len(prefilling))):
            remaining = driver.remaining(slot)
            prefill.append((slot, rng.choice([remaining, rng.randint(1, remaining)])))
        if decode or prefill:
            groups = [(num_grouped, num_blocks)] if num_blocks else None
            results.append((driver.run(decode, prefill, groups), driver.top, driver.logprobs_by_slot))
        for slot in [slot for slot in prefilling if not driver.remaining(slot)]:
            prefilling.remove(slot)
            decoding.append(slot)
        if decode and rng.random() < 0.3:
            decoding.remove(decode[0])
            driver.close(decode[0])
            free.append(decode[0])
    return results


@few(2, "seed", range(8))
def test_random_steps_with_all_that_is_recorded_equal_launched_ones(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, sampling and inputs as on CUDA, where slots have a copy and new blocks come with the inputs."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    save_tiny_model(tmp_path, "llama")
    sizes = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SLOTS}
    with one_thread():
        model, info = load(tmp_path)
        expected = run_at_random(make_runner(model, info, "torch", **sizes), seed)
        monkeypatch.setattr(runner_module, "uses_triton", lambda *_: True)
        monkeypatch.setattr(runner_module, "draw_and_finish", finish_on_device)
        runner = make_runner(model, info, "flashinfer", transfers=HostTransfers(), **sizes)
        runner._slots.on_device = DeviceSlots(*runner._slots.block_tables.shape, CPU)
        runner.record_graphs(LaunchTape(), graph_sizes(MAX_ROWS, STEP), chunk_sizes=CHUNK_SIZES)
        runner.record_groups(GROUP_SIZES)
        found = run_at_random(runner, seed)
    assert_same([step for step, *_ in found], [step for step, *_ in expected])
    np.testing.assert_allclose(numbers_in(found), numbers_in(expected), atol=1e-3)


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
    if runner.records_attention:
        runner.record_groups(GROUP_SIZES)
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
