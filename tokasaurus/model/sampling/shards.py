"""Sampling by tensor-parallel ranks, each of which has the logits of its own range of token ids.

Without limits, rules and masks, each rank finds the best token of its shard, and all compare the few numbers that they
exchange: identical numbers, compared without rounding, so that all choose the same tokens. Otherwise, the ranks divide
the rows: each gets the whole logits of its own rows, samples these as one process does, and all exchange the results.
"""

# R rows that sample, r of them of this rank, V vocabulary, v tokens of this rank's shard, A rows with top-k logprobs,
# K of their tokens, F tokens with prompt log-probabilities

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.parallel.collectives import gather_rows, gather_shards, sum_over_shards, whole_rows
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.noise import gumbel_noise_of, keys_of_shard
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs
from tokasaurus.model.sampling.rules import columns_of
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, TopRows, chunks_of, sample


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's token ids."""

    first_id: int
    vocab_size: int
    """V, of all ranks."""
    widths: tuple[int, ...]
    """Token ids of each rank."""
    mesh: Mesh

    @classmethod
    def of(cls, mesh: Mesh, vocab_size: int) -> "VocabularyShard":
        widths = (replace(mesh, tp_rank=rank).vocab_shard(vocab_size)[1] for rank in range(mesh.tp_size))
        return cls(mesh.vocab_shard(vocab_size)[0], vocab_size, tuple(widths), mesh)


def sample_shards(logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None) -> Sampled:
    """As `sample`, from this rank's logits [R, v]; every rank gets all results, and must call it with the same rows."""
    if not len(logits):
        return sample(logits, rows, kernels)
    if rows.rules is None and rows.masks is None and rows.limited is None:
        return _sample_plain_rows(logits, rows, shard, kernels)
    return _sample_own_rows(logits, rows, shard, kernels)


def _sample_plain_rows(logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None) -> Sampled:
    """sample_shards, for rows without limits, rules and masks."""
    scores, ids = _best_of_shard(logits, rows, shard, kernels)
    is_bad = ~(logits.amax(dim=-1) < torch.inf)  # amax is NaN if a logit is
    own = [scores, ids, is_bad]
    if rows.any_logprobs:
        chosen = logits.gather(1, (ids - shard.first_id).unsqueeze(1)).squeeze(1)
        own += [chosen, _normalizers(logits)]
    # float64 holds float32 values and token ids exactly.
    shards = gather_shards(torch.stack([values.double() for values in own]), shard.mesh)  # [ranks, numbers, R]
    best = shards[0]
    for others in shards[1:]:
        is_better = (others[0] > best[0]) | ((others[0] == best[0]) & (others[1] < best[1]))
        best = torch.where(is_better, others, best)
    tokens = torch.where(shards[:, 2].any(0), -1, best[1].long())
    if not rows.any_logprobs:
        return Sampled(tokens)
    normalizers = shards[:, 4].logsumexp(dim=0)
    top = () if rows.top is None else _top_logprobs(logits, rows.top, normalizers, shard)
    return Sampled(tokens, (best[3] - normalizers).float(), *top)


def _best_of_shard(
    logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None
) -> tuple[Tensor, Tensor]:
    """-> the scores of each row's best token on this rank, float32 [R], and its id in the whole vocabulary, int64 [R];
    any of this rank's for rows with NaN or infinity."""
    keys = keys_of_shard(rows.noise_keys, shard.first_id)
    drawn = sample(logits, replace(rows, noise_keys=keys, any_logprobs=False, top=None), kernels).tokens.clamp(min=0)
    temperatures = columns_of(rows.device_params)["temperature"]
    scores = logits.gather(1, drawn.unsqueeze(1)).squeeze(1).float()
    scores = scores / torch.where(temperatures > 0, temperatures, 1)
    scores += gumbel_noise_of(keys, drawn.unsqueeze(1)).squeeze(1).masked_fill_(temperatures == 0, 0)
    return scores, drawn + shard.first_id


def _sample_own_rows(logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None) -> Sampled:
    """sample_shards, for any rows."""
    mesh = shard.mesh
    ends = [len(logits) * rank // mesh.tp_size for rank in range(mesh.tp_size + 1)]
    num_rows = [end - start for start, end in itertools.pairwise(ends)]  # of each rank
    whole = whole_rows(logits, num_rows, shard.widths, mesh)
    sampled = None
    if len(whole):
        sampled = sample(whole, rows.cut(ends[mesh.tp_rank], len(whole)), kernels)
    numbers = logits.new_zeros((len(whole), 2), dtype=torch.float64)  # which holds float32 and token ids exactly
    if sampled is not None:
        numbers[:, 0] = sampled.tokens
        if sampled.logprobs is not None:
            numbers[:, 1] = sampled.logprobs
    tokens, logprobs = gather_rows(numbers, num_rows, mesh).unbind(1)
    drawn = Sampled(_packed(tokens, torch.int64), _packed(logprobs, torch.float32) if rows.any_logprobs else None)
    if rows.top is None:
        return drawn
    counts = np.searchsorted(rows.top.rows.on_host, ends)  # A of rows before each rank's
    num_top = np.diff(counts).tolist()
    best = logits.new_zeros((num_top[mesh.tp_rank], 2, rows.top.count), dtype=torch.float64)
    if sampled is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
        best[:, 0], best[:, 1] = sampled.top_ids, sampled.top_logprobs
    top_ids, top_logprobs = gather_rows(best, num_top, mesh).unbind(1)
    return Sampled(*drawn[:2], _packed(top_ids, torch.int32), _packed(top_logprobs, torch.float32))


def _packed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers side by side in memory, in another dtype. `float()` keeps the gaps of a tensor of one number."""
    return tensor.to(dtype, memory_format=torch.contiguous_format)


def _padded_top(values: Tensor, count: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """values [r, v] -> the largest, at most `count`, in descending order, and their ids in the whole vocabulary: both
    [r, n], with the same n on every rank."""
    most = -(-shard.vocab_size // shard.mesh.tp_size)  # tokens of the longest shard
    num_own = min(count, values.shape[1])
    top = values.topk(num_own, dim=-1)
    padding = (0, min(count, most) - num_own)
    ids = torch.nn.functional.pad(top.indices + shard.first_id, padding, value=shard.vocab_size)
    return torch.nn.functional.pad(top.values, padding, value=-math.inf), ids


def _normalizers(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row of a shard, float32 [R]."""
    return torch.cat([logits[chunk].float().logsumexp(dim=-1) for chunk in chunks_of(len(logits))])


def _top_logprobs(logits: Tensor, top: TopRows, normalizers: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """top_ids and top_logprobs, as in Sampled. normalizers: [R], of all ranks."""
    rows = top.rows.on_device
    values, ids = _merged_top(logits[rows].float(), min(top.count, shard.vocab_size), shard)
    return ids, (values - normalizers[rows].unsqueeze(1)).float()


def _merged_top(values: Tensor, count: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """values [r, v] -> the `count` largest of all ranks, float64 [r, count], in descending order; their ids, int32."""
    own = torch.stack([part.double() for part in _padded_top(values, count, shard)])
    candidates, ids = gather_shards(own, shard.mesh).permute(1, 2, 0, 3).flatten(2)
    best = candidates.topk(count, dim=-1)
    return best.values, ids.gather(1, best.indices).int()


def fill_token_logprobs_of_shards(
    logits: Tensor, target_ids: Tensor, result: TokenLogprobs, shard: VocabularyShard
) -> None:
    """As fill_token_logprobs, from this rank's logits [F, v]."""
    for chunk in chunks_of(len(logits)):
        values = logits[chunk].float()
        local = target_ids[chunk].long() - shard.first_id
        is_here = (local >= 0) & (local < values.shape[1])
        own = values.gather(1, local.clamp(0, values.shape[1] - 1).unsqueeze(1)).squeeze(1)
        targets = torch.where(is_here, own, 0)
        shards = gather_shards(torch.stack((values.logsumexp(dim=-1), targets)), shard.mesh)
        normalizers, targets = shards[:, 0].logsumexp(dim=0), shards[:, 1].sum(dim=0)
        logprobs, ranks, top_ids, top_logprobs = (tensor[chunk] for tensor in result)
        logprobs.copy_(targets - normalizers)
        above = (values > targets.unsqueeze(1)).sum(dim=-1, dtype=torch.int32)
        ranks.copy_(sum_over_shards(above, shard.mesh) + 1)
        if top_ids.shape[1]:
            top, ids = _merged_top(values, top_ids.shape[1], shard)
            top_ids.copy_(ids)
            top_logprobs.copy_(top - normalizers.unsqueeze(1))
