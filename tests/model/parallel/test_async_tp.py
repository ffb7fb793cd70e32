"""Async tensor parallelism between two ranks over gloo, with torch's fused operators computed by their fallbacks."""

import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.limits import receive
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tests.model.parallel.helpers.fused_gemms_on_cpu import fused_gemms_on_cpu
from tokasaurus.messages.status import UserError
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.async_tp import enable_fused_gemms
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.warmup import ForwardLimits, warm_up

NUM_BLOCKS, NUM_SLOTS = 200, 40
LIMITS = ForwardLimits(max_tokens=128, max_seqs=20, context_length=512, vocab_size=VOCAB_SIZE)
PROMPT_LENGTHS = (1, 2, 3, 96, 1, 7, 8, 5, 9, 33, 2, 128, 3, 17, 101, 1, 64, 31, 127)
OVERFLOWING_TOKEN = 5
RANKS_S = 240.0
"""Longest wait for a rank, which compiles."""


def hidden_states(runner: ModelRunner, model: Decoder) -> list[Tensor]:
    """Of every token in steps of all lengths in PROMPT_LENGTHS, and of decode steps with up to 19 rows, alone and
    beside a prompt."""
    states: list[Tensor] = []
    hook = model.register_forward_hook(lambda _model, _inputs, hidden: states.append(hidden.clone()))
    driver, rng = StepDriver(runner, num_blocks=NUM_BLOCKS), random.Random(0)
    counts: list[int] = []
    slots = range(1, len(PROMPT_LENGTHS) + 1)
    for slot, length in zip(slots, PROMPT_LENGTHS, strict=True):
        driver.open(slot, [rng.randrange(OVERFLOWING_TOKEN + 1, VOCAB_SIZE) for _ in range(length)])
        driver.run([], [(slot, length)])
        counts.append(length)
    for num_rows in (1, 19, 2, 8, 3, 7, 18):
        driver.run(list(slots[:num_rows]), [])
        counts.append(num_rows)
    driver.open(NUM_SLOTS, [7, OVERFLOWING_TOKEN, 9])
    driver.run(list(slots), [(NUM_SLOTS, 3)])
    counts.append(len(slots) + 3)
    hook.remove()
    return [hidden[:count] for hidden, count in zip(states, counts, strict=True)]


def overflow_on_the_last_rank(model: Decoder, mesh: Mesh) -> None:
    """Make the first layer's key of OVERFLOWING_TOKEN infinite on the last rank, and of no other token."""
    assert model.embedding is not None
    start, length = mesh.vocab_shard(VOCAB_SIZE)
    model.embedding.weight[:, 0] = 0
    if start <= OVERFLOWING_TOKEN < start + length:
        model.embedding.weight[OVERFLOWING_TOKEN - start, 0] = 100
    if mesh.tp_rank == mesh.tp_size - 1:
        attention = next(model.decoder_layers()).attention
        attention.heads(attention.qkv.weight.t())[0, attention.num_heads] = 3e38


def name_of(mesh: Mesh) -> str:
    assert mesh.tp_group is not None
    return mesh.tp_group.group_name


def run_rank(
    rank: int, directory: Path, rendezvous: Path, threshold: int, overflows: bool, answers: Connection
) -> None:
    """Sends the graphs compiled, (compilations, recompiles), and the hidden states without and with async TP."""
    torch.set_num_threads(1)
    mesh = Mesh(tp_rank=rank, tp_size=2)
    with torch.inference_mode(), joined(mesh, rendezvous, CPU) as mesh, fused_gemms_on_cpu(name_of(mesh)) as graphs:
        sizes: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SLOTS, "mesh": mesh}
        model, info = load(directory, mesh)
        if overflows:
            overflow_on_the_last_rank(model, mesh)
        expected = hidden_states(make_runner(model, info, "cpu", **sizes), model)
        compiler = Compiler()
        model.pack(load_kernels(), compiler=compiler)
        runner = make_runner(model, info, "cpu", **sizes, compiler=compiler, async_tp_threshold=threshold)
        warm_up(runner, LIMITS, 16, is_context_costly=False)
        compiler.end_warm_up()
        with torch.compiler.set_stance("fail_on_recompile"):
            got = hidden_states(runner, model)
        answers.send((graphs, (compiler.num_compilations, compiler.num_recompiles)))
        answers.send([[hidden.numpy() for hidden in states] for states in (expected, got)])


def run_two_ranks(directory: Path, threshold: int, overflows: bool = False) -> list[tuple[Any, Any]]:
    """What each rank sends."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    places = directory, directory / "rendezvous", threshold, overflows
    processes = [context.Process(target=run_rank, args=(rank, *places, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a rank that fails ends the wait for its answer
    try:
        answers = [(receive(receiver, RANKS_S), receive(receiver, RANKS_S)) for receiver, _ in pipes]
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0]
        return answers
    finally:
        for process in processes:
            process.kill()


def assert_equal_within_rounding(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Both are NaN at the same places. Elsewhere they differ by at most 1e-5 of the largest number."""
    for found, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.nanmax(np.abs(want)))


NUM_LAYERS = 2
ASYNC_GRAPH = {"fused_all_gather_matmul": 2 * NUM_LAYERS, "fused_matmul_reduce_scatter": 2 * NUM_LAYERS}
PLAIN_GRAPH = {"all_reduce": 2 * NUM_LAYERS}


@pytest.mark.parametrize(
    ("family", "threshold", "graphs"),
    [
        pytest.param("llama", 1, [ASYNC_GRAPH], marks=pytest.mark.long),
        ("qwen3", 8, [ASYNC_GRAPH, PLAIN_GRAPH]),
    ],
)
@pytest.mark.long
def test_it_equals_plain_tensor_parallelism_with_fused_operators_and_without_recompiles(
    family: str, threshold: int, graphs: list[dict[str, int]], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family, num_layers=NUM_LAYERS)
    for (compiled, counts), (expected, got) in run_two_ranks(tmp_path, threshold):
        assert counts == (len(graphs), 0)
        assert compiled == graphs
        assert_equal_within_rounding(got, expected)


@pytest.mark.long
def test_a_token_that_is_not_finite_on_one_rank_is_nan_on_all_and_spoils_no_other(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=NUM_LAYERS)
    for (compiled, _), (expected, got) in run_two_ranks(tmp_path, threshold=1, overflows=True):
        assert compiled == [ASYNC_GRAPH]
        *others, last = (torch.from_numpy(hidden) for hidden in got)
        assert all(hidden.isfinite().all() for hidden in others)
        assert last.isnan().any(1).nonzero().flatten().tolist() == [len(last) - 2]
        assert_equal_within_rounding(got, expected)


@pytest.mark.parametrize(
    ("device", "has_nccl", "message"),
    [
        (CPU, True, "needs GPUs that are joined by NVLink, not device=cpu"),
        (torch.device("cuda", 4), False, "needs a torch with NCCL"),
        (torch.device("cuda", 4), True, "needs GPUs that are joined by NVLink; cuda:4 cannot read memory of cuda:3"),
    ],
)
def test_hardware_without_it_is_named_in_one_line(device: torch.device, has_nccl: bool, message: str) -> None:
    """The second of three ranks, on devices 3 to 5. It reads the last one."""
    with (
        patch.object(torch.distributed, "is_nccl_available", return_value=has_nccl),
        patch.object(torch.cuda, "can_device_access_peer", side_effect=lambda own, other: (own.index, other) == (4, 5)),
        pytest.raises(UserError, match=f"^async_tp_threshold=64: {message}$"),
    ):
        enable_fused_gemms(64, Mesh(tp_rank=1, tp_size=3), device, first_device=3)
