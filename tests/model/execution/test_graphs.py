"""Decode steps as graphs, recorded on a CPU by a tape that replays operations into the same memory."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.execution.helpers.decode_steps import (
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    STEP,
    assert_same,
    decode_every_number_of_rows,
)
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler, address
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.graphs import graph_sizes
from tokasaurus.model.execution.runner import ModelRunner


def make_taped(directory: Path, backend: str, compiled: bool = False) -> tuple[ModelRunner, Decoder, LaunchTape]:
    tape = LaunchTape()
    compiler: Compiler | None = TapedCompiler(tape) if compiled else None
    model, info = load(directory)
    runner = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, compiler=compiler)
    runner.record_graphs(tape, graph_sizes(MAX_ROWS, STEP))
    return runner, model, tape


@pytest.mark.parametrize(
    ("family", "backend", "compiled"),
    [*((family, "torch", False) for family in FAMILIES), ("llama", "cpu", False), ("qwen3", "torch", True)],
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


@pytest.mark.parametrize("compiled", [False, True])
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


@pytest.mark.parametrize("compiled", [False, True])
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


def test_sizes_are_multiples_below_the_largest_and_begin_with_it() -> None:
    assert graph_sizes(11, 4) == [11, 8, 4]
    assert graph_sizes(16, 8) == [16, 8]
    assert graph_sizes(3, 16) == [3]
