"""Prompt logprobs: the log-probability of each prompt token given the tokens before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokasaurus.model.buffer_sizes import LOGPROBS_AT_ONCE
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels
from tokasaurus.model.parallel.collectives import sum_over_shards
from tokasaurus.model.sampling.sample import chunks_of
from tokasaurus.model.sampling.shards import ALL_TOKENS, VocabularyShard, largest_of_ranks, targets_of_ranks

# T tokens in this forward, E hidden size, Q prompt tokens, P with padding, v token ids of this rank, which has all if
# it is the only one, K of top-k logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobTargets:
    """The prompt tokens of one forward whose log-probabilities are computed. Both tensors are on the device."""

    rows: Tensor
    """int64 [P], indices into T: row i predicts target_ids[i] for the first Q; the rest is padding."""

    target_ids: Tensor
    """int32 [Q], the prompt tokens whose logprobs are computed."""

    num_top: int
    """K."""


class TokenLogprobs(NamedTuple):
    """Prompt logprobs; see PromptLogprobsOutput. The choice among equally likely tokens in the top K is unspecified."""

    logprobs: Tensor
    """float32 [Q]."""

    ranks: Tensor
    """int32 [Q]."""

    top_ids: Tensor
    """int32 [Q, K]."""

    top_logprobs: Tensor
    """float32 [Q, K]."""


def compute_prompt_logprobs(
    hidden: Tensor,
    targets: PromptLogprobTargets,
    head: Callable[[Tensor], Tensor],
    fill: Callable[[Tensor, Tensor, TokenLogprobs], None],
) -> TokenLogprobs:
    """hidden [T, E]. head: maps int64 [rows], indices of its rows, to logits, which its next call may overwrite. fill:
    as fill_token_logprobs, from these logits."""
    num_targets = len(targets.target_ids)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_targets, *shape), dtype=dtype, device=hidden.device)

    result = TokenLogprobs(
        *(empty(torch.float32), empty(torch.int32)),
        *(empty(torch.int32, targets.num_top), empty(torch.float32, targets.num_top)),
    )
    for start in range(0, num_targets, LOGPROBS_AT_ONCE):
        chunk = slice(start, min(start + LOGPROBS_AT_ONCE, num_targets))
        logits = head(targets.rows[start : start + LOGPROBS_AT_ONCE])[: chunk.stop - start]
        fill(logits, targets.target_ids[chunk], TokenLogprobs(*(tensor[chunk] for tensor in result)))
    return result


def fill_token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    result: TokenLogprobs,
    kernels: Kernels | None,
    shard: VocabularyShard = ALL_TOKENS,
) -> None:
    """Fill `result` from logits [Q, v] and target_ids int32 [Q]. kernels: do the same on the CPU, faster.

    shard: the token ids of the logits, if each tensor-parallel rank has its own; all ranks get all results.
    """
    if shard.is_whole and kernels is not None and logits.device.type == "cpu" and logits.dtype in ACTIVATION_DTYPES:
        kernels.fill_token_logprobs(logits, target_ids, *result)
        return
    for chunk in chunks_of(len(logits)):
        values = logits[chunk].float()
        targets, normalizers = targets_of_ranks(values, target_ids[chunk], shard)
        logprobs, ranks, top_ids, top_logprobs = (tensor[chunk] for tensor in result)
        logprobs.copy_(targets - normalizers)
        above = (values > targets.unsqueeze(1)).sum(dim=-1, dtype=torch.int32)
        ranks.copy_(sum_over_shards(above, shard.mesh) + 1)
        count = top_ids.shape[1]
        if count:
            largest = values.topk(min(count, values.shape[1]), dim=-1)
            ids, top = largest.indices, largest.values
            if not shard.is_whole:
                ids, top = largest_of_ranks(ids, top, count, shard)
            top_ids.copy_(ids)
            top_logprobs.copy_(top - normalizers.unsqueeze(1))
