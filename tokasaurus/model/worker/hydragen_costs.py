"""Measure what prefix groups cost on this device: their attention compared with its rows alone, and what a decode step
with groups takes more than one without, whatever its attention saves.

With CUDA graphs, a step without groups replays one graph. A step with groups replays another one, or if there is none
for it, a piece for each layer: the host launches attention between them, one after another, where the device may have
to wait for the host.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus import __version__
from tokasaurus.messages.forward import ForwardInput, PrefixGroups
from tokasaurus.messages.status import DEFAULT_HYDRAGEN, HydragenCosts
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.block_lists import as_in_steps
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.worker.device import make_stopwatch
from tokasaurus.model.worker.kept_results import keep_results, path_of_results
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, rows_after_a_block

if TYPE_CHECKING:
    from tokasaurus.model.worker.start import Start

_NUM_ROWS = (512, 256, 128, 64, 32, 16, 8, 4, 2)
"""Rows of a trial: for each size of groups, the first number for which the cache has room."""

_MAX_CPU_ROWS = 256
"""Most rows of a trial on a CPU. With fewer, its threads would share few groups unevenly."""

_FEW_ROWS = 8
"""Shorter prefixes are tried if there is room only for fewer rows in the smallest groups."""

_GROUP_SIZES = (2, 8, 32, 128, 512)
_PREFIX_LENGTHS = (256, 512, 1024)
_NUM_OWN_TOKENS = 32
_MIN_ROUNDS = 8
_MAX_SECONDS = 1.0
"""Time after which no further round begins, except the first _FEW_ROUNDS: backends without kernels are slow."""

_LATER_SECONDS = 0.25
"""The same where earlier starts have measured: they together take the time that one start should not."""

_FEW_ROUNDS = 3
_NUM_KEPT = 3
_SETTLED = 1.05
"""Each time is measured until its _NUM_KEPT shortest rounds differ by less than this factor."""

_COLD_BYTES = 64 << 20
"""Bytes of keys and values that a trial reads before it reads the same ones again: more than processors cache."""

_MIN_LENGTH = _PREFIX_LENGTHS[0]
"""If the cache is too small for prefixes of this many tokens, nothing is measured."""

_NUM_STEP_ROUNDS = 7
_NUM_STEPS = 4
"""Steps of a run, each launched before the results of the one before it are read, as in service."""

_Plan = tuple[dict[int, int], list[int]]
"""Rows of the trial of each size of groups, and the lengths of prefixes."""

Times = dict[tuple[int, int, bool], list[float]]
"""(rows of each group, tokens of its prefix, whether the rows attend in groups): seconds of the _NUM_KEPT shortest
rounds, shortest first. Other work of the machine only makes a round longer."""


def asks_for_prefix_costs(start: Start) -> bool:
    """Whether some flag leaves it to a measurement which sequences share their prefix's attention."""
    config, has_groups = start.config, start.limits.has_groups and start.config.use_hydragen is not False
    return has_groups and None in (config.hydragen_min_group_size, config.hydragen_min_prefix_len)


@torch.inference_mode()
def measure_prefix_groups(start: Start) -> str:
    """What prefix groups cost here."""
    shape, num_blocks = start.shape, start.num_blocks
    costs = find_costs(start.backend, shape, num_blocks, start.config.max_seqs_per_forward, start.kernels)
    details = [describe_savings(costs)]
    trial = start.runner, start.backend, shape, num_blocks, start.limits, len(start.info.spec.attentions)
    start.hydragen = with_step_price(costs, *trial, details)
    return ", ".join(details)


def find_costs(
    backend: AttentionBackend, shape: KVShape, num_blocks: int, max_rows: int, kernels: Kernels | None
) -> HydragenCosts:
    """`measure_costs`, with what earlier starts on this machine have measured. kernels: of the CPU, if any.

    Nothing is measured if their times are settled; else this start adds its rounds to theirs, so that a machine that
    was busy at the first start is measured better by later ones.
    """
    plan = _plan(shape, num_blocks, max_rows)
    if plan is None:
        return DEFAULT_HYDRAGEN
    # The size of the KV cache is not among the parts: where it is automatic, it differs from start to start.
    code = [__version__] if kernels is None else []  # else the kernels'
    of_shape = str(replace(shape, device=torch.device("cpu"), sinks=()))
    path = path_of_results("hydragen", shape.device, kernels, type(backend).__name__, *code, of_shape, plan)
    if path is None:
        return measure_costs(backend, shape, num_blocks, max_rows)
    times = _read_times(path)
    if not _is_settled(times):
        times = measure_times(backend, shape, num_blocks, max_rows, times)
        keep_results(path, [[*key, kept] for key, kept in times.items()])
    return _costs_of(times)


def _read_times(path: Path) -> Times:
    """{} if there is no such file, or it is damaged: a write that a crash cut short, or another version's."""
    try:
        rows = json.loads(path.read_bytes())
        times = {
            (int(size), int(length), bool(in_groups)): [*map(float, kept)] for size, length, in_groups, kept in rows
        }
    except (OSError, ValueError, TypeError):
        return {}
    has_both = all((size, length, not in_groups) in times for size, length, in_groups in times)
    return times if has_both and all(kept and min(kept) > 0 for kept in times.values()) else {}


def measure_costs(backend: AttentionBackend, shape: KVShape, num_blocks: int, max_rows: int) -> HydragenCosts:
    """DEFAULT_HYDRAGEN if the cache is too small to measure, or its blocks are too large.

    The backend's cache must be allocated, with num_blocks besides the padding block; its contents are overwritten.
    max_rows: most rows of a forward. Takes tenths of a second on a CPU with the kernels, seconds without them.
    """
    return _costs_of(measure_times(backend, shape, num_blocks, max_rows, {}))


def _costs_of(times: Times) -> HydragenCosts:
    return fit_costs(_ratios(times), _NUM_OWN_TOKENS) if times else DEFAULT_HYDRAGEN


def measure_times(backend: AttentionBackend, shape: KVShape, num_blocks: int, max_rows: int, before: Times) -> Times:
    """Times of this start's rounds and of those before; {} if nothing can be measured. Arguments as in
    measure_costs."""
    trial = _Trial(backend, shape)
    while (plan := _plan(shape, num_blocks, max_rows)) is not None:
        rows_of_size, lengths = plan
        try:
            return trial.times(rows_of_size, lengths, before)
        except torch.OutOfMemoryError:  # on CUDA, where the cache fills the memory: plain torch gathers keys and values
            max_rows = max(rows_of_size.values()) // 2
            before = {}
    return {}


def _is_settled(times: Times) -> bool:
    """Whether further rounds would hardly find shorter times."""
    return bool(times) and all(len(kept) == _NUM_KEPT and kept[-1] <= _SETTLED * kept[0] for kept in times.values())


def _ratios(times: Times) -> dict[tuple[int, int], float]:
    """Time in groups over time of the same rows alone."""
    return {(size, length): times[size, length, True][0] / times[size, length, False][0] for size, length, _ in times}


def seconds_per_token(backend: AttentionBackend, shape: KVShape, num_blocks: int, max_rows: int) -> float | None:
    """Seconds of attention in one layer for each token that a row reads alone, in which measure_costs counts.

    Of the rows that share most: their reads are the fastest. None where nothing can be measured. The arguments, and
    what happens to the cache, are as for measure_costs.
    """
    trial = _Trial(backend, shape)
    while (plan := _plan(shape, num_blocks, max_rows)) is not None:
        rows_of_size, lengths = plan
        size = max(rows_of_size)
        try:
            return trial.seconds_per_token(size, rows_of_size[size], lengths[-1])
        except torch.OutOfMemoryError:  # as in measure_costs
            max_rows = max(rows_of_size.values()) // 2
    return None


def _plan(shape: KVShape, num_blocks: int, max_rows: int) -> _Plan | None:
    """None if there is no room."""
    if shape.device.type != "cuda":
        max_rows = min(max_rows, _MAX_CPU_ROWS)
    for length in reversed(_PREFIX_LENGTHS):
        if length // 4 < shape.page_size:  # prefixes are shared in whole blocks
            return None
        rows_of_size: dict[int, int] = {}
        for size in _GROUP_SIZES:
            fitting = (
                num_rows
                for num_rows in _NUM_ROWS
                if size <= num_rows <= max_rows and _num_trial_blocks(shape, num_rows, size, length) <= num_blocks
            )
            if (num_rows := next(fitting, None)) is not None:
                rows_of_size[size] = num_rows
        fewest = rows_of_size.get(_GROUP_SIZES[0], 0)
        if fewest >= min(_FEW_ROWS, max_rows) or (fewest and length == _MIN_LENGTH):
            return rows_of_size, [length // 4, length]
        if length == _MIN_LENGTH:
            break
    return None


def _num_trial_blocks(shape: KVShape, num_rows: int, group_size: int, prefix_length: int) -> int:
    own_blocks = -(-_NUM_OWN_TOKENS // shape.page_size)
    return num_rows // group_size * (prefix_length // shape.page_size) + num_rows * own_blocks


def describe_savings(costs: HydragenCosts) -> str:
    """What groups are expected to save, for the user."""
    shares = [(num_rows, costs.saved(num_rows, 1024) / (num_rows * 1024)) for num_rows in (4, 32)]
    if all(share <= 0 for _, share in shares):
        return "not expected to save time on this device"
    saved = ", ".join(f"{num_rows} sequences save {max(0.0, share):.0%}" for num_rows, share in shares)
    return f"{saved} of attention to 1,024 shared tokens"


def fit_costs(ratios: dict[tuple[int, int], float], num_own_tokens: int) -> HydragenCosts:
    """The costs, none of them negative, that explain measured times with the smallest squared relative errors.

    ratios: {(rows of each group, tokens of its prefix): time in groups over time of the same rows alone}. Each row has
    num_own_tokens more, to which it attends alone in both.
    """
    size, length = np.array(list(ratios), np.float64).T
    whole = length + num_own_tokens
    taken_by_row = np.array(list(ratios.values())) * whole - num_own_tokens
    terms = np.stack((1 / size, length / size, np.ones_like(size), length), axis=1)
    # per_group, per_group_token, per_row, per_row_token
    found = _least_squares_not_negative(terms / whole[:, None], taken_by_row / whole)
    # A group of one row is never faster than the row alone; a fit of larger groups might say so.
    found[1] = max(found[1], 1.0 - found[3])
    return HydragenCosts(*found.tolist())


def _least_squares_not_negative(terms: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """terms [n, k], values [n] -> the x [k] without negative entries for which terms @ x is nearest to values.

    Tries each set of entries that are not 0, so k must be small.
    """
    num_terms = terms.shape[1]
    best, best_error = np.zeros(num_terms), float(np.square(values).sum())
    for size in range(1, num_terms + 1):
        for chosen in itertools.combinations(range(num_terms), size):
            part, *_ = np.linalg.lstsq(terms[:, chosen], values, rcond=None)
            error = float(np.square(terms[:, chosen] @ part - values).sum())
            if (part >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_terms), error
                best[list(chosen)] = part
    return best


def with_step_price(
    costs: HydragenCosts,
    runner: ModelRunner,
    backend: AttentionBackend,
    shape: KVShape,
    num_blocks: int,
    limits: ForwardLimits,
    num_layers: int,
    details: list[str],
) -> HydragenCosts:
    """The costs with the prices of a step as they are measured; as they are without CUDA graphs.

    num_blocks: as for measure_costs. num_layers: of all pipeline stages, since a step's time is the time of all of
    them.
    details: gets a text for the user if there is a price.
    """
    with runner.groups_in_pieces():
        seconds = measure_step_price(runner, limits, shape.page_size)
    recorded_groups = runner.max_recorded_groups
    recorded_seconds = measure_step_price(runner, limits, shape.page_size) if recorded_groups else 0.0
    if seconds == recorded_seconds == 0:
        return replace(costs, recorded_groups=recorded_groups)
    token_seconds = seconds_per_token(backend, shape, num_blocks, limits.max_seqs)
    if token_seconds is None:
        return costs
    num_tokens, recorded_tokens = (each / (token_seconds * num_layers) for each in (seconds, recorded_seconds))
    in_pieces = f"{seconds * 1e3:.2g} ms more ({num_tokens:,.0f} tokens)"
    if recorded_groups:
        recorded = f"{recorded_seconds * 1e3:.2g} ms more ({recorded_tokens:,.0f} tokens)"
        in_pieces = f"{recorded}, with over {recorded_groups} groups {in_pieces}"
    details.append(f"a decode step with groups takes {in_pieces}")
    return replace(costs, per_step=num_tokens, per_recorded_step=recorded_tokens, recorded_groups=recorded_groups)


def measure_step_price(runner: ModelRunner, limits: ForwardLimits, page_size: int) -> float:
    """Seconds by which a decode step takes longer if two of its rows share a block; 0 without CUDA graphs.

    Measured where it is greatest: with few rows and short contexts, and attention in three calls a layer (the prefix,
    the grouped rows, the other rows). Where the device computes for longer, that hides launches of the host. All ranks
    run the same steps. Leaves slots open, as `warm_up` does.
    """
    if not runner.graph_sizes:
        return 0.0
    num_rows = min(runner.graph_sizes[0], limits.max_seqs, limits.max_tokens)
    if num_rows < 2 or limits.context_length < page_size + 1 + _NUM_STEPS:
        return 0.0  # no step can have such a group
    opening = rows_after_a_block(num_rows, limits, page_size)
    alone = decode_after(opening)
    grouped = replace(alone, groups=PrefixGroups(np.array([2], np.int32), np.ones(1, np.int32)))
    differences = []
    for round_index in range(1 + _NUM_STEP_ROUNDS):
        alone_s, grouped_s = (_seconds_per_step(runner, opening, step) for step in (alone, grouped))
        if round_index:  # the first one creates and loads what steps keep
            differences.append(grouped_s - alone_s)
    return max(0.0, statistics.median(differences))


def _seconds_per_step(runner: ModelRunner, opening: ForwardInput, step: ForwardInput) -> float:
    runner.run(opening)
    _wait_for_device(runner.device)
    began_s = time.perf_counter()
    before = None
    for _ in range(_NUM_STEPS):
        result = runner.run(step)
        if before is not None:
            before.wait()
        before = result
    _wait_for_device(runner.device)
    return (time.perf_counter() - began_s) / _NUM_STEPS


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Trial:
    """Times decode rows that share prefixes and have a few tokens of their own after it."""

    def __init__(self, backend: AttentionBackend, shape: KVShape) -> None:
        self._backend = backend
        self._shape = shape
        self._stopwatch = make_stopwatch(shape.device)
        self._layer = 0
        self._num_written = Counter[int]()  # blocks written in each layer
        self._own_blocks = -(-_NUM_OWN_TOKENS // shape.page_size)
        # Those that see all tokens, whose blocks are the tables'.
        self._layers = [index for index in range(shape.num_layers) if shape.place_of(index).group == 0]

    def times(self, rows_of_size: Mapping[int, int], prefix_lengths: list[int], before: Times) -> Times:
        """Times of rounds in which every size and length has its turn, alone and in groups, added to those before.

        Turns matter: a machine changes its speed from one tenth of a second to the next."""
        shape = self._shape
        num_layers = {
            (size, length): self._prepare_layers(size, num_rows, length)
            for length in prefix_lengths
            for size, num_rows in rows_of_size.items()
        }
        layouts = {
            (size, length, in_groups): layout
            for size, length in num_layers
            for in_groups, layout in enumerate(self._layouts(size, rows_of_size[size], length))
        }
        queries = {
            size: torch.zeros((num_rows, shape.num_heads, shape.head_dim), dtype=shape.query_dtype, device=shape.device)
            for size, num_rows in rows_of_size.items()
        }

        def one_round() -> Iterator[tuple[tuple[int, int, bool], float]]:
            for (size, length, in_groups), layout in layouts.items():
                # Another layer each time, as in a forward: the last one's data is in the processor's cache.
                self._layer += 1
                layer = self._layers[self._layer % num_layers[size, length]]
                yield (size, length, bool(in_groups)), self._time(queries[size], layer, layout)

        for _ in one_round():  # loads code, and lets threads start
            pass
        found = dict(before)
        max_seconds = _LATER_SECONDS if before else _MAX_SECONDS
        start_s = time.perf_counter()
        for round_index in itertools.count(1):
            for key, seconds in one_round():
                found[key] = sorted((*found.get(key, ()), seconds))[:_NUM_KEPT]
            if round_index >= _MIN_ROUNDS and _is_settled(found):
                break
            if round_index >= _FEW_ROUNDS and time.perf_counter() - start_s > max_seconds:
                break
        return found

    def seconds_per_token(self, group_size: int, num_rows: int, prefix_length: int) -> float:
        """Median time of the rows as separate rows, for each token that they read."""
        shape = self._shape
        alone, _ = self._layouts(group_size, num_rows, prefix_length)
        num_layers = self._prepare_layers(group_size, num_rows, prefix_length)
        size = num_rows, shape.num_heads, shape.head_dim
        query = torch.zeros(size, dtype=shape.query_dtype, device=shape.device)
        times = [self._time(query, self._layers[index % num_layers], alone) for index in range(1 + _MIN_ROUNDS)]
        return statistics.median(times[1:]) / (num_rows * (prefix_length + _NUM_OWN_TOKENS))

    def _prepare_layers(self, group_size: int, num_rows: int, prefix_length: int) -> int:
        """Write the trial's blocks and return the number of layers it cycles through.

        Memory that was never written may be mapped to one zero page, which stays in the processor's cache.
        """
        shape = self._shape
        num_blocks = num_rows // group_size * (prefix_length // shape.page_size) + num_rows * self._own_blocks
        layer_bytes = num_blocks * shape.bytes_per_block // (shape.block_layers or shape.num_layers)
        num_layers = min(len(self._layers), -(-_COLD_BYTES // layer_bytes))
        for layer in self._layers[:num_layers]:
            num_written = self._num_written[layer]
            if num_written < num_blocks:
                self._write_zeros(layer, 1 + num_written, 1 + num_blocks)
                self._num_written[layer] = num_blocks
        return num_layers

    def _write_zeros(self, layer: int, first_block: int, end_block: int) -> None:
        shape = self._shape
        indices = torch.arange(first_block * shape.page_size, end_block * shape.page_size, device=shape.device)
        size = len(indices), shape.num_kv_heads, shape.head_dim
        zeros = torch.zeros(size, dtype=shape.query_dtype, device=shape.device)
        self._backend.plan(PagedLayout(indices, ()))
        self._backend.write(zeros, zeros, layer)

    def _time(self, query: Tensor, layer: int, layout: PagedLayout) -> float:
        self._backend.plan(layout)
        return self._stopwatch.seconds(lambda: attend_rows(self._backend, query, layer, layout))

    def _layouts(self, group_size: int, num_rows: int, prefix_length: int) -> tuple[PagedLayout, PagedLayout]:
        """The layouts of the same rows as separate rows and in groups."""
        prefix_blocks, num_groups = prefix_length // self._shape.page_size, num_rows // group_size
        shared = 1 + torch.arange(num_groups * prefix_blocks, dtype=torch.int32).view(num_groups, -1)
        own = 1 + shared.numel() + torch.arange(num_rows * self._own_blocks, dtype=torch.int32).view(num_rows, -1)
        whole = torch.cat((shared.repeat_interleave(group_size, dim=0), own), dim=1)
        prefix_tokens = prefix_blocks * self._shape.page_size
        nothing = torch.zeros(0, dtype=torch.int64)
        alone = PagedLayout(nothing, (_part(whole, 1, prefix_tokens + _NUM_OWN_TOKENS, is_partial=False),))
        prefix = _part(shared, group_size, prefix_tokens, is_partial=True)
        together = PagedLayout(nothing, (_part(own, 1, _NUM_OWN_TOKENS, is_partial=True),), prefix)
        return as_in_steps(alone, self._backend, self._shape), as_in_steps(together, self._backend, self._shape)


def _part(block_table: Tensor, num_rows: int, num_tokens: int, is_partial: bool) -> PagedPart:
    """A part with num_rows query rows for each row of the block table."""
    num_segments = len(block_table)
    return PagedPart(
        first_row=0,
        num_rows=num_segments * num_rows,
        query_starts=torch.arange(0, num_segments * num_rows + 1, num_rows, dtype=torch.int32),
        block_table=block_table.contiguous(),
        kv_lengths=torch.full((num_segments,), num_tokens, dtype=torch.int32),
        causal=num_rows == 1,
        is_partial=is_partial,
    )
