"""Tensor-parallel collectives. With tp_size 1, each returns its argument."""

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

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


def largest_over_shards(values: Tensor, token_ids: Tensor, mesh: Mesh) -> Tensor:
    """values [R], each rank's largest logits, and token_ids int64 [R], their tokens in the whole vocabulary, or -1 for
    rows without one -> int64 [R], the same on every rank: the tokens of the largest values of all ranks, the first of
    equal ones, and -1 where a rank has -1.

    Comparing rounds nothing, so all ranks find the same tokens in the same numbers.
    """
    if mesh.tp_size == 1 or len(values) == 0:
        return token_ids
    # float64 holds float32 values and token ids exactly.
    own = torch.stack((values.double().masked_fill(token_ids < 0, torch.inf), token_ids.double()))
    shards = [torch.empty_like(own) for _ in range(mesh.tp_size)]
    torch.distributed.all_gather(shards, own, group=mesh.tp_group)
    best, best_ids = shards[0].unbind()
    for shard in shards[1:]:  # from the lowest token ids to the highest
        shard_values, shard_ids = shard.unbind()
        is_better = shard_values > best
        best, best_ids = torch.where(is_better, shard_values, best), torch.where(is_better, shard_ids, best_ids)
    return best_ids.long()


def gather_vocab(shard: Tensor, vocab_size: int, mesh: Mesh) -> Tensor:
    """shard [R, length of mesh.vocab_shard] -> [R, vocab_size], in the order of token ids, on every rank."""
    if mesh.tp_size == 1:
        return shard
    if len(shard) == 0:  # on every rank
        return shard.new_empty((0, vocab_size))
    base, num_longer = divmod(vocab_size, mesh.tp_size)
    lengths = [base + 1] * num_longer + [base] * (mesh.tp_size - num_longer)
    # all_gather takes shards of one shape only, so the shorter ones are padded.
    padded = functional.pad(shard, (0, lengths[0] - shard.shape[-1])).contiguous()
    shards = [torch.empty_like(padded) for _ in range(mesh.tp_size)]
    torch.distributed.all_gather(shards, padded, group=mesh.tp_group)
    return torch.cat([part[..., :length] for part, length in zip(shards, lengths, strict=True)], dim=-1)
