"""Tensor-parallel collectives. With tp_size 1, each returns its argument."""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.symmetric_all_reduce import sum_over_ranks

# torch 2.13 renamed it, and warns of the old name, the only one that 2.11 has.
_NEW_NAME, _OLD_NAME = "all_gather_single", "all_gather_into_tensor"
GATHER = _NEW_NAME if hasattr(torch.distributed, _NEW_NAME) else _OLD_NAME
"""In torch.distributed: the collective that gathers into one tensor. Into a list of tensors, NCCL copies each."""


def gather_into(gathered: Tensor, own: Tensor, mesh: Mesh) -> None:
    """own [N, ...], contiguous and of the same shape on each rank -> gathered [tp_size * N, ...], by rank."""
    getattr(torch.distributed, GATHER)(gathered, own, group=mesh.tp_group)


def sum_over_shards(partial: Tensor, mesh: Mesh) -> Tensor:
    """partial [T, E], each rank's partial sum -> the sum, on every rank. May overwrite `partial`."""
    if mesh.all_reduce is not None:
        if torch.compiler.is_compiling():
            sum_over_ranks(partial, mesh.all_reduce.name)
        else:
            mesh.all_reduce.sum(partial)
    elif mesh.tp_size > 1:
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
    """own [r, ...], this rank's rows -> [R, ...], those of all ranks in their order. num_rows: r of each rank."""
    padded = own.new_zeros((max(num_rows), *own.shape[1:]))
    padded[: len(own)] = own
    return torch.cat([rows[:num] for rows, num in zip(gather_shards(padded, mesh), num_rows, strict=True)])


def gather_shards(own: Tensor, mesh: Mesh) -> Tensor:
    """own [N, ...], of the same shape on each rank -> [tp_size, N, ...], on every rank."""
    if mesh.tp_size == 1:
        return own.unsqueeze(0)
    shards = own.new_empty((mesh.tp_size, *own.shape))
    if own.numel():
        gather_into(shards.flatten(0, 1), own.contiguous(), mesh)
    return shards
