"""A start's choice of sums over two gloo ranks: working ways are measured, faulty ones used by no rank."""

import logging
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.greedy_decoding import greedy_in_a_mixed_batch, oracle_greedy
from tests.model.helpers.steps import CPU, StepDriver
from tests.model.parallel.helpers.symmetric_memory_on_cpu import symmetric_memory_on_cpu
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, PhaseDone, UserError
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import all_reduce_start, entry
from tokasaurus.model.worker.all_reduce_start import choose_all_reduce, fastest_up_to, is_tried
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.start import PhaseLog

KIB = 1 << 10
NUM_BYTES = 64 * KIB  # sizes of 8, 32 and 64 KiB are measured
NCCL, ONE_SHOT, MULTIMEM = range(3)
FASTEST = (ONE_SHOT, ONE_SHOT, MULTIMEM)
PROMPTS = [[5, 6, 7], list(range(40))]


@pytest.mark.parametrize(
    ("seconds", "limits"),
    [
        ([{None: 3.0, "a": 1.0, "b": 2.0}] * 3, [(64, "a")]),
        ([{None: 1.0, "a": 1.0}] * 3, []),
        ([{None: 2.0, "a": 1.0}, {None: 2.0, "a": 2.0}, {None: 2.0, "a": 1.0}], [(8, "a")]),
        (
            [{None: 3.0, "a": 1.0, "b": 2.0}, {None: 3.0, "a": 2.0, "b": 1.0}, {None: 1.0, "a": 2.0}],
            [(8, "a"), (32, "b")],
        ),
        ([{None: 1.0}] * 3, []),
    ],
)
def test_each_way_is_used_up_to_the_last_size_where_it_is_the_fastest(
    seconds: list[dict[str | None, float]], limits: list[tuple[int, str]]
) -> None:
    assert fastest_up_to([8, 32, 64], seconds) == limits


class ScriptedStopwatch:
    """The times of FASTEST, with errors that differ between ranks and rounds."""

    def __init__(self, rank: int, num_ways: int) -> None:
        self._rank = rank
        self._num_ways = num_ways
        self._num_calls = 0

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        size, way = divmod(self._num_calls % (3 * self._num_ways), self._num_ways)
        self._num_calls += 1
        is_late = self._num_calls % 2 == self._rank  # then it waits for nobody; the other rank waits for it
        return (1.0 if way == FASTEST[size] else 2.0) + (0.0 if is_late else 100.0 * (self._num_calls % 7))


FAULTS: dict[str, dict[str, Any]] = {
    "no fault": {},
    "no memory": {"lacks_memory": True},
    "cannot join": {"cannot_join": True},
    "wrong": {"factor": 1.1},
    "NaN": {"factor": float("nan")},
    "no multicast": {"has_multicast": False},
}


def run_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends, for each of FAULTS on the last rank and each value of the flag: what is chosen, whether it is used, and
    what is logged."""
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(all_reduce_start.__name__).addHandler(handler)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        for fault in FAULTS.values():
            for flag in (None, True):
                lines.clear()
                own = fault if rank == num_ranks - 1 else {}
                stopwatch = ScriptedStopwatch(rank, 2 if "has_multicast" in fault else 3)
                with (
                    symmetric_memory_on_cpu(**own) as calls,
                    patch.object(all_reduce_start, "make_stopwatch", lambda _device, stopwatch=stopwatch: stopwatch),
                ):
                    try:
                        chosen, text = choose_all_reduce(flag, mesh, CPU, torch.float32, NUM_BYTES, first_device=0)
                        is_used = chosen.all_reduce is not None
                    except FlagRefused as error:
                        text, is_used = f"refused: {error}", False
                answers.send((text, is_used, list(lines), calls["multimem_all_reduce_"] > 0))


@pytest.mark.long
def test_faults_of_one_rank_switch_it_off_on_all_and_end_a_start_that_asks_for_it(tmp_path: Path) -> None:
    of_ranks = run_ranks(2, tmp_path, 2 * len(FAULTS), run_rank)
    assert of_ranks[0] == of_ranks[1], "every rank says and does the same"
    found = {name: of_ranks[0][2 * number : 2 * number + 2] for number, name in enumerate(FAULTS)}
    works = ("one-shot up to 32 KiB, multimem up to 64 KiB, NCCL beyond", True, [], True)
    assert found.pop("no fault") == [works, works]
    one_way = ("one-shot up to 32 KiB, NCCL beyond", True, [], False)
    assert found.pop("no multicast") == [one_way, one_way], "though one rank has it"
    reasons = {
        "no memory": "rank 1: no memory to share: CUDA out of memory.",
        "cannot join": "rank 1: memory cannot be shared: CUDA driver error: invalid device ordinal",
        "wrong": "rank 1: one-shot sums: one of 8 KiB differs from NCCL's by",
        "NaN": "rank 1: one-shot sums: one of 8 KiB differs from NCCL's by nan",
    }
    assert found.keys() == reasons.keys()
    for name, (auto, by_name) in found.items():
        text, is_used, (line,), _ = auto
        assert (text, is_used) == ("NCCL", False)
        assert line.startswith(f"sums over ranks through symmetric memory are switched off: {reasons[name]}")
        assert "\n" not in line
        text, is_used, lines, _ = by_name
        assert text.startswith(f"refused: symmetric_all_reduce=T: {reasons[name]}")
        assert not is_used
        assert not lines


def run_lonely_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends how the start of rank 0 ends, whose first sum raises, while the other rank waits for it in its own."""
    torch.set_num_threads(1)
    with (
        joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh,
        symmetric_memory_on_cpu(has_multicast=False),
        patch.object(all_reduce_start, "WAIT_SECONDS", 1.0),
    ):
        if rank == 0:

            def raises(*_: Any) -> None:
                raise RuntimeError("no kernel image is available")

            with patch.object(all_reduce_start.SymmetricBuffer, "_sum_in_one_shot", raises):
                try:
                    choose_all_reduce(None, mesh, CPU, torch.float32, NUM_BYTES, first_device=0)
                except UserError as error:
                    answers.send(str(error))
        else:
            answers.send("waits")
            choose_all_reduce(None, mesh, CPU, torch.float32, NUM_BYTES, first_device=0)


@pytest.mark.long
def test_a_rank_whose_sum_raises_alone_ends_the_start_in_one_line_since_the_others_wait_for_it(tmp_path: Path) -> None:
    (line,), _ = run_ranks(2, tmp_path, 1, run_lonely_rank)
    assert line == (
        "sums over ranks through symmetric memory: one-shot sums: no kernel image is available, and other ranks did "
        "not go on for 1 s; symmetric_all_reduce=F starts without"
    )


def run_half(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        answers.send(choose_all_reduce(None, mesh, CPU, torch.float16, 0, first_device=0)[1])
        try:
            choose_all_reduce(True, mesh, CPU, torch.float16, 0, first_device=0)
        except FlagRefused as error:
            answers.send(str(error))


@pytest.mark.long
def test_a_dtype_without_kernels_is_left_to_nccl_without_a_warning(tmp_path: Path) -> None:
    reason = "since others need bfloat16 or float32, not float16"
    expected = [f"NCCL, {reason}", f"symmetric_all_reduce=T: {reason}"]
    assert run_ranks(2, tmp_path, 2, run_half) == [expected] * 2


def test_only_ranks_on_gpus_try_it() -> None:
    cuda, ranks = torch.device("cuda", 0), Mesh(tp_size=2)
    assert is_tried(None, ranks, cuda)
    assert is_tried(True, ranks, cuda)
    assert not is_tried(False, ranks, cuda)
    assert not is_tried(None, Mesh(), cuda)
    assert not is_tried(None, ranks, CPU)
    with pytest.raises(FlagRefused, match=r"^symmetric_all_reduce=T: needs GPUs, not device=cpu$"):
        is_tried(True, ranks, CPU)


def run_worker_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends greedy tokens of a worker whose ranks share memory, and of one where the last rank adds up wrongly; beside
    each, what its start said of sums, and whether it used them after."""
    flags = ["dtype=float32", "device=cpu", "tp_size=2", "max_tokens_per_forward=64", "max_seqs_per_forward=8"]
    config, checkpoint = ServerConfig.parse(flags), resolve_checkpoint(str(rendezvous.parent))
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        for factor in (1.0, 1.1):
            phases: list[PhaseDone] = []
            stopwatch = ScriptedStopwatch(rank, 3)
            with (
                symmetric_memory_on_cpu(factor=factor if rank == num_ranks - 1 else 1.0) as calls,
                patch.object(entry, "is_tried", lambda *_: True),
                patch.object(all_reduce_start, "make_stopwatch", lambda _device, stopwatch=stopwatch: stopwatch),
            ):
                worker = load_worker(config, checkpoint, mesh, rank, PhaseLog(phases.append))
                worker.backend.allocate(201)
                worker.slots.rules.allocate(201 * 16)
                (said,) = (phase.detail for phase in phases if phase.phase == "all-reduce")
                calls.clear()
                tokens, _ = greedy_in_a_mixed_batch(StepDriver(worker.runner), PROMPTS, 5, random.Random(3))
            answers.send((tokens, said, dict(calls)))


@pytest.mark.long
def test_a_worker_of_two_ranks_gives_the_same_tokens_with_shared_memory_and_where_that_is_faulty(
    tmp_path: Path,
) -> None:
    oracle = save_tiny_model(tmp_path, "qwen3")
    expected = [oracle_greedy(oracle, prompt, 5)[0] for prompt in PROMPTS]
    for works, faulty in run_ranks(2, tmp_path, 2, run_worker_rank):
        assert works[0] == faulty[0] == expected
        assert works[1] == "one-shot up to 16 KiB, NCCL beyond"
        assert works[2].keys() == {"one_shot_all_reduce_out"}
        assert faulty[1:] == ("NCCL", {})
