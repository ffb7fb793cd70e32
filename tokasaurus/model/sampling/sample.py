"""Sample tokens from logits, and compute their log-probabilities."""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels, LogitRulesStruct
from tokasaurus.model.sampling.noise import gumbel_noise
from tokasaurus.model.sampling.rules import (
    ChosenRows,
    DeviceMasks,
    RuledRows,
    change_logits,
    columns_of,
    limits_in_use,
    masked_rows,
    num_mask_words,
    outside_limits,
    ruled_rows_at_once,
)
from tokasaurus.model.triton_choice import uses_triton

# R rows that sample, V vocabulary

_ROWS_AT_ONCE = 64
"""Rows per chunk. Bounds the memory of intermediate results: hashing noise uses 64-bit integers, 8 bytes per logit."""


@dataclass(frozen=True, slots=True)
class TopRows:
    """The A of the R rows that want top-k logprobs."""

    rows: ChosenRows
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

    limited: ChosenRows | None
    """The rows with limits, from limited_rows; None if there are none."""

    rules: RuledRows | None = None
    """None if no row's logits are changed."""

    top: TopRows | None = None
    """None if no row wants top-k logprobs; otherwise any_logprobs is true."""

    masks: DeviceMasks | None = None
    """None if every row may draw any token."""

    def cut(self, first_row: int, num_rows: int) -> "SamplingRows":
        """The rows from `first_row` on, in memory of their own."""
        own, place = slice(first_row, first_row + num_rows), (first_row, num_rows)
        limited = None if self.limited is None else self.limited.cut(*place)
        top = None if self.top is None else replace(self.top, rows=self.top.rows.cut(*place))
        return replace(
            self,
            params=self.params[own],
            device_params=self.device_params[own].clone(),
            noise_keys=self.noise_keys[own].clone(),
            limited=None if limited is None or not len(limited.on_host) else limited,
            rules=None if self.rules is None else self.rules.cut(*place),
            top=None if top is None or not len(top.rows.on_host) else top,
            masks=None if self.masks is None else self.masks.cut(*place),
        )


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
    assert masks is None or masks.bits.shape[1] == num_mask_words(logits.shape[1]), "one bit per token"
    if kernels is not None and logits.device.type == "cpu" and logits.dtype in ACTIVATION_DTYPES:
        return _sample_by_kernels(logits, rows, kernels)
    if uses_triton(logits.device, "sampling"):
        return sample_by_triton(logits, rows)
    return sample_by_torch(logits, rows)


def sample_by_torch(logits: Tensor, rows: SamplingRows) -> Sampled:
    """`sample` with stock torch operations."""
    masks = rows.masks
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
            *(ruled.rows.index_of_row(len(logits)), ruled.tokens, ruled.block_tables, ruled.lengths),
            *(ruled.num_request_tokens, ruled.device_bias_starts, ruled.bias_ids, ruled.bias_values),
        )
        assert all(tensor.is_contiguous() for tensor in tensors), "kernels need contiguous tensors"
        rules = LogitRulesStruct(
            *(tensor.data_ptr() for tensor in tensors), ruled.page_size, ruled.block_tables.shape[1]
        )
    masks = None
    if rows.masks is not None:
        masks = rows.masks.rows.index_of_row(len(logits)), rows.masks.bits.contiguous()
    top = None
    if rows.top is not None:
        shape = len(rows.top.rows.on_host), rows.top.count
        index_of_row = rows.top.rows.index_of_row(len(logits))
        top = index_of_row, torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
    kernels.sample(logits, rows.device_params, rows.noise_keys, rules, masks, tokens, logprobs, top)
    return Sampled(tokens, logprobs, *(() if top is None else top[1:]))


def sample_by_triton(logits: Tensor, rows: SamplingRows) -> Sampled:
    """As `sample`, in one kernel, or several if the logits of more rows are changed than fit in bounded memory."""
    from tokasaurus.model.sampling import triton_rows, triton_sample

    num_rows, vocab_size = logits.shape
    masks = None
    if rows.masks is not None:
        masks = rows.masks.rows.index_of_row(num_rows), rows.masks.bits
    bounds, ruled = [0, num_rows], None
    if rows.rules is not None:
        ruled = rows.rules, rows.rules.rows.index_of_row(num_rows)
        at_once = ruled_rows_at_once(vocab_size)
        bounds = [0, *rows.rules.rows.on_host[at_once::at_once].tolist(), num_rows]
    parts = []
    for chunk in itertools.starmap(slice, itertools.pairwise(bounds)):
        changed = None
        if ruled is not None:
            rules, index_of_row = ruled
            own = rules.rows.within(chunk.start, chunk.stop - chunk.start)
            changed = index_of_row - own.start, triton_rows.changed_rows(logits, rules, own, rows.device_params)
        parts.append(triton_sample.draw(logits, chunk, rows.device_params, rows.noise_keys, changed, masks))
    tokens, chosen, normalizers = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not rows.any_logprobs:
        return Sampled(tokens)
    if rows.top is None:
        return Sampled(tokens, chosen - normalizers)
    of_top = rows.top.rows.on_device
    top_ids, top_logits = triton_sample.largest_logits(logits, of_top, rows.top.count)
    return Sampled(tokens, chosen - normalizers, top_ids, top_logits - normalizers[of_top].unsqueeze(1))


def _draw(logits: Tensor, rows: SamplingRows, any_sampled: bool) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for chunk in chunks_of(logits.shape[0]):
        params = columns_of(rows.device_params[chunk])
        temperatures = params["temperature"].unsqueeze(1)
        adjusted = logits[chunk].to(torch.float32, copy=True)
        if rows.rules is not None:
            change_logits(adjusted, rows.rules, params, chunk.start)
        masked = None if rows.masks is None else masked_rows(rows.masks, adjusted, chunk.start)
        if masked is not None:
            masked.forbid(adjusted)
        adjusted /= torch.where(temperatures > 0, temperatures, 1)
        _mask_outside(adjusted, rows, chunk.start)
        if any_sampled:
            adjusted += gumbel_noise(rows.noise_keys[chunk], logits.shape[1]).masked_fill_(temperatures == 0, 0)
        tokens[chunk] = adjusted.argmax(dim=-1)
        if masked is not None:
            masked.correct(tokens[chunk])
    return tokens


def _mask_outside(adjusted: Tensor, rows: SamplingRows, first_row: int) -> None:
    """Set adjusted logits [r, V] to -inf for tokens that limits exclude: these are the rows from `first_row` on.

    Precondition: they are already divided by the temperatures.
    """
    if rows.limited is None:
        return
    own = rows.limited.within(first_row, len(adjusted))
    if own.start == own.stop:
        return
    indices = rows.limited.on_device[own]
    some = adjusted[indices - first_row]
    in_use = limits_in_use(rows.params[rows.limited.on_host[own]])
    outside = outside_limits(some, columns_of(rows.device_params[indices]), in_use)
    adjusted[indices - first_row] = some.masked_fill_(outside, -torch.inf)


def _normalizers(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row, float32 [R]: logits minus this are log-probabilities."""
    return torch.cat([logits[chunk].float().logsumexp(dim=-1) for chunk in chunks_of(logits.shape[0])])


def _top_logprobs(logits: Tensor, top: TopRows, normalizers: Tensor) -> tuple[Tensor, Tensor]:
    """top_ids and top_logprobs, as in Sampled."""
    rows = top.rows.on_device
    chunks = [logits[rows[chunk]].float().topk(top.count, dim=-1) for chunk in chunks_of(len(rows))]
    values = torch.cat([top_of_chunk.values for top_of_chunk in chunks])
    ids = torch.cat([top_of_chunk.indices for top_of_chunk in chunks]).int()
    return ids, values - normalizers[rows].unsqueeze(1)


def chunks_of(num_rows: int) -> list[slice]:
    """Rows that plain torch samples together."""
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)]
