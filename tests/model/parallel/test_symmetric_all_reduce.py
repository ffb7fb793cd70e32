"""Sums through memory that two ranks share, where gloo computes what torch's operators do on GPUs."""

import random
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import greedy_in_a_mixed_batch, load, oracle_greedy
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tests.model.parallel.helpers.symmetric_memory_on_cpu import symmetric_memory_on_cpu
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.model.buffer_sizes import MAX_SUM_BYTES, buffer_bytes
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.parallel.collectives import joined, sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.symmetric_all_reduce import SymmetricAllReduce, SymmetricBuffer, unreadable_device
from tokasaurus.model.worker.warmup import ForwardLimits, warm_up

LIMITS = [(64, "one-shot"), (1024, "multimem")]
ONE_SHOT, MULTIMEM = "one_shot_all_reduce_out", "multimem_all_reduce_"
HIDDEN_SIZE = 64
PROMPTS = [[random.Random(number).randrange(VOCAB_SIZE) for _ in range(length)] for number, length in [(1, 3), (2, 40)]]
NUM_TOKENS = 6


def shares_sums(mesh: Mesh, limits: list[tuple[int, str]]) -> Mesh:
    """The mesh, with sums through a shared buffer."""
    assert mesh.tp_group is not None
    buffer = SymmetricBuffer(limits[-1][0], torch.float32, CPU, mesh.tp_group)
    buffer.join()
    all_reduce = SymmetricAllReduce(buffer.ways(), limits, torch.float32, mesh.tp_group)
    return Mesh(tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, tp_group=mesh.tp_group, all_reduce=all_reduce)


def partial_sums(mesh: Mesh) -> dict[str, tuple[Tensor, str | None]]:
    """By what is special: this rank's part of a sum, and the operator that computes it; None: gloo's."""
    parts = {
        "fewest bytes": (torch.arange(4.0), ONE_SHOT),
        "most of one way": (torch.arange(16.0).view(2, 8), ONE_SHOT),
        "more": (torch.arange(20.0), MULTIMEM),
        "at an odd place": (torch.arange(17.0)[1:], ONE_SHOT),
        "most of the buffer": (torch.arange(256.0).view(16, 16), MULTIMEM),
        "larger": (torch.arange(260.0), None),
        "no whole words": (torch.arange(5.0), None),
        "whole numbers": (torch.arange(8, dtype=torch.int32), None),
        "nothing": (torch.empty((0, 8)), ONE_SHOT),
    }
    for name, (own, _) in parts.items():
        if name != "at an odd place":
            own += 10 * mesh.tp_rank
    return parts


def run_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends, for each part: its name, the sum, and which operators computed it."""
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh, symmetric_memory_on_cpu() as calls:
        mesh = shares_sums(mesh, LIMITS)
        for name, (own, _) in partial_sums(mesh).items():
            calls.clear()
            total = sum_over_shards(own, mesh)
            answers.send((name, total is own, total.tolist(), dict(calls)))


@pytest.mark.long
def test_a_sum_takes_the_way_of_its_size(tmp_path: Path) -> None:
    parts = [partial_sums(Mesh(tp_rank=rank, tp_size=2)) for rank in range(2)]
    for of_rank in run_ranks(2, tmp_path, len(parts[0]), run_rank):
        for name, is_in_place, total, calls in of_rank:
            (first, operator), (second, _) = (of_one[name] for of_one in parts)
            assert is_in_place
            assert total == (first + second).tolist(), name
            assert calls == ({} if operator is None else {operator: 1}), name


def run_model(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends greedy tokens of a compiled model and the operators that computed its sums, and the same without a
    compiler. The weights are beside `rendezvous`."""
    torch.set_num_threads(1)
    limits = ForwardLimits(max_tokens=64, max_seqs=8, context_length=256, vocab_size=VOCAB_SIZE)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh, symmetric_memory_on_cpu() as calls:
        most = 5 * HIDDEN_SIZE * 4  # bytes of five tokens
        mesh = shares_sums(mesh, [(most, "one-shot")])
        for compiler in (Compiler(), None):
            with torch.inference_mode():
                model, info = load(rendezvous.parent, mesh)
                assert info.hidden_size == HIDDEN_SIZE
                model.pack(None, compiler=compiler)
                runner = make_runner(model, info, "cpu", mesh=mesh, compiler=compiler)
                if compiler is not None:
                    warm_up(runner, limits, 16, is_context_costly=False)
                    compiler.end_warm_up()
                calls.clear()
                with (
                    torch.compiler.set_stance("fail_on_recompile"),
                    patch("torch.distributed.all_reduce", side_effect=torch.distributed.all_reduce) as all_reduce,
                ):
                    tokens, _ = greedy_in_a_mixed_batch(StepDriver(runner), PROMPTS, NUM_TOKENS, random.Random(5))
            num_shared = calls[ONE_SHOT]
            num_by_gloo = sum(call.args[0].dtype == torch.float32 for call in all_reduce.mock_calls if call.args)
            compiled = None if compiler is None else (compiler.num_compilations, compiler.num_recompiles)
            answers.send((tokens, num_shared, num_by_gloo - num_shared, dict(calls), compiled))


@pytest.mark.long
def test_compiled_and_eager_layers_sum_small_steps_through_shared_memory_without_recompiles(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama")
    expected = [oracle_greedy(oracle, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
    for compiled, eager in run_ranks(2, tmp_path, 2, run_model):
        for tokens, num_shared, num_by_gloo, calls, _ in (compiled, eager):
            assert tokens == expected
            assert calls == {ONE_SHOT: num_shared}
            assert num_shared > 20
            assert num_by_gloo > 6, "steps of more than five tokens"
        assert compiled[4] == (1, 0), "compilations before and after the warm-up"
        assert compiled[1:3] == eager[1:3]


@pytest.mark.parametrize(
    ("max_tokens", "hidden_size", "dtype", "num_bytes"),
    [
        (64, 64, "float32", 64 * 64 * 4),
        (64, 64, "bfloat16", 64 * 64 * 2),
        (3, 3, "float32", 32),
        (8192, 4096, "bfloat16", MAX_SUM_BYTES),
        (64, 64, "float16", 0),
    ],
)
def test_the_buffer_holds_the_largest_forward_up_to_a_limit(
    max_tokens: int, hidden_size: int, dtype: str, num_bytes: int
) -> None:
    assert buffer_bytes(max_tokens, hidden_size, dtype) == num_bytes


def test_a_device_whose_memory_cannot_be_read_is_found() -> None:
    def can_access(own: torch.device, other: int) -> bool:
        return {own.index, other} != {4, 6}

    with patch.object(torch.cuda, "can_device_access_peer", side_effect=can_access):
        found = [unreadable_device(torch.device("cuda", own), first_device=4, tp_size=3) for own in (4, 5, 6)]
    assert found == [6, None, 4]
