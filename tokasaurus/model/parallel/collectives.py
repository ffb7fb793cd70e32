"""The process groups of a replica's workers, NCCL between CUDA devices and gloo between processes of a CPU, and what
their ranks exchange. With tp_size 1, each tensor-parallel collective returns its argument. Sums and gathers of meta
tensors exchange nothing."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.symmetric_all_reduce import sum_over_ranks

# T tokens, E hidden size, R rows, r of them of one rank, V vocabulary, v of its tokens of one rank

TIMEOUT = timedelta(minutes=5)
"""Longest wait of a rank for the others, in a collective or at the start. One that reads its weights from a slow disk
may be so late. Nobody waits for a dead one: gloo notices its death at once, and so does the launcher."""

LINK_CTAS = 4
"""Most thread blocks of NCCL that send or receive for a link between stages. They occupy multiprocessors while a step
is computed, and a receive does so until its message has come; hidden states are small beside what a few can move. An
estimate, not measured."""

# torch 2.13 renamed it, and warns of the old name, the only one that 2.11 has.
_NEW_NAME, _OLD_NAME = "all_gather_single", "all_gather_into_tensor"
GATHER = _NEW_NAME if hasattr(torch.distributed, _NEW_NAME) else _OLD_NAME
"""Name in torch.distributed of the collective that gathers into one tensor. Into a list of tensors, NCCL copies
each."""


def is_about_another_rank(error: RuntimeError) -> bool:
    """Whether a collective failed, most likely because another rank has ended. Gloo has no error class of its own."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


@contextmanager
def joined(mesh: Mesh, rendezvous: Path | None, device: torch.device) -> Iterator[Mesh]:
    """Inside, `mesh` with its groups. With one rank, the same mesh.

    rendezvous: a path that all workers of the replica agree on, and that no earlier replica has used; a file is made
    there. None with one rank. Blocks until all ranks have called it.
    """
    if mesh.num_ranks == 1:
        yield mesh
        return
    assert rendezvous is not None, "ranks need a place to meet"
    on_cuda = device.type == "cuda"
    # The ranks are on one machine: gloo must neither look up its name nor listen where others can connect.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{rendezvous}",
        rank=mesh.world_rank,
        world_size=mesh.num_ranks,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    try:
        yield with_groups(mesh, on_cuda)
    except BaseException:
        # Gloo's threads abort a process that ends while they run. NCCL might wait for a dead rank instead.
        if not on_cuda:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


def with_groups(mesh: Mesh, on_nccl: bool) -> Mesh:
    """The mesh with its groups. Every rank must make every group, also groups of other ranks.

    Each link between two stages has a group of its own, in which messages go one way: NCCL runs the transfers of a
    group one after another, so that a receive which was posted early would hold up every later send of its group.
    """
    if mesh.pp_size == 1:
        return replace(mesh, tp_group=torch.distributed.group.WORLD)

    def new_group(*stages_and_ranks: tuple[int, int], is_link: bool = True) -> ProcessGroup | None:
        """None unless this rank is in it."""
        ranks = [stage * mesh.tp_size + rank for stage, rank in stages_and_ranks]
        options = None
        if is_link and on_nccl:
            options = torch.distributed.ProcessGroupNCCL.Options()
            options.config.max_ctas = LINK_CTAS
        group = torch.distributed.new_group(ranks, timeout=TIMEOUT, pg_options=options)
        return group if mesh.world_rank in ranks else None

    stages, tp_ranks, last = range(mesh.pp_size), range(mesh.tp_size), mesh.pp_size - 1
    tp_groups = [
        new_group(*((stage, rank) for rank in tp_ranks), is_link=False) if mesh.tp_size > 1 else None
        for stage in stages
    ]
    links = [[new_group((stage, rank), (stage + 1, rank)) for rank in tp_ranks] for stage in range(last)]
    token_groups = [new_group((0, rank), (last, rank)) for rank in tp_ranks]
    return replace(
        mesh,
        tp_group=tp_groups[mesh.pp_rank],
        previous_group=None if mesh.is_first_stage else links[mesh.pp_rank - 1][mesh.tp_rank],
        next_group=None if mesh.is_last_stage else links[mesh.pp_rank][mesh.tp_rank],
        token_group=token_groups[mesh.tp_rank],
    )


def least_of_ranks(value: int, mesh: Mesh, device: torch.device) -> int:
    """The least value that any rank of the replica has. Every rank must call it."""
    if mesh.num_ranks == 1:
        return value
    least = torch.tensor(value, device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


def gather_into(gathered: Tensor, own: Tensor, mesh: Mesh) -> None:
    """own [N, ...], contiguous and of the same shape on each rank -> gathered [tp_size * N, ...], by rank."""
    getattr(torch.distributed, GATHER)(gathered, own, group=mesh.tp_group)


def sum_over_shards(partial: Tensor, mesh: Mesh) -> Tensor:
    """partial [T, E], each rank's partial sum -> the sum, on every rank. May overwrite `partial`."""
    partial = partial.contiguous()
    if partial.is_meta:
        return partial
    if mesh.all_reduce is not None:
        if torch.compiler.is_compiling():
            sum_over_ranks(partial, mesh.all_reduce.name)
        else:
            mesh.all_reduce.sum(partial)
    elif mesh.tp_size > 1:
        torch.distributed.all_reduce(partial, group=mesh.tp_group)
    return partial


def sum_in_float32(partial: Tensor, mesh: Mesh) -> Tensor:
    """As sum_over_shards, for a few float32 numbers of each token, which only the process group adds."""
    if mesh.tp_size > 1:
        torch.distributed.all_reduce(partial, group=mesh.tp_group)
    return partial


def whole_rows(own: Tensor, num_rows: Sequence[int], widths: Sequence[int], mesh: Mesh) -> Tensor:
    """own [R, v], this rank's columns of all rows -> [r, V], all columns of this rank's rows.

    num_rows: r of each rank, which have the rows in this order. widths: v of each rank.
    """
    sizes = [num_rows[mesh.tp_rank] * width for width in widths]
    received = own.new_empty(sum(sizes))
    sent = [num * own.shape[1] for num in num_rows]
    torch.distributed.all_to_all_single(received, own.flatten(), sizes, sent, group=mesh.tp_group)
    parts = zip(torch.split(received, sizes), widths, strict=True)
    return torch.cat([part.view(num_rows[mesh.tp_rank], width) for part, width in parts], dim=1)


def gather_rows(own: Tensor, num_rows: Sequence[int], mesh: Mesh) -> Tensor:
    """own [r, ...], this rank's rows -> [R, ...], the rows of all ranks in their order. num_rows: r of each rank."""
    padded = own.new_zeros((max(num_rows), *own.shape[1:]))
    padded[: len(own)] = own
    return torch.cat([rows[:num] for rows, num in zip(gather_shards(padded, mesh), num_rows, strict=True)])


def gather_shards(own: Tensor, mesh: Mesh) -> Tensor:
    """own [N, ...], of the same shape on each rank -> [tp_size, N, ...], on every rank."""
    if mesh.tp_size == 1:
        return own.unsqueeze(0)
    shards = own.new_empty((mesh.tp_size, *own.shape))
    if own.numel() and not own.is_meta:
        gather_into(shards.flatten(0, 1), own.contiguous(), mesh)
    return shards
