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


def copy_from_first(tensor: Tensor, mesh: Mesh) -> None:
    """tensor: contiguous, of the same shape and dtype on each rank. Overwritten with the first rank's values."""
    if mesh.tp_size > 1 and tensor.numel() > 0:
        torch.distributed.broadcast(tensor, group=mesh.tp_group, group_src=0)


def gather_shards(own: Tensor, mesh: Mesh) -> Tensor:
    """own [...], of the same shape on each rank -> [tp_size, ...], on every rank."""
    if mesh.tp_size == 1:
        return own.unsqueeze(0)
    shards = own.new_empty((mesh.tp_size, *own.shape))
    if own.numel():
        torch.distributed.all_gather(list(shards), own.contiguous(), group=mesh.tp_group)
    return shards
