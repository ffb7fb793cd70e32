"""Tensor-parallel collectives. With tp_size 1, each returns its argument."""

import torch
import torch.distributed
from torch import Tensor

from tokasaurus.model.parallel.mesh import Mesh


def sum_over_shards(partial: Tensor, mesh: Mesh) -> Tensor:
    """partial [T, E], each rank's partial sum -> the sum, on every rank. May overwrite `partial`."""
    if mesh.tp_size > 1:
        torch.distributed.all_reduce(partial, group=mesh.tp_group)
    return partial


def gather_last_dim(shard: Tensor, mesh: Mesh) -> Tensor:
    """shard [..., V / tp_size] -> [..., V], concatenated in rank order, on every rank."""
    if mesh.tp_size == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(mesh.tp_size)]
    torch.distributed.all_gather(shards, shard.contiguous(), group=mesh.tp_group)
    return torch.cat(shards, dim=-1)
