"""The token ids of each tensor-parallel rank, and what the ranks exchange about their logits: few numbers, which all
compare without rounding, so that all find the same."""

# R rows that sample, V vocabulary, v token ids of this rank, r rows, n tokens of each

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokasaurus.model.parallel.collectives import gather_shards
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.noise import gumbel_noise_of


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The token ids of which this rank has the logits."""

    first_id: int
    widths: tuple[int, ...]
    """Token ids of each rank, V in all."""
    mesh: Mesh

    @classmethod
    def of(cls, mesh: Mesh, vocab_size: int) -> "VocabularyShard":
        widths = (replace(mesh, tp_rank=rank).vocab_shard(vocab_size)[1] for rank in range(mesh.tp_size))
        return cls(mesh.vocab_shard(vocab_size)[0], tuple(widths), mesh)

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all token ids."""
        return self.mesh.tp_size == 1


ALL_TOKENS = VocabularyShard(0, (), Mesh())
"""The only shard of one rank, whatever the size of its vocabulary."""


def best_of_ranks(
    tokens: Tensor,
    logits: Tensor,
    normalizers: Tensor | None,
    temperatures: Tensor,
    noise_keys: Tensor,
    shard: VocabularyShard,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The token that one process would draw from each row, given the tokens that the ranks draw from their shards.

    tokens, logits, normalizers: this rank's, as in Drawn; -> the same of the whole vocabulary, tokens int64 and the
    others float64. temperatures: float32 [R]. noise_keys: int64 [R, 2].
    """
    ids = tokens.clamp(min=0) + shard.first_id
    scores = logits / torch.where(temperatures > 0, temperatures, 1)
    scores += gumbel_noise_of(noise_keys, ids.unsqueeze(1)).squeeze(1).masked_fill_(temperatures == 0, 0)
    own = [scores, ids, tokens < 0]
    if normalizers is not None:
        own += [logits, normalizers]
    # float64 holds float32 values and token ids exactly.
    shards = gather_shards(torch.stack([values.double() for values in own]), shard.mesh)  # [ranks, numbers, R]
    best = shards[0]
    for others in shards[1:]:
        is_better = (others[0] > best[0]) | ((others[0] == best[0]) & (others[1] < best[1]))
        best = torch.where(is_better, others, best)
    drawn = torch.where(shards[:, 2].any(0), -1, best[1].long())
    if normalizers is None:
        return drawn, best[0], None
    return drawn, best[3], shards[:, 4].logsumexp(dim=0)


def largest_of_ranks(ids: Tensor, values: Tensor, count: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The largest logits of all ranks, given this rank's: `count`, or V if that is less.

    ids: [r, n], of this rank's shard, and values: float32 [r, n], in descending order; n is `count`, or v if that is
    less -> ids of the whole vocabulary, int64, and values, float64, in descending order.
    """
    padding = (0, min(count, max(shard.widths)) - ids.shape[1])  # every rank sends as many
    own_ids = torch.nn.functional.pad(ids.long() + shard.first_id, padding, value=sum(shard.widths))
    own_values = torch.nn.functional.pad(values, padding, value=-math.inf)
    own = torch.stack((own_values.double(), own_ids.double()))
    candidates, candidate_ids = gather_shards(own, shard.mesh).permute(1, 2, 0, 3).flatten(2)
    best = candidates.topk(min(count, sum(shard.widths)), dim=-1)
    return candidate_ids.gather(1, best.indices).long(), best.values


def targets_of_ranks(logits: Tensor, target_ids: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """logits: float32 [r, v], of this rank; target_ids: int32 [r] -> the logit of each row's target, and the
    log-sum-exp of each row, over all ranks: float32 [r]."""
    normalizers, local = logits.logsumexp(dim=-1), target_ids.long() - shard.first_id
    if shard.is_whole:
        return logits.gather(1, local.unsqueeze(1)).squeeze(1), normalizers
    is_here = (local >= 0) & (local < logits.shape[1])
    own = logits.gather(1, local.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    shards = gather_shards(torch.stack((normalizers, torch.where(is_here, own, 0))), shard.mesh)
    return shards[:, 1].sum(dim=0), shards[:, 0].logsumexp(dim=0)
