"""Measure the smallest prefix group and shortest prefix for which shared-prefix attention is faster on this device."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.messages.lifecycle import DEFAULT_HYDRAGEN, HydragenThresholds
from tokasaurus.model.attention.backend import AttentionBackend, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.row_split import attend_rows

_NUM_ROWS = (64, 32, 16, 8, 4, 2)
"""Rows of a trial: the first number for which the cache has room is used."""

_GROUP_SIZES = (2, 4, 8, 16, 32)
_PREFIX_LENGTHS = (64, 128, 256, 512, 1024)
_NUM_OWN_TOKENS = 32
_NUM_ROUNDS = 7

_MOST_OF_LARGEST = 1.5
"""A group is large enough if a row takes at most this many times as long as in the largest group. Smaller groups are
still faster than separate rows, but would take rows out of large groups with a shorter prefix, and lose more there."""

_LEAST_GAIN = 1.1
"""Least speedup over separate rows; a smaller one does not repay the manager's work of grouping."""

_COLD_BYTES = 64 << 20
"""Bytes of keys and values that a trial reads before it reads the same ones again: more than processors cache."""

_LEAST_LENGTH = 256
"""Least length of the longest prefix tried, in tokens: if the cache is too small for it, nothing is measured."""


def measure_thresholds(
    backend: AttentionBackend, shape: KVShape, num_blocks: int, max_rows: int
) -> HydragenThresholds | None:
    """None if no group is faster than separate rows; DEFAULT_HYDRAGEN if the cache is too small to measure.

    The backend's cache must be allocated, with num_blocks besides the padding block; its contents are overwritten.
    max_rows: most rows of a forward. Takes a tenth of a second on a CPU with the kernels, seconds without them.
    """
    trial = _Trial(backend, shape, num_blocks)
    for num_rows in _NUM_ROWS:
        lengths = [length for length in _PREFIX_LENGTHS if trial.fits(num_rows, length)]
        if num_rows <= max_rows and lengths and lengths[-1] >= _LEAST_LENGTH:
            # None only after a second measurement: other processes start at the same time and may disturb the first.
            return _find_thresholds(trial, num_rows, lengths) or _find_thresholds(trial, num_rows, lengths)
    return DEFAULT_HYDRAGEN


def _find_thresholds(trial: "_Trial", num_rows: int, lengths: Sequence[int]) -> HydragenThresholds | None:
    sizes = [size for size in _GROUP_SIZES if size <= num_rows]
    times = trial.times(sizes, num_rows, lengths[-1])
    for size in sizes:
        is_large = times[size].together_s <= _MOST_OF_LARGEST * times[sizes[-1]].together_s
        if is_large and times[size].gain >= _LEAST_GAIN:
            # The longest prefix is fast enough: `times` above measured it.
            pays = (
                length for length in lengths[:-1] if trial.times([size], num_rows, length)[size].gain >= _LEAST_GAIN
            )
            return HydragenThresholds(size, next(pays, lengths[-1]))
    return None


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of one layer's attention, for separate rows and for the same rows in groups."""

    alone_s: float
    together_s: float

    @property
    def gain(self) -> float:
        return self.alone_s / self.together_s


class _Trial:
    """Times decode rows that share prefixes and have a few tokens of their own after it."""

    def __init__(self, backend: AttentionBackend, shape: KVShape, num_blocks: int) -> None:
        self._backend = backend
        self._shape = shape
        self._num_blocks = num_blocks
        self._layer = 0
        self._num_written = Counter[int]()  # blocks written in each layer
        self._own_blocks = -(-_NUM_OWN_TOKENS // shape.page_size)

    def fits(self, num_rows: int, prefix_length: int) -> bool:
        """Whether the cache has enough blocks for the smallest groups, which have the most prefixes."""
        prefix_blocks = prefix_length // self._shape.page_size
        num_prefixes = num_rows // _GROUP_SIZES[0]
        return prefix_blocks >= 1 and num_prefixes * prefix_blocks + num_rows * self._own_blocks <= self._num_blocks

    def times(self, group_sizes: Sequence[int], num_rows: int, prefix_length: int) -> dict[int, _Times]:
        """The shortest times of num_rows rows for each group size; sizes, and separate and grouped rows, alternate."""
        layouts = {size: self._layouts(size, num_rows, prefix_length) for size in group_sizes}
        shape = self._shape
        num_layers = {size: self._prepare_layers(size, num_rows, prefix_length) for size in group_sizes}
        query = torch.zeros((num_rows, shape.num_heads, shape.head_dim), dtype=shape.query_dtype, device=shape.device)
        shortest = {size: [float("inf"), float("inf")] for size in group_sizes}
        for _ in range(_NUM_ROUNDS):
            for size, both in layouts.items():
                for which, layout in enumerate(both):
                    # Another layer each time, as in a forward: the last one's data is in the processor's cache.
                    self._layer += 1
                    seconds = self._time(query, self._layer % num_layers[size], layout)
                    shortest[size][which] = min(shortest[size][which], seconds)
        return {size: _Times(alone_s, together_s) for size, (alone_s, together_s) in shortest.items()}

    def _prepare_layers(self, group_size: int, num_rows: int, prefix_length: int) -> int:
        """Write the trial's blocks and return the number of layers it cycles through.

        Memory that was never written may be mapped to one zero page, which stays in the processor's cache.
        """
        shape = self._shape
        num_blocks = num_rows // group_size * (prefix_length // shape.page_size) + num_rows * self._own_blocks
        layer_bytes = num_blocks * shape.bytes_per_block // shape.num_layers
        num_layers = min(shape.num_layers, -(-_COLD_BYTES // layer_bytes))
        for layer in range(num_layers):
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
        self._wait()
        started = time.perf_counter()
        attend_rows(self._backend, query, layer, layout)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._shape.device.type == "cuda":
            torch.cuda.synchronize(self._shape.device)

    def _layouts(self, group_size: int, num_rows: int, prefix_length: int) -> tuple[PagedLayout, PagedLayout]:
        """The layouts of the same rows as separate rows and in groups."""
        prefix_blocks, num_groups = prefix_length // self._shape.page_size, num_rows // group_size
        shared = 1 + torch.arange(num_groups * prefix_blocks, dtype=torch.int32).view(num_groups, -1)
        own = 1 + shared.numel() + torch.arange(num_rows * self._own_blocks, dtype=torch.int32).view(num_rows, -1)
        whole = torch.cat((shared.repeat_interleave(group_size, dim=0), own), dim=1)
        prefix_tokens = prefix_blocks * self._shape.page_size
        nothing = torch.zeros(0, dtype=torch.int64, device=self._shape.device)
        alone = PagedLayout(nothing, (_part(whole, 1, prefix_tokens + _NUM_OWN_TOKENS, is_partial=False),))
        prefix = _part(shared, group_size, prefix_tokens, is_partial=True)
        return alone, PagedLayout(nothing, (_part(own, 1, _NUM_OWN_TOKENS, is_partial=True),), prefix)


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
