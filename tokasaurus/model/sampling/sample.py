"""Sample tokens from logits, and compute their log-probabilities."""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import TokenMasks
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels
from tokasaurus.model.cpu.structs import LogitRulesStruct
from tokasaurus.model.sampling.logit_rules import RuledRows, change_logits
from tokasaurus.model.sampling.noise import gumbel_noise
from tokasaurus.model.sampling.params import ParamColumns, columns_of
from tokasaurus.model.sampling.token_masks import masked_rows, num_mask_words

# R rows that sample, V vocabulary

_ROWS_AT_ONCE = 64
"""Rows per chunk. Bounds the memory of intermediate results: hashing noise uses 64-bit integers, 8 bytes per logit."""

_MOST_CANDIDATES = 1024
"""Most likely tokens to which limits are applied first; the whole vocabulary is sorted only if these do not suffice."""


@dataclass(frozen=True, slots=True)
class TopRows:
    """The A of the R rows that want top-k logprobs."""

    rows: NDArray[np.int64]
    """int64 [A], indices into R, ascending, on the host."""

    count: int
    """Tokens per row: the largest k that a row asked for."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of the R rows of logits is sampled."""

    params: NDArray[np.void]
    """SAMPLING_DTYPE [R], on the host."""

    device_params: Tensor
    """int32 [R, F], from params_to_device."""

    noise_keys: Tensor
    """int64 [R, 2], from position_keys."""

    any_logprobs: bool
    """Whether some row wants logprobs."""

    rules: RuledRows | None = None
    """None if no row's logits are changed."""

    top: TopRows | None = None
    """None if no row wants top-k logprobs; otherwise any_logprobs is true."""

    masks: TokenMasks | None = None
    """None if every row may draw any token."""


class Sampled(NamedTuple):
    """Sampled tokens and log-probabilities.

    Log-probabilities are of the model's own distribution, before rules, masks, temperature and limits. A token has the
    same float in logprobs and top_logprobs. The choice among equally likely tokens in the top K is unspecified.
    """

    tokens: Tensor
    """int64 [R]; -1 for rows with a logit that is NaN or positive infinity. Their other results have no meaning."""

    logprobs: Tensor | None = None
    """float32 [R], of the tokens; None if no row wants logprobs."""

    top_ids: Tensor | None = None
    """int32 [A, K], the K = `SamplingRows.top.count` most likely tokens, in descending order; None without `top`."""

    top_logprobs: Tensor | None = None
    """float32 [A, K], of top_ids; None without `top`."""


def sample(logits: Tensor, rows: SamplingRows, kernels: Kernels | None) -> Sampled:
    """Sample a token from each row of logits [R, V]. kernels: do the same on the CPU, faster."""
    masks = rows.masks
    assert masks is None or masks.bits.shape == (len(masks.rows), num_mask_words(logits.shape[1])), "one bit per token"
    if kernels is not None and logits.device.type == "cpu" and logits.dtype in ACTIVATION_DTYPES:
        return _sample_by_kernels(logits, rows, kernels)
    if logits.device.type == "cuda" and _has_triton():
        return sample_by_triton(logits, rows)
    any_sampled = bool((rows.params["temperature"] > 0).any())
    is_plain = not any_sampled and rows.rules is None and masks is None
    drawn = logits.argmax(dim=-1) if is_plain else _draw(logits, rows, any_sampled)
    tokens = torch.where(logits.amax(dim=-1) < torch.inf, drawn, -1)  # amax is NaN if a logit is
    if not rows.any_logprobs:
        return Sampled(tokens)
    normalizers = _normalizers(logits)
    chosen = logits.gather(1, drawn.unsqueeze(1)).squeeze(1).float()
    top = () if rows.top is None else _top_logprobs(logits, rows.top, normalizers)
    return Sampled(tokens, chosen - normalizers, *top)


def _sample_by_kernels(logits: Tensor, rows: SamplingRows, kernels: Kernels) -> Sampled:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    logprobs = torch.empty(len(logits), dtype=torch.float32) if rows.any_logprobs else None
    rules = None
    if rows.rules is not None:
        ruled = rows.rules
        tensors = (
            *(_indices_of_rows(ruled.rows, len(logits)), ruled.tokens, ruled.block_tables, ruled.lengths),
            *(ruled.num_request_tokens, torch.from_numpy(ruled.bias_starts), ruled.bias_ids, ruled.bias_values),
        )
        assert all(tensor.is_contiguous() for tensor in tensors), "kernels need contiguous tensors"
        rules = LogitRulesStruct(
            *(tensor.data_ptr() for tensor in tensors), ruled.page_size, ruled.block_tables.shape[1]
        )
    masks = None
    if rows.masks is not None:
        bits = torch.from_numpy(rows.masks.bits.view(np.int32))
        masks = _indices_of_rows(rows.masks.rows, len(logits)), bits.contiguous()
    top = None
    if rows.top is not None:
        shape = len(rows.top.rows), rows.top.count
        index_of_row = _indices_of_rows(rows.top.rows, len(logits))
        top = index_of_row, torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
    kernels.sample(logits, rows.device_params, rows.noise_keys, rules, masks, tokens, logprobs, top)
    return Sampled(tokens, logprobs, *(() if top is None else top[1:]))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def sample_by_triton(logits: Tensor, rows: SamplingRows) -> Sampled:
    """As `sample`, in one kernel, or one for each 64 rows if the logits of some are changed."""
    from tokasaurus.model.sampling import triton_sample

    masks = None
    if rows.masks is not None:
        bits = torch.from_numpy(rows.masks.bits.view(np.int32)).to(logits.device)
        masks = _indices_of_rows(rows.masks.rows, len(logits)).to(logits.device), bits
    parts = []
    for chunk in _chunks(len(logits)) if rows.rules is not None else [slice(0, len(logits))]:
        changed = None
        if rows.rules is not None:
            # All rows of the chunk are copied: which ones have rules need not be known on the device.
            adjusted = logits[chunk].to(torch.float32, copy=True)
            change_logits(adjusted, rows.rules, columns_of(rows.device_params[chunk]), chunk.start)
            changed = torch.arange(len(adjusted), dtype=torch.int32, device=logits.device), adjusted
        own_masks = None if masks is None else (masks[0][chunk], masks[1])
        parts.append(
            triton_sample.draw(logits[chunk], rows.device_params[chunk], rows.noise_keys[chunk], changed, own_masks)
        )
    tokens, chosen, normalizers = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not rows.any_logprobs:
        return Sampled(tokens)
    top = () if rows.top is None else _top_logprobs(logits, rows.top, normalizers)
    return Sampled(tokens, chosen - normalizers, *top)


def _indices_of_rows(rows: NDArray[np.integer[Any]], num_rows: int) -> Tensor:
    """int32 [num_rows]: each row's index in `rows`, or -1."""
    indices = torch.full((num_rows,), -1, dtype=torch.int32)
    indices[torch.from_numpy(rows)] = torch.arange(len(rows), dtype=torch.int32)
    return indices


def _draw(logits: Tensor, rows: SamplingRows, any_sampled: bool) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for chunk in _chunks(logits.shape[0]):
        params = columns_of(rows.device_params[chunk])
        temperatures = params["temperature"].unsqueeze(1)
        adjusted = logits[chunk].to(torch.float32, copy=True)
        if rows.rules is not None:
            change_logits(adjusted, rows.rules, params, chunk.start)
        masked = None if rows.masks is None else masked_rows(rows.masks, adjusted, chunk.start)
        if masked is not None:
            masked.forbid(adjusted)
        adjusted /= torch.where(temperatures > 0, temperatures, 1)
        _mask_outside(adjusted, rows.params[chunk], rows.device_params[chunk])
        if any_sampled:
            adjusted += gumbel_noise(rows.noise_keys[chunk], logits.shape[1]).masked_fill_(temperatures == 0, 0)
        tokens[chunk] = adjusted.argmax(dim=-1)
        if masked is not None:
            masked.correct(tokens[chunk])
    return tokens


def _mask_outside(adjusted: Tensor, params: NDArray[np.void], device_params: Tensor) -> None:
    """Set adjusted logits [r, V] to -inf for tokens that the limits of the r rows exclude; greedy rows have no limits.

    Precondition: they are already divided by the temperatures.
    """
    is_limited = (params["top_p"] < 1) | (params["top_k"] > 0) | (params["min_p"] > 0)
    limited = np.flatnonzero(is_limited & (params["temperature"] > 0))
    if len(limited):
        indices = torch.from_numpy(limited).to(adjusted.device)
        some = adjusted[indices]
        outside = outside_limits(some, columns_of(device_params[indices]))
        adjusted[indices] = some.masked_fill_(outside, -torch.inf)


def _normalizers(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row, float32 [R]: logits minus this are log-probabilities."""
    return torch.cat([logits[chunk].float().logsumexp(dim=-1) for chunk in _chunks(logits.shape[0])])


def _top_logprobs(logits: Tensor, top: TopRows, normalizers: Tensor) -> tuple[Tensor, Tensor]:
    """top_ids and top_logprobs, as in Sampled."""
    rows = torch.from_numpy(top.rows).to(logits.device)
    chunks = [logits[rows[chunk]].float().topk(top.count, dim=-1) for chunk in _chunks(len(rows))]
    values = torch.cat([top_of_chunk.values for top_of_chunk in chunks])
    ids = torch.cat([top_of_chunk.indices for top_of_chunk in chunks]).int()
    return ids, values - normalizers[rows].unsqueeze(1)


def outside_limits(adjusted: Tensor, params: ParamColumns) -> Tensor:
    """Whether the limits exclude each token: min_p, then top_k, then top_p, each applied to the tokens that remain.

    The order is vLLM's. The token that crosses top_p is kept, and so are all tokens as likely as the last one kept.
    adjusted: logits divided by the temperatures, float32 [R, V]; params: [R] -> bool [R, V].
    Sources: arXiv 1904.09751 (top_p), 2407.01082 (min_p).
    """
    probabilities = adjusted.softmax(dim=-1)
    vocab_size = adjusted.shape[1]
    ordered = probabilities.topk(min(_MOST_CANDIDATES, vocab_size), dim=-1).values
    smallest = _smallest_inside(ordered, params, is_whole=ordered.shape[1] == vocab_size)
    if smallest is None:
        ordered = probabilities.sort(dim=-1, descending=True).values
        smallest = _smallest_inside(ordered, params, is_whole=True)
        assert smallest is not None, "the whole vocabulary always suffices"
    return probabilities < smallest


def _smallest_inside(ordered: Tensor, params: ParamColumns, is_whole: bool) -> Tensor | None:
    """The least probability inside the limits, float32 [R, 1]; None if the C candidates do not suffice for every row.

    ordered: float32 [R, C], the C largest probabilities, in descending order. is_whole: they are the whole vocabulary.
    """
    last = ordered.shape[1] - 1
    top_p, top_k, min_p = (params[name].unsqueeze(1) for name in ("top_p", "top_k", "min_p"))
    smallest = ordered[:, :1] * min_p
    kth = ordered.gather(1, (top_k.long() - 1).clamp(0, last))
    smallest = torch.where(top_k > 0, smallest.maximum(kth), smallest)
    by_top_p_alone = smallest == 0  # all tokens remain, and sum to 1: the least likely need not be read
    left = torch.where(ordered >= smallest, ordered, 0)
    sums = left.cumsum(dim=-1)
    targets = top_p * torch.where(by_top_p_alone, 1, sums[:, -1:])
    if not is_whole:
        reaches_on = torch.where(by_top_p_alone, sums[:, -1:] < targets, ordered[:, -1:] >= smallest)
        if bool((reaches_on | (top_k > last)).any()):
            return None
    num_inside = ((sums - left < targets) & (left > 0)).sum(dim=-1, keepdim=True)
    crossing = ordered.gather(1, (num_inside - 1).clamp(min=0))
    return torch.where(top_p < 1, smallest.maximum(crossing), smallest)


def _chunks(num_rows: int) -> list[slice]:
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)]
