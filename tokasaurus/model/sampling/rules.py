"""The rules of sampling: which there are and in which order they apply (`RULES`), and their plain torch.

Each rule applies to some of the rows that sample: their indices are on the host, which plans with them, and on the
device. Parameters of rows are one tensor on the device, read by the names of SamplingParams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import LogitRules, TokenMasks
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import LIMITS, PENALTIES, SamplingParams
from tokasaurus.model.staging.staging import Staging

# R rows that sample, r of them at once, A of them to which a rule applies, F fields of SAMPLING_DTYPE, V vocabulary, C
# of its tokens

_DTYPES = {name: {"f": torch.float32, "i": torch.int32}[SAMPLING_DTYPE[name].kind] for name in SamplingParams._fields}

ParamColumns: TypeAlias = dict[str, Tensor]
"""Each field of SAMPLING_DTYPE, by name: float32 or int32 [R]."""


def as_words(params: NDArray[np.void]) -> NDArray[np.int32]:
    """SAMPLING_DTYPE [R] -> int32 [R, F], which shares its memory."""
    return params.view(np.int32).reshape(len(params), len(_DTYPES))


def params_to_device(params: NDArray[np.void], device: torch.device) -> Tensor:
    """SAMPLING_DTYPE [R] -> int32 [R, F]: the same bytes in one copy, or the same memory if `device` is the CPU."""
    return torch.from_numpy(as_words(params)).to(device)


def columns_of(device_params: Tensor) -> ParamColumns:
    """device_params: int32 [R, F], from params_to_device. The columns share its memory."""
    columns = zip(_DTYPES.items(), device_params.unbind(1), strict=True)
    return {name: words.view(dtype) for (name, dtype), words in columns}


def have_any(params: NDArray[np.void], names: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each row has another value than the default in one of these fields. SAMPLING_DTYPE [R] -> bool [R]."""
    differs = [params[name] != SamplingParams._field_defaults[name] for name in names]
    return np.asarray(np.logical_or.reduce(differs))


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """A of the R rows that sample."""

    on_host: NDArray[np.int64]
    """int64 [A], indices into R, ascending."""

    on_device: Tensor
    """int64 [A], the same."""

    def within(self, first_row: int, num_rows: int) -> slice:
        """Slice of the A that are among the rows from `first_row` on: found without waiting for the device."""
        return slice(*np.searchsorted(self.on_host, (first_row, first_row + num_rows)).tolist())

    def cut(self, first_row: int, num_rows: int) -> "ChosenRows":
        """The chosen rows among `num_rows` rows from `first_row` on, as indices into these."""
        own = self.within(first_row, num_rows)
        return ChosenRows(self.on_host[own] - first_row, self.on_device[own] - first_row)

    def index_of_row(self, num_rows: int) -> Tensor:
        """Each row's index among the chosen ones, or -1: int32 [R = num_rows], on the device."""
        rows = self.on_device
        indices = torch.full((num_rows,), -1, dtype=torch.int32, device=rows.device)
        return indices.index_copy_(0, rows, torch.arange(len(rows), dtype=torch.int32, device=rows.device))


def choose_rows(rows: NDArray[np.integer[Any]], staging: Staging) -> ChosenRows:
    """rows: [A], ascending. They are on the device once `staging` has sent them."""
    indices = rows.astype(np.int64)
    return ChosenRows(indices, staging.to_device(indices))


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The A of the R rows that sample whose logits are changed before sampling. See LogitRules."""

    rows: ChosenRows

    tokens: Tensor
    """int32 [kv indices], the token at each kv index; see SlotRules.tokens."""

    page_size: int
    """Tokens per block."""

    block_tables: Tensor
    """int32 [A, blocks]."""

    lengths: Tensor
    """int32 [A], number of context tokens to which a row's penalties apply; 0 for a row without penalties."""

    num_request_tokens: Tensor
    """int32 [A]."""

    bias_starts: NDArray[np.int64]
    """int64 [A + 1], where each row's biases start in bias_ids and bias_values; on the host."""

    device_bias_starts: Tensor
    """int64 [A + 1], the same."""

    bias_ids: Tensor
    """int32 [biases], token ids."""

    bias_values: Tensor
    """float32 [biases]."""

    def cut(self, first_row: int, num_rows: int) -> "RuledRows | None":
        """The rules of num_rows rows from `first_row` on, with all rows' biases; None if no such row has rules."""
        own = self.rows.within(first_row, num_rows)
        if own.start == own.stop:
            return None
        ends = slice(own.start, own.stop + 1)
        # In memory of their own: Triton compiles a kernel again for an address that is aligned otherwise.
        return replace(
            self,
            rows=self.rows.cut(first_row, num_rows),
            block_tables=self.block_tables[own].clone(),
            lengths=self.lengths[own].clone(),
            num_request_tokens=self.num_request_tokens[own].clone(),
            bias_starts=self.bias_starts[ends],
            device_bias_starts=self.device_bias_starts[ends].clone(),
        )


class SlotRules:
    """The rules of each slot, and the token at each kv index, from which penalties find the tokens of a context.

    This covers tokens of a prefix that other sequences have computed, and tokens generated before a preemption.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._has_penalties = np.zeros(num_slots, np.bool_)
        self._num_request_tokens = np.zeros(num_slots, np.int32)
        self._last_bias_ends = np.zeros(num_slots, np.int32)
        self._biases: dict[int, tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]] = {}
        self.allocate(0)

    def allocate(self, num_kv_indices: int) -> None:
        """Allocate `tokens` for a KV cache of num_kv_indices tokens, including the padding block."""
        # int32 [num_kv_indices], the token at each kv index, on the device
        self.tokens = torch.zeros(num_kv_indices, dtype=torch.int32, device=self._device)

    def close(self, slots: NDArray[np.int32]) -> None:
        if self._biases:
            for slot in slots.tolist():
                self._biases.pop(slot, None)

    def open(self, slots: NDArray[np.int32], rules: LogitRules | None, sampling: NDArray[np.void]) -> None:
        """rules: for some of the slots; the others have none. sampling: SAMPLING_DTYPE [slots], of all slots."""
        self.close(slots)  # the warm-up has closed none
        self._has_penalties[slots] = False
        self._last_bias_ends[slots] = 0
        if rules is None:
            return
        slots = rules.slots
        self._num_request_tokens[slots] = rules.num_request_tokens
        params = sampling.take(slots)
        self._has_penalties[slots] = have_any(params, PENALTIES)
        ends = np.cumsum(rules.bias_counts)
        for slot, count, end in zip(slots.tolist(), rules.bias_counts.tolist(), ends.tolist(), strict=True):
            own = slice(end - count, end)
            if count:
                self._biases[slot] = rules.bias_ids[own], rules.bias_values[own], rules.bias_ends[own]
                self._last_bias_ends[slot] = rules.bias_ends[own].max()

    def have_any(self, slots: NDArray[np.int32]) -> bool:
        """Whether one of the slots has rules, or biases that may have ended."""
        return bool((self._has_penalties[slots] | (self._last_bias_ends[slots] > 0)).any())

    def select(
        self,
        slots: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        tables_of: Callable[[NDArray[np.int32], int], Tensor],
        page_size: int,
        staging: Staging,
    ) -> RuledRows | None:
        """The rows whose rules apply in this step; None if there are none.

        slots: int32 [R], of the rows that sample. num_tokens: int32 [R], tokens that their sequences have so far.
        tables_of: maps slots, int32 [A], and a number of blocks to the first blocks of their tables, int32 [A, blocks]
        on the device.
        """
        rows = np.flatnonzero(self._has_penalties[slots] | (num_tokens < self._last_bias_ends[slots]))
        if not len(rows):
            return None
        slots, num_tokens = slots[rows], num_tokens[rows]
        lengths = np.where(self._has_penalties[slots], num_tokens, 0).astype(np.int32)
        biases = [
            (ids[num < ends], values[num < ends])
            for num, (ids, values, ends) in zip(
                num_tokens.tolist(), (self._biases.get(slot, _NO_BIAS) for slot in slots.tolist()), strict=True
            )
        ]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(ids) for ids, _ in biases], out=starts[1:])
        return RuledRows(
            rows=choose_rows(rows, staging),
            tokens=self.tokens,
            page_size=page_size,
            block_tables=tables_of(slots, -(-int(lengths.max()) // page_size)),
            lengths=staging.to_device(lengths),
            num_request_tokens=staging.to_device(self._num_request_tokens[slots]),
            bias_starts=starts,
            device_bias_starts=staging.to_device(starts),
            bias_ids=staging.to_device(np.concatenate([ids for ids, _ in biases])),
            bias_values=staging.to_device(np.concatenate([values for _, values in biases])),
        )


_NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)


def change_logits(logits: Tensor, rules: RuledRows, params: ParamColumns, first_row: int) -> None:
    """Apply the rules to logits, float32 [r, V], in place: these are the rows of a step from `first_row` on.

    params: [r], of the same rows.
    """
    own = rules.rows.within(first_row, len(logits))
    if own.start == own.stop:
        return
    device = logits.device
    rows = rules.rows.on_device[own] - first_row
    changed = logits[rows]
    first_bias, last_bias = int(rules.bias_starts[own.start]), int(rules.bias_starts[own.stop])
    some = slice(first_bias, last_bias)
    counts = rules.device_bias_starts[own.start : own.stop + 1].diff()
    biased = torch.repeat_interleave(counts, output_size=last_bias - first_bias)
    changed.index_put_((biased, rules.bias_ids[some].long()), rules.bias_values[some], accumulate=True)

    kv_indices = rules.block_tables[own].long().unsqueeze(2) * rules.page_size + torch.arange(
        rules.page_size, device=device
    )
    tokens = rules.tokens[kv_indices.flatten(1)].long()
    positions = torch.arange(tokens.shape[1], device=device)
    is_there = positions < rules.lengths[own].unsqueeze(1)
    is_generated = is_there & (positions >= rules.num_request_tokens[own].unsqueeze(1))
    counts = torch.zeros_like(changed).scatter_add_(1, tokens, is_generated.float())
    is_seen = torch.zeros_like(changed).scatter_add_(1, tokens, is_there.float()) > 0
    presence, frequency, repetition = (
        params[name][rows].unsqueeze(1) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    )
    changed = torch.where(is_seen, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
    logits[rows] = changed - frequency * counts - presence * (counts > 0)


_BITS = 32
"""Tokens per word of TokenMasks.bits."""


class DeviceMasks(NamedTuple):
    """A TokenMasks on the device."""

    rows: ChosenRows
    """The A rows with a mask."""

    bits: Tensor
    """int32 [A, words], the bits of TokenMasks."""

    def cut(self, first_row: int, num_rows: int) -> "DeviceMasks | None":
        """A copy of the masks of num_rows rows from `first_row` on; None if no such row has a mask."""
        own = self.rows.within(first_row, num_rows)
        if own.start == own.stop:
            return None
        return DeviceMasks(self.rows.cut(first_row, num_rows), self.bits[own].clone())


def stage_masks(masks: TokenMasks, staging: Staging) -> DeviceMasks:
    """The masks are on the device once `staging` has sent them."""
    assert len(masks.bits) == len(masks.rows), "one mask per row"
    return DeviceMasks(choose_rows(masks.rows, staging), staging.to_device(masks.bits.view(np.int32)))


class MaskedRows(NamedTuple):
    """The A rows of a chunk of logits that have a mask. At least one token is allowed in each."""

    rows: Tensor
    """int64 [A], indices into the chunk's rows."""

    is_allowed: Tensor
    """bool [A, V]."""

    def forbid(self, logits: Tensor) -> None:
        """Set logits [rows, V] to -inf for the tokens that are not allowed."""
        logits[self.rows] = logits[self.rows].masked_fill_(~self.is_allowed, -torch.inf)

    def correct(self, tokens: Tensor) -> None:
        """Replace each drawn token that is not allowed by the first allowed one. tokens: int64 [rows].

        This happens if a bias of -inf forbids every allowed token: then all logits of the row are -inf.
        """
        drawn = tokens[self.rows].unsqueeze(1)
        first = self.is_allowed.int().argmax(dim=1, keepdim=True)
        tokens[self.rows] = torch.where(self.is_allowed.gather(1, drawn), drawn, first).squeeze(1)


def masked_rows(masks: DeviceMasks, logits: Tensor, first_row: int) -> MaskedRows | None:
    """The rows with a mask among logits [rows, V], which are the rows of a step from `first_row` on; None if there are
    none."""
    num_rows, num_logits = logits.shape
    own = masks.rows.within(first_row, num_rows)
    if own.start == own.stop:
        return None
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((masks.bits[own].unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :num_logits]
    return MaskedRows(masks.rows.on_device[own] - first_row, is_allowed)


_MAX_CANDIDATES = 1024
"""Most likely tokens to which a CPU applies limits first; it sorts the vocabulary only if these do not suffice."""


class LimitsInUse(NamedTuple):
    """Which limits some rows have, read from their parameters on the host."""

    any_top_p: bool
    largest_top_k: int
    """0 if no row has a top_k."""


def limits_in_use(params: NDArray[np.void]) -> LimitsInUse:
    """params: SAMPLING_DTYPE [R], R > 0."""
    return LimitsInUse(bool((params["top_p"] < 1).any()), int(params["top_k"].max()))


def has_limits(params: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each row has limits; greedy rows have none. params: SAMPLING_DTYPE [R] -> bool [R]."""
    return np.asarray(have_any(params, LIMITS) & (params["temperature"] > 0))


def limited_rows(is_limited: NDArray[np.bool_], staging: Staging) -> ChosenRows | None:
    """The rows that have limits; None if there are none. is_limited: bool [R], from has_limits."""
    rows = np.flatnonzero(is_limited)
    return choose_rows(rows, staging) if len(rows) else None


def outside_limits(adjusted: Tensor, params: ParamColumns, in_use: LimitsInUse) -> Tensor:
    """Whether the limits exclude each token: min_p, then top_k, then top_p, each applied to the tokens that remain.

    The order is vLLM's. The token that crosses top_p is kept, and so are all tokens as likely as the last one kept.
    adjusted: logits divided by the temperatures, float32 [R, V]; params: [R] -> bool [R, V].
    Sources: arXiv 1904.09751 (top_p), 2407.01082 (min_p).
    """
    probabilities = adjusted.softmax(dim=-1)
    vocab_size = adjusted.shape[1]
    if not in_use.any_top_p:
        ordered = probabilities.topk(min(max(in_use.largest_top_k, 1), vocab_size), dim=-1).values
        return probabilities < _smallest_before_top_p(ordered, params)
    smallest = None
    if adjusted.device.type == "cpu":  # Elsewhere, the host would wait to see whether some candidates suffice.
        ordered = probabilities.topk(min(_MAX_CANDIDATES, vocab_size), dim=-1).values
        if ordered.shape[1] == vocab_size or _suffices(ordered, params):
            smallest = _smallest_inside(ordered, params)
    if smallest is None:
        smallest = _smallest_inside(probabilities.sort(dim=-1, descending=True).values, params)
    return probabilities < smallest


def _smallest_before_top_p(ordered: Tensor, params: ParamColumns) -> Tensor:
    """The least probability inside min_p and top_k, float32 [R, 1].

    ordered: float32 [R, C], the C largest probabilities, in descending order: all, or as many as the largest top_k.
    """
    top_k, min_p = params["top_k"].unsqueeze(1), params["min_p"].unsqueeze(1)
    smallest = ordered[:, :1] * min_p
    kth = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
    return torch.where(top_k > 0, smallest.maximum(kth), smallest)


def _suffices(ordered: Tensor, params: ParamColumns) -> bool:
    """Whether the C < V most likely tokens of each row include all tokens inside its limits. Waits for the answer.

    ordered: float32 [R, C], as in _smallest_inside.
    """
    smallest = _smallest_before_top_p(ordered, params)
    sums = torch.where(ordered >= smallest, ordered, 0).cumsum(dim=-1)[:, -1:]
    top_p = params["top_p"].unsqueeze(1)
    reaches_on = torch.where(smallest == 0, sums < top_p, ordered[:, -1:] >= smallest)
    return not bool((reaches_on | (params["top_k"].unsqueeze(1) >= ordered.shape[1])).any())


def _smallest_inside(ordered: Tensor, params: ParamColumns) -> Tensor:
    """The least probability inside all limits, float32 [R, 1].

    ordered: float32 [R, C], the C largest probabilities, in descending order: all, or as many as suffice.
    """
    top_p = params["top_p"].unsqueeze(1)
    smallest = _smallest_before_top_p(ordered, params)
    left = torch.where(ordered >= smallest, ordered, 0)
    sums = left.cumsum(dim=-1)
    # If all tokens remain before top_p, they sum to 1: the least likely ones need not be read.
    targets = top_p * torch.where(smallest == 0, 1, sums[:, -1:])
    num_inside = ((sums - left < targets) & (left > 0)).sum(dim=-1, keepdim=True)
    crossing = ordered.gather(1, (num_inside - 1).clamp(min=0))
    return torch.where(top_p < 1, smallest.maximum(crossing), smallest)


class RowChunk(NamedTuple):
    """Rows that are sampled together, r of the R, and what their rules need to know."""

    first_row: int

    host_params: NDArray[np.void]
    """SAMPLING_DTYPE [R], of all rows."""

    device_params: Tensor
    """int32 [r, F], of these rows."""

    ruled: RuledRows | None
    masked: MaskedRows | None
    limited: ChosenRows | None
    """Rows that have biases or penalties, a mask, limits; None: no row has."""

    kept: Tensor | None
    """int64 [r], tokens that limits do not exclude, and none that is as likely; None: no such tokens."""


def _bias_and_penalize(logits: Tensor, chunk: RowChunk) -> None:
    if chunk.ruled is not None:
        change_logits(logits, chunk.ruled, columns_of(chunk.device_params), chunk.first_row)


def _mask(logits: Tensor, chunk: RowChunk) -> None:
    if chunk.masked is not None:
        chunk.masked.forbid(logits)


def _divide(logits: Tensor, chunk: RowChunk) -> None:
    temperatures = columns_of(chunk.device_params)["temperature"].unsqueeze(1)
    logits /= torch.where(temperatures > 0, temperatures, 1)


def _limit(logits: Tensor, chunk: RowChunk) -> None:
    if chunk.limited is None:
        return
    own = chunk.limited.within(chunk.first_row, len(logits))
    if own.start == own.stop:
        return
    rows = chunk.limited.on_device[own] - chunk.first_row
    some = logits[rows]
    in_use = limits_in_use(chunk.host_params[chunk.limited.on_host[own]])
    outside = outside_limits(some, columns_of(chunk.device_params[rows]), in_use)
    if chunk.kept is not None:
        outside &= some < some.gather(1, chunk.kept[rows].unsqueeze(1))
    logits[rows] = some.masked_fill_(outside, -torch.inf)


class Rule(NamedTuple):
    """A step from a row of logits to the distribution that its token is drawn from."""

    fields: tuple[str, ...]
    """The fields of SamplingParams that it reads. Without any: messages/forward.py has its input."""

    apply: Callable[[Tensor, RowChunk], None]
    """Its plain torch: changes logits [r, V], float32, in place."""


RULES = (
    # Logit rules: biases are added, and then penalties are applied.
    Rule(PENALTIES, _bias_and_penalize),
    # Masks: tokens that the row's mask does not allow get -inf.
    Rule((), _mask),
    # Temperature: the row is divided by it, unless it is 0.
    Rule(("temperature",), _divide),
    # Limits: tokens outside min_p, then top_k, then top_p get -inf, unless the row is greedy.
    Rule(LIMITS, _limit),
)
"""The rules of sampling, in the order in which they apply. After them, noise is added to a row whose temperature is not
0, and the token with the largest result is drawn, the first of equal ones: see noise.py.

Three executors apply them, and draw the same tokens: plain torch, which runs down this list; csrc/sampling, row by row;
Triton, whose triton_rows has the first three and triton_limits the last."""
