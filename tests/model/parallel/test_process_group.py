"""Ranks in processes of their own: they meet, sum, and notice that one of them has ended."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.process_group import is_about_another_rank, joined
from tokasaurus.model.parallel.tensor_parallel import (
    copy_from_first,
    gather_shards,
    sum_over_shards,
)

CPU = torch.device("cpu")


def run_rank(rank: int, num_ranks: int, rendezvous: Path, end: str, answers: Connection) -> None:
    """Sends its results, then whether the next sum failed because of another rank, and after how many seconds.

    end: what the last rank does instead of that sum.
    """
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        total = sum_over_shards(torch.tensor([1.0, 10.0**rank]), mesh)
        tokens = torch.arange(3) + 100 * rank
        copy_from_first(tokens, mesh)
        nothing = gather_shards(torch.empty((0, 7)), mesh)
        gathered = gather_shards(torch.tensor([[rank, rank + 10]]).t(), mesh)
        answers.send((total.tolist(), tokens.tolist(), tuple(nothing.shape), gathered.tolist()))
        if rank == num_ranks - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        began_s = time.monotonic()
        try:
            sum_over_shards(torch.ones(2), mesh)
        except RuntimeError as error:
            answers.send((is_about_another_rank(error), time.monotonic() - began_s))


@pytest.mark.parametrize("end", ["killed", "returned"])
def test_ranks_compute_together_until_one_of_them_ends(end: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    processes = [
        context.Process(target=run_rank, args=(rank, 3, tmp_path / "rendezvous", end, pipes[rank][1]))
        for rank in range(3)
    ]
    for process in processes:
        process.start()

    def receive(rank: int) -> Any:
        assert pipes[rank][0].poll(60)
        return pipes[rank][0].recv()

    try:
        for rank in range(3):
            gathered = [[[0], [10]], [[1], [11]], [[2], [12]]]
            assert receive(rank) == ([3.0, 111.0], [0, 1, 2], (3, 0, 7), gathered)
        for rank in range(2):
            is_lost, seconds = receive(rank)
            assert is_lost
            assert seconds < 20, "much less than the time limit of a collective"
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL if end == "killed" else 0]
    finally:
        for process in processes:
            process.kill()


def test_an_error_of_this_rank_is_not_taken_for_the_end_of_another() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not is_about_another_rank(caught.value)


def test_one_rank_joins_nothing() -> None:
    mesh = Mesh()
    with joined(mesh, None, CPU) as found:
        assert found is mesh
    assert not torch.distributed.is_initialized()
