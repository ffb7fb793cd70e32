"""CUDA graphs, eager and compiled, against eager steps."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.execution.helpers.decode_steps import (
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    STEP,
    assert_same,
    decode_every_number_of_rows,
)
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint import read_model_info
from tokasaurus.model.buffer_sizes import chunk_sizes, graph_sizes
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.hydragen_costs import measure_step_price
from tokasaurus.model.worker.memory import graph_bytes
from tokasaurus.model.worker.sleep import Sleeper
from tokasaurus.model.worker.warmup import ForwardLimits
from tokasaurus.model.worker.weight_update import WeightUpdates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def runner_on_cuda(directory: Path, compiled: bool = False) -> ModelRunner:
    device = torch.device("cuda", 0)
    compiler = Compiler() if compiled else None
    model, info = load(directory, device=device)
    model.begin_packing(None, compiler=compiler)
    model.end_packing()
    sizes = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SLOTS}
    return make_runner(model, info, "torch", **sizes, device=device, compiler=compiler)


def with_graphs(directory: Path, compiled: bool) -> ModelRunner:
    runner = runner_on_cuda(directory, compiled)
    runner.record_graphs(CudaRecorder(torch.device("cuda", 0)), graph_sizes(MAX_ROWS, STEP), chunk_sizes=[40, 24])
    return runner


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_give_the_tokens_of_eager_steps_at_every_size(family: str, compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    got = decode_every_number_of_rows(with_graphs(tmp_path, compiled))
    assert_same(got, decode_every_number_of_rows(runner_on_cuda(tmp_path)))


@pytest.mark.parametrize("compiled", [False, True])
def test_prefix_groups_that_change_with_every_step_replay_the_same_graphs(compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    sampled = []
    for runner in (with_graphs(tmp_path, compiled), runner_on_cuda(tmp_path)):
        samples = Samples(StepDriver(runner, 16, num_blocks=NUM_BLOCKS), 16, seed=3)
        samples.run(12, grouped=True)
        assert samples.num_grouped > 20
        sampled.append(samples.sampled)
    assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sleeping_worker_frees_its_memory_and_records_its_graphs_again(compiled: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    runner, device, sizes = with_graphs(tmp_path, compiled), torch.device("cuda", 0), graph_sizes(MAX_ROWS, STEP)
    expected = decode_every_number_of_rows(runner_on_cuda(tmp_path))
    backend, model = runner._backend, runner._model
    caches = sum(cache.nbytes for cache in backend.caches)
    updates = WeightUpdates(model, read_model_info(tmp_path), tmp_path, Mesh(), device)

    def record() -> None:
        runner.record_graphs(CudaRecorder(device), sizes)

    sleeper = Sleeper(model, backend, updates, device, Mesh(), runner, record)
    before = torch.cuda.memory_allocated(device)
    assert sleeper.sleep(with_weights=True) == ""
    assert before - torch.cuda.memory_allocated(device) > caches
    other = torch.zeros(caches, dtype=torch.uint8, device=device)  # in the way of the memory's old place
    assert sleeper.wake() == ""
    assert runner.graph_sizes == sorted(sizes)
    assert_same(decode_every_number_of_rows(runner), expected)
    del other


def test_the_price_of_a_step_with_groups_is_at_most_some_milliseconds(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    price_s = measure_step_price(
        with_graphs(tmp_path, compiled=False), ForwardLimits(64, MAX_ROWS, 500, VOCAB_SIZE), 16
    )
    assert 0 <= price_s < 0.1


def test_the_memory_of_all_graphs_is_estimated_from_the_largest_and_the_smallest(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    runner, device, sizes = runner_on_cuda(tmp_path), torch.device("cuda", 0), graph_sizes(256, 16)
    chunks = chunk_sizes(256, 16, 1024)
    estimate = graph_bytes(runner, sizes, chunks, device)
    before = torch.cuda.mem_get_info(device)[0]
    runner.record_graphs(CudaRecorder(device), sizes, chunk_sizes=chunks)
    taken = before - torch.cuda.mem_get_info(device)[0]
    assert taken <= estimate + (16 << 20)
