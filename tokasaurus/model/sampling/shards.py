"""Sampling by tensor-parallel ranks, each of which has the logits of its own range of token ids.

No rank sees all logits. Each finds the best token of its shard, and all compare the few numbers that the ranks
exchange: identical numbers, compared without rounding, so that all ranks choose the same tokens. Only rows with a top_p
may need more: the ranks exchange the probabilities of these rows, first of the most likely tokens, then of all.
"""

# R rows that sample, V vocabulary, v tokens of this rank's shard, K candidates, F tokens with prompt log-probabilities

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.tensor_parallel import copy_from_first, gather_shards, sum_over_shards
from tokasaurus.model.sampling.limits import (
    MOST_CANDIDATES,
    LimitsInUse,
    limits_in_use,
    smallest_before_top_p,
    smallest_inside,
    suffices,
)
from tokasaurus.model.sampling.logit_rules import change_logits
from tokasaurus.model.sampling.noise import gumbel_noise_of, keys_of_shard
from tokasaurus.model.sampling.params import ParamColumns, columns_of
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, TopRows, chunks_of, sample
from tokasaurus.model.sampling.token_masks import masked_rows


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's token ids."""

    first_id: int
    vocab_size: int
    """V, of all ranks."""
    mesh: Mesh

    @classmethod
    def of(cls, mesh: Mesh, vocab_size: int) -> "VocabularyShard":
        return cls(mesh.vocab_shard(vocab_size)[0], vocab_size, mesh)


def sample_shards(logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None) -> Sampled:
    """As `sample`, from this rank's logits [R, v]; every rank gets all results, and must call it with the same rows."""
    if not len(logits):
        return sample(logits, rows, kernels)
    if rows.rules is None and rows.masks is None and rows.limited is None:
        scores, ids = _best_of_plain_rows(logits, rows, shard, kernels)
    else:
        scores, ids = _best_of_rows(logits, rows, shard)
    is_bad = ~(logits.amax(dim=-1) < torch.inf)  # amax is NaN if a logit is
    own = [scores, ids, is_bad]
    if rows.any_logprobs:
        chosen = logits.gather(1, (ids - shard.first_id).clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
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


def _best_of_plain_rows(
    logits: Tensor, rows: SamplingRows, shard: VocabularyShard, kernels: Kernels | None
) -> tuple[Tensor, Tensor]:
    """-> the scores of each row's best token on this rank, float32 [R], and its id in the whole vocabulary, int64 [R];
    anything for rows with NaN or infinity."""
    keys = keys_of_shard(rows.noise_keys, shard.first_id)
    drawn = sample(logits, replace(rows, noise_keys=keys, any_logprobs=False, top=None), kernels).tokens.clamp(min=0)
    temperatures = columns_of(rows.device_params)["temperature"]
    scores = logits.gather(1, drawn.unsqueeze(1)).squeeze(1).float()
    scores = scores / torch.where(temperatures > 0, temperatures, 1)
    scores += gumbel_noise_of(keys, drawn.unsqueeze(1)).squeeze(1).masked_fill_(temperatures == 0, 0)
    return scores, drawn + shard.first_id


def _best_of_rows(logits: Tensor, rows: SamplingRows, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """As _best_of_plain_rows, with rules, masks and limits."""
    keys, parts = keys_of_shard(rows.noise_keys, shard.first_id), []
    for chunk in chunks_of(len(logits)):
        params = columns_of(rows.device_params[chunk])
        temperatures = params["temperature"].unsqueeze(1)
        adjusted = logits[chunk].to(torch.float32, copy=True)
        if rows.rules is not None:
            change_logits(adjusted, rows.rules, params, chunk.start, shard.first_id)
        masked = None
        if rows.masks is not None:
            masked = masked_rows(rows.masks, adjusted, chunk.start, shard.first_id)
        if masked is not None:
            masked.forbid(adjusted)
        adjusted /= torch.where(temperatures > 0, temperatures, 1)
        _mask_outside(adjusted, rows, chunk.start, shard)
        noise = gumbel_noise_of(keys[chunk], torch.arange(logits.shape[1], device=logits.device))
        adjusted += noise.masked_fill_(temperatures == 0, 0)
        scores, drawn = adjusted.max(dim=-1)
        if masked is not None:
            masked.correct(drawn)
            # A rank without any allowed token must not win with a token that is forbidden.
            has_none = torch.zeros_like(drawn, dtype=torch.bool)
            has_none[masked.rows] = ~masked.is_allowed.any(dim=1)
            drawn = torch.where(has_none, shard.vocab_size, drawn)
        parts.append((scores, drawn + shard.first_id))
    scores, ids = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return scores, ids


def _mask_outside(adjusted: Tensor, rows: SamplingRows, first_row: int, shard: VocabularyShard) -> None:
    """As in sample.py, for this rank's adjusted logits [r, v]."""
    if rows.limited is None:
        return
    own = rows.limited.within(first_row, len(adjusted))
    if own.start == own.stop:
        return
    indices = rows.limited.on_device[own]
    some = adjusted[indices - first_row]
    in_use = limits_in_use(rows.params[rows.limited.on_host[own]])
    normalizers = gather_shards(_normalizers(some), shard.mesh).logsumexp(dim=0)
    probabilities = (some - normalizers.unsqueeze(1)).exp()
    smallest = _smallest_of_shards(probabilities, columns_of(rows.device_params[indices]), in_use, shard)
    adjusted[indices - first_row] = some.masked_fill_(probabilities < smallest, -torch.inf)


def _smallest_of_shards(
    probabilities: Tensor, params: ParamColumns, in_use: LimitsInUse, shard: VocabularyShard
) -> Tensor:
    """The least probability inside all limits, float32 [r, 1], the same on every rank. probabilities: [r, v]."""
    count = max(in_use.largest_top_k, 1)
    if in_use.any_top_p:
        # Not on other devices: the host would wait to see whether some candidates suffice.
        count = max(count, MOST_CANDIDATES) if probabilities.device.type == "cpu" else shard.vocab_size
    count = min(count, shard.vocab_size)
    ordered = _largest_of_shards(probabilities, count, shard)
    if not in_use.any_top_p:
        return smallest_before_top_p(ordered, params)
    is_enough = torch.ones(1, dtype=torch.int32, device=probabilities.device)
    if count < shard.vocab_size:
        is_enough.fill_(suffices(ordered, params))
        copy_from_first(is_enough, shard.mesh)  # or one rank might wait for another that goes on
    if not bool(is_enough):
        ordered = _largest_of_shards(probabilities, shard.vocab_size, shard)
    return smallest_inside(ordered, params)


def _largest_of_shards(values: Tensor, count: int, shard: VocabularyShard) -> Tensor:
    """values [r, v] -> the `count` largest of all ranks, [r, count], in descending order, on every rank."""
    candidates = gather_shards(_padded_top(values, count, shard)[0], shard.mesh)
    return candidates.transpose(0, 1).flatten(1).topk(count, dim=-1).values


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
