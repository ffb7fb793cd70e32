"""Sample tokens from logits, and compute their log-probabilities: plain torch, Triton or C++ apply the rules of
rules.RULES and draw, on one rank or several."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.buffer_sizes import as_sampled_rows_at_once, num_mask_words, ruled_rows_at_once
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels, LogitRulesStruct
from tokasaurus.model.parallel.collectives import gather_rows, whole_rows
from tokasaurus.model.sampling.finish import Finished, finish_by_torch
from tokasaurus.model.sampling.noise import gumbel_noise, keys_of_shard
from tokasaurus.model.sampling.rules import (
    RULES,
    ChosenRows,
    DeviceMasks,
    MaskedRows,
    RowChunk,
    RuledRows,
    columns_of,
    masked_rows,
)
from tokasaurus.model.sampling.shards import ALL_TOKENS, VocabularyShard, best_of_ranks, largest_of_ranks
from tokasaurus.model.triton_choice import uses_triton

# R rows that sample, r of them at once, V vocabulary, v token ids of this rank: V if it is the only one, A rows with
# top-k logprobs, K of their tokens

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

    as_sampled: ChosenRows | None = None
    """The rows whose logprobs are of the distribution that their tokens are drawn from, instead of the model's own;
    None if there are none, otherwise any_logprobs is true."""

    def cut(self, first_row: int, num_rows: int) -> "SamplingRows":
        """The rows from `first_row` on, in memory of their own."""
        own, place = slice(first_row, first_row + num_rows), (first_row, num_rows)
        limited = None if self.limited is None else self.limited.cut(*place)
        top = None if self.top is None else replace(self.top, rows=self.top.rows.cut(*place))
        as_sampled = None if self.as_sampled is None else self.as_sampled.cut(*place)
        return replace(
            self,
            params=self.params[own],
            device_params=self.device_params[own].clone(),
            noise_keys=self.noise_keys[own].clone(),
            limited=None if limited is None or not len(limited.on_host) else limited,
            rules=None if self.rules is None else self.rules.cut(*place),
            top=None if top is None or not len(top.rows.on_host) else top,
            masks=None if self.masks is None else self.masks.cut(*place),
            as_sampled=None if as_sampled is None or not len(as_sampled.on_host) else as_sampled,
        )


class Sampled(NamedTuple):
    """Sampled tokens and log-probabilities.

    Log-probabilities are of the model's own distribution, before rules, masks, temperature and limits, or in rows of
    `SamplingRows.as_sampled` of the distribution after all of these. A token has the same float in logprobs and
    top_logprobs. The choice among equally likely tokens in the top K is unspecified. Where fewer than K tokens are
    possible, the others' log-probabilities are -inf, and their ids are those of any tokens.
    """

    tokens: Tensor
    """int64 [R]; -1 for rows with a logit that is NaN or positive infinity. Their other results have no meaning."""

    logprobs: Tensor | None = None
    """float32 [R], of the tokens; None if no row wants logprobs."""

    top_ids: Tensor | None = None
    """int32 [A, K], the K = `SamplingRows.top.count` most likely tokens, in descending order; None without `top`."""

    top_logprobs: Tensor | None = None
    """float32 [A, K], of top_ids; None without `top`."""


class Drawn(NamedTuple):
    """Tokens drawn from logits [R, v]."""

    tokens: Tensor
    """int64 [R], indices into v; -1 for rows with a logit that is NaN or positive infinity."""

    logits: Tensor | None = None
    """float32 [R], of the tokens, unchanged; may be None, as normalizers, if no row wants logprobs."""

    normalizers: Tensor | None = None
    """float32 [R], the log-sum-exp of each row: unchanged logits minus this are log-probabilities."""


class Executor(NamedTuple):
    """Plain torch, Triton or C++, which do the same."""

    draw: Callable[[Tensor, SamplingRows], Drawn]
    """Applies the rules to logits [R, v] and draws."""

    largest: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """Logits [R, v], indices of A rows, and n <= v -> the n largest logits of these rows in descending order: their
    places in v, integers [A, n], and the logits, float32 [A, n]."""

    sample_whole: Callable[[Tensor, SamplingRows], Sampled] | None = None
    """All of `sample` in one call, from logits [R, V]; None: `draw` and `largest` are its parts."""


def sample(logits: Tensor, rows: SamplingRows, kernels: Kernels | None, shard: VocabularyShard = ALL_TOKENS) -> Sampled:
    """Sample a token from each row of logits [R, v]. kernels: do the same on the CPU, faster.

    rules.RULES are applied to a row one after another. Then noise is added, unless the temperature is 0, and the token
    with the largest result is drawn, the first of equal ones. Log-probabilities are those of the logits before all
    rules, or in some rows after all of them (rows.as_sampled).

    Each tensor-parallel rank has the logits of its `shard` of the token ids. All ranks must call this with the same
    rows, and get the same results. All rules but the temperature need whole rows, and so do log-probabilities after the
    rules: if any row takes one of them, the ranks divide the rows, and each samples its own as one process does.
    Otherwise, each finds the best token of its shard, and all compare these.
    """
    if logits.device.type != "cpu" or logits.dtype not in ACTIVATION_DTYPES:
        kernels = None
    executor = _executor(logits, kernels)
    if shard.is_whole or not len(logits):
        return _sample_whole(executor, logits, rows)
    if any(part is not None for part in (rows.rules, rows.masks, rows.limited, rows.as_sampled)):
        return _sample_own_rows(executor, logits, rows, shard)
    return _sample_by(executor, logits, rows, shard)


def sample_by_torch(logits: Tensor, rows: SamplingRows) -> Sampled:
    """`sample` with stock torch operations."""
    return _sample_by(_TORCH, logits, rows)


def sample_by_triton(logits: Tensor, rows: SamplingRows) -> Sampled:
    """`sample` with Triton kernels: one draws, or several if the logits of more rows are changed than fit in bounded
    memory."""
    return _sample_by(_TRITON, logits, rows)


def draw_and_finish(
    logits: Tensor, device_params: Tensor, noise_keys: Tensor, hidden: Tensor, slots: Tensor, last_tokens: Tensor
) -> Finished:
    """`sample_by_triton` with logprobs, and `finish`, of rows without rules and masks, in three kernels."""
    from tokasaurus.model.sampling import triton_sample

    return triton_sample.draw_and_finish(logits, device_params, noise_keys, hidden, slots, last_tokens)


def finish(tokens: Tensor, logprobs: Tensor | None, hidden: Tensor, slots: Tensor, last_tokens: Tensor) -> Finished:
    """`finish_by_torch`, in one launch where Triton is installed."""
    if not uses_triton(tokens.device, "sampling"):
        return finish_by_torch(tokens, logprobs, hidden, slots, last_tokens)
    from tokasaurus.model.sampling import triton_sample

    return triton_sample.finish(tokens, logprobs, hidden, slots, last_tokens)


def _sample_whole(executor: Executor, logits: Tensor, rows: SamplingRows) -> Sampled:
    masks = rows.masks
    assert masks is None or masks.bits.shape[1] == num_mask_words(logits.shape[1]), "one bit per token"
    return (executor.sample_whole or partial(_sample_by, executor))(logits, rows)


def _sample_by(executor: Executor, logits: Tensor, rows: SamplingRows, shard: VocabularyShard = ALL_TOKENS) -> Sampled:
    """`sample`, where the rows of several ranks take no rule but the temperature, and none is in rows.as_sampled."""
    if shard.is_whole:
        drawn = executor.draw(logits, rows)
    else:
        own = executor.draw(logits, replace(rows, noise_keys=keys_of_shard(rows.noise_keys, shard.first_id)))
        chosen = _logits_of(own.tokens.clamp(min=0), logits)
        normalizers = own.normalizers if rows.any_logprobs else None
        temperatures = columns_of(rows.device_params)["temperature"]
        drawn = Drawn(*best_of_ranks(own.tokens, chosen, normalizers, temperatures, rows.noise_keys, shard))
    if not rows.any_logprobs:
        return Sampled(drawn.tokens)
    assert drawn.logits is not None
    assert drawn.normalizers is not None
    sampled = Sampled(drawn.tokens, (drawn.logits - drawn.normalizers).float())
    if rows.top is not None:
        of_top, count = rows.top.rows.on_device, rows.top.count
        ids, values = executor.largest(logits, of_top, min(count, logits.shape[1]))
        if not shard.is_whole:
            ids, values = largest_of_ranks(ids, values, count, shard)
        top_logprobs = (values - drawn.normalizers[of_top].unsqueeze(1)).float()
        sampled = sampled._replace(top_ids=ids.int(), top_logprobs=top_logprobs)
    if rows.as_sampled is not None:
        _replace_logprobs(sampled, rows.as_sampled, logits, rows)
    return sampled


def _replace_logprobs(sampled: Sampled, as_sampled: ChosenRows, logits: Tensor, rows: SamplingRows) -> None:
    """Replace the logprobs of the `as_sampled` rows among logits [R, V] by those after all rules.

    Takes all rows between two of these along: what a chunk computes is then known on the host.
    """
    assert sampled.logprobs is not None
    is_as_sampled = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    is_as_sampled.index_fill_(0, as_sampled.on_device, True)
    for chunk in _chunks_around(as_sampled.on_host, as_sampled_rows_at_once(logits.shape[1])):
        own = is_as_sampled[chunk]
        tokens = sampled.tokens[chunk].clamp(min=0)
        values = _logprobs_as_sampled(logits[chunk], rows, chunk, tokens)
        of_tokens = sampled.logprobs[chunk]
        of_tokens.copy_(torch.where(own, _logits_of(tokens, values), of_tokens))
        if rows.top is None or sampled.top_ids is None or sampled.top_logprobs is None:
            continue
        place = rows.top.rows.within(chunk.start, len(own))
        if place.start < place.stop:
            of_top = rows.top.rows.on_device[place] - chunk.start
            best = values[of_top].topk(sampled.top_ids.shape[1], dim=-1)
            for after, before in ((best.indices, sampled.top_ids[place]), (best.values, sampled.top_logprobs[place])):
                before.copy_(torch.where(own[of_top].unsqueeze(1), after.to(before.dtype), before))


def _logprobs_as_sampled(logits: Tensor, rows: SamplingRows, chunk: slice, tokens: Tensor) -> Tensor:
    """Log-probabilities after all rules, float32 [r, V]; logits: [r, V], of the chunk.

    tokens: int64 [r], those drawn. They are possible, even if another executor's sums round so that they reach a limit
    one token later.
    """
    adjusted, masked = _adjusted(logits, rows, chunk, tokens)
    if masked is not None:  # where nothing is possible, `masked` has chosen the token
        own = tokens[masked.rows].unsqueeze(1)
        some = adjusted[masked.rows]
        is_certain = some.amax(dim=1, keepdim=True) == -torch.inf
        adjusted[masked.rows] = some.scatter_(1, own, torch.where(is_certain, 0, some.gather(1, own)))
    return adjusted.sub_(adjusted.logsumexp(dim=-1, keepdim=True))


def _sample_own_rows(executor: Executor, logits: Tensor, rows: SamplingRows, shard: VocabularyShard) -> Sampled:
    """`sample`, where each rank samples its share of the rows, and all exchange the results."""
    mesh = shard.mesh
    ends = [len(logits) * rank // mesh.tp_size for rank in range(mesh.tp_size + 1)]
    num_rows = [end - start for start, end in itertools.pairwise(ends)]  # of each rank
    whole = whole_rows(logits, num_rows, shard.widths, mesh)
    sampled = None
    if len(whole):
        sampled = _sample_whole(executor, whole, rows.cut(ends[mesh.tp_rank], len(whole)))
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


def _executor(logits: Tensor, kernels: Kernels | None) -> Executor:
    if kernels is not None:
        return _by_kernels(kernels)
    return _TRITON if uses_triton(logits.device, "sampling") else _TORCH


def _draw_by_torch(logits: Tensor, rows: SamplingRows) -> Drawn:
    any_sampled = bool((rows.params["temperature"] > 0).any())
    if any_sampled or rows.rules is not None or rows.masks is not None:
        drawn = torch.cat([_draw_chunk(logits[chunk], rows, chunk, any_sampled) for chunk in chunks_of(len(logits))])
    else:
        drawn = logits.argmax(dim=-1)
    tokens = torch.where(logits.amax(dim=-1) < torch.inf, drawn, -1)  # amax is NaN if a logit is
    return Drawn(tokens, _logits_of(drawn, logits), _normalizers(logits)) if rows.any_logprobs else Drawn(tokens)


def _draw_chunk(logits: Tensor, rows: SamplingRows, chunk: slice, any_sampled: bool) -> Tensor:
    """The tokens of some rows, int64 [r], from their logits [r, V].

    any_sampled: whether any of the R rows has a temperature above 0.
    """
    adjusted, masked = _adjusted(logits, rows, chunk)
    temperatures = columns_of(rows.device_params[chunk])["temperature"].unsqueeze(1)
    if any_sampled:
        adjusted += gumbel_noise(rows.noise_keys[chunk], logits.shape[1]).masked_fill_(temperatures == 0, 0)
    tokens = adjusted.argmax(dim=-1)
    if masked is not None:
        masked.correct(tokens)
    return tokens


def _adjusted(
    logits: Tensor, rows: SamplingRows, chunk: slice, kept: Tensor | None = None
) -> tuple[Tensor, MaskedRows | None]:
    """Logits [r, V] of the chunk after all rules, float32 [r, V]; and its rows with a mask, if any.

    kept: as in RowChunk.
    """
    adjusted = logits.to(torch.float32, copy=True)
    row_chunk = RowChunk(
        first_row=chunk.start,
        host_params=rows.params,
        device_params=rows.device_params[chunk],
        ruled=rows.rules,
        masked=None if rows.masks is None else masked_rows(rows.masks, adjusted, chunk.start),
        limited=rows.limited,
        kept=kept,
    )
    for rule in RULES:
        rule.apply(adjusted, row_chunk)
    return adjusted, row_chunk.masked


def _logits_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """float32 [R]."""
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float()


def _normalizers(logits: Tensor) -> Tensor:
    return torch.cat([logits[chunk].float().logsumexp(dim=-1) for chunk in chunks_of(len(logits))])


def _largest_by_torch(logits: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    chunks = [logits[rows[chunk]].float().topk(count, dim=-1) for chunk in chunks_of(len(rows))]
    return torch.cat([largest.indices for largest in chunks]), torch.cat([largest.values for largest in chunks])


def _draw_by_triton(logits: Tensor, rows: SamplingRows) -> Drawn:
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
    return Drawn(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _largest_by_triton(logits: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    from tokasaurus.model.sampling import triton_sample

    return triton_sample.largest_logits(logits, rows, count)


_TORCH = Executor(_draw_by_torch, _largest_by_torch)
_TRITON = Executor(_draw_by_triton, _largest_by_triton)


@cache
def _by_kernels(kernels: Kernels) -> Executor:
    """Executor of these kernels. It is cached, since a step with one row takes the kernels a few microseconds."""
    draw, sample_whole = partial(_draw_by_kernels, kernels=kernels), partial(_sample_by_kernels, kernels=kernels)
    return Executor(draw, _largest_by_torch, sample_whole)


def _draw_by_kernels(logits: Tensor, rows: SamplingRows, kernels: Kernels) -> Drawn:
    tokens = _sample_by_kernels(logits, replace(rows, any_logprobs=False, top=None, as_sampled=None), kernels).tokens
    return Drawn(tokens, normalizers=_normalizers(logits) if rows.any_logprobs else None)


def _sample_by_kernels(logits: Tensor, rows: SamplingRows, kernels: Kernels) -> Sampled:
    """All of `sample` in one call."""
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
    is_as_sampled = None
    if rows.as_sampled is not None:
        is_as_sampled = torch.zeros(len(logits), dtype=torch.bool).index_fill_(0, rows.as_sampled.on_device, True)
    top = None
    if rows.top is not None:
        shape = len(rows.top.rows.on_host), rows.top.count
        index_of_row = rows.top.rows.index_of_row(len(logits))
        top = index_of_row, torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float32)
    kernels.sample(logits, rows.device_params, rows.noise_keys, rules, masks, is_as_sampled, tokens, logprobs, top)
    return Sampled(tokens, logprobs, *(() if top is None else top[1:]))


def chunks_of(num_rows: int) -> list[slice]:
    """Rows that plain torch samples together."""
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)]


def _chunks_around(chosen: NDArray[np.int64], max_rows: int) -> list[slice]:
    """Ranges of at most `max_rows` rows that together have all chosen ones; chosen: ascending."""
    chunks, first = [], 0
    while first < len(chosen):
        start = int(chosen[first])
        last = int(np.searchsorted(chosen, start + max_rows))
        chunks.append(slice(start, int(chosen[last - 1]) + 1))
        first = last
    return chunks
