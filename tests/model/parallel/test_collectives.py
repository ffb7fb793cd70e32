"""Ranks in processes of their own: they meet, sum, and notice that one of them has ended."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.limits import receive
from tokasaurus.model.parallel.collectives import (
    LINK_CTAS,
    TIMEOUT,
    gather_rows,
    gather_shards,
    is_about_another_rank,
    joined,
    sum_over_shards,
    whole_rows,
    with_groups,
)
from tokasaurus.model.parallel.mesh import Mesh

CPU = torch.device("cpu")


def run_rank(rank: int, num_ranks: int, rendezvous: Path, end: str, answers: Connection) -> None:
    """Sends its results, then whether the next sum failed because of another rank, and after how many seconds.

    end: what the last rank does instead of that sum.
    """
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        total = sum_over_shards(torch.tensor([1.0, 10.0**rank]), mesh)
        columns = (
            torch.tensor([[0, 1], [10, 11], [20, 21], [30, 31]])[:, slice(0, 1) if rank else slice(2)] + 100 * rank
        )
        whole = whole_rows(columns, [1, 0, 3], [2, 1, 1], mesh)
        rows = gather_rows(whole, [1, 0, 3], mesh)
        nothing = gather_shards(torch.empty((0, 7)), mesh)
        gathered = gather_shards(torch.tensor([[rank, rank + 10]]).t(), mesh)
        answers.send((total.tolist(), whole.tolist(), rows.tolist(), tuple(nothing.shape), gathered.tolist()))
        if rank == num_ranks - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        began_s = time.monotonic()
        try:
            sum_over_shards(torch.ones(2), mesh)
        except RuntimeError as error:
            answers.send((is_about_another_rank(error), time.monotonic() - began_s))


@pytest.mark.long  # real servers of several ranks are tests of `make test`, and one of them loses a rank
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

    def receive_from(rank: int) -> Any:
        return receive(pipes[rank][0])

    try:
        gathered = [[[0], [10]], [[1], [11]], [[2], [12]]]
        rows = [[10 * row, 10 * row + 1, 10 * row + 100, 10 * row + 200] for row in range(4)]
        for rank, own in enumerate((rows[:1], [], rows[1:])):
            assert receive_from(rank) == ([3.0, 111.0], own, rows, (3, 0, 7), gathered)
        for rank in range(2):
            is_lost, seconds = receive_from(rank)
            assert is_lost
            assert seconds < 20, "much less than the time limit of a collective"
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL if end == "killed" else 0]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(("pp_size", "tp_size"), [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_every_rank_makes_the_same_groups_and_no_link_shares_one(
    pp_size: int, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that made other groups, or in another order, would wait for each other for ever."""
    made: list[list[int]] = []

    def new_group(ranks: list[int], timeout: object, pg_options: object) -> tuple[int, list[int]]:
        assert timeout == TIMEOUT
        assert pg_options is None, "gloo has no such options"
        made.append(ranks)
        return len(made), ranks

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    of_each_rank, links = [], []
    for rank in range(pp_size * tp_size):
        made.clear()
        mesh = with_groups(Mesh.of_worker(rank, pp_size, tp_size), on_nccl=False)
        of_each_rank.append(list(made))
        stage, own = divmod(rank, tp_size)
        stage_ranks = list(range(stage * tp_size, (stage + 1) * tp_size))
        assert (mesh.tp_group and mesh.tp_group[1]) == (stage_ranks if tp_size > 1 else None)
        last = own + (pp_size - 1) * tp_size
        assert (mesh.previous_group and mesh.previous_group[1]) == ([rank - tp_size, rank] if stage > 0 else None)
        assert (mesh.next_group and mesh.next_group[1]) == ([rank, rank + tp_size] if rank != last else None)
        assert (mesh.token_group and mesh.token_group[1]) == ([own, last] if rank in (own, last) else None)
        links += [link[0] for link in (mesh.previous_group, mesh.next_group, mesh.token_group) if link is not None]
    assert all(groups == of_each_rank[0] for groups in of_each_rank)
    # Each group has one message direction, and two ranks.
    assert sorted(links) == sorted(2 * list(set(links)))
    assert len(set(links)) == pp_size * tp_size


def test_nccl_gives_links_between_stages_few_thread_blocks_and_sums_over_ranks_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nccl:  # torch for a CPU has none
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(max_ctas=None)

    limits: dict[tuple[int, ...], int | None] = {}

    def new_group(ranks: list[int], timeout: object, pg_options: Nccl.Options | None) -> object:  # noqa: ARG001
        limits[tuple(ranks)] = None if pg_options is None else pg_options.config.max_ctas
        return object()

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    with_groups(Mesh.of_worker(0, pp_size=3, tp_size=2), on_nccl=True)
    links = {(0, 2), (1, 3), (2, 4), (3, 5), (0, 4), (1, 5)}
    assert {ranks for ranks, most in limits.items() if most == LINK_CTAS} == links
    assert {ranks for ranks, most in limits.items() if most is None} == {(0, 1), (2, 3), (4, 5)}


def test_an_error_of_this_rank_is_not_taken_for_the_end_of_another() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not is_about_another_rank(caught.value)


def test_one_rank_joins_nothing() -> None:
    mesh = Mesh()
    with joined(mesh, None, CPU) as found:
        assert found is mesh
    assert not torch.distributed.is_initialized()
