"""Which rows of a forward have which adapter, and what adapters add to the outputs of linear layers: in plain torch, or
by Triton kernels (triton_low_rank), which read from the device which rows these are, so that graphs record them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.model.buffer_sizes import padded_rank
from tokasaurus.model.cpu.low_rank import LowRankRows
from tokasaurus.model.staging.staging import Staging

# T rows


class TiledRows:
    """The rows of a forward sorted by adapter, in tiles of one adapter each, in device memory that stays where it is:
    `order` and `tiles` of triton_low_rank."""

    def __init__(self, num_adapters: int, max_rank: int, max_rows: int, device: torch.device) -> None:
        """max_rows: of a forward, padding included."""
        from tokasaurus.model.decoder import triton_low_rank

        self._kernels = triton_low_rank
        self.num_adapters = num_adapters
        self.max_rank = padded_rank(max_rank)
        most = max(triton_low_rank.max_tiles(rows, num_adapters) for rows in range(1, max_rows + 1))
        self.order = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.tiles = torch.zeros(3 * most, dtype=torch.int32, device=device)

    def stage(self, numbers: NDArray[np.int32], staging: Staging) -> None:
        """numbers: [T], adapters of the next rows; 0 for none."""
        rows_per_tile = self._kernels.rows_per_tile(len(numbers))
        order = np.argsort(numbers, kind="stable").astype(np.int32)[np.count_nonzero(numbers == 0) :]
        counts = np.bincount(numbers, minlength=self.num_adapters + 1)[1:]
        num_tiles = -(-counts // rows_per_tile)
        tiles = np.zeros((self._kernels.max_tiles(len(numbers), self.num_adapters), 3), np.int32)
        own = tiles[: num_tiles.sum()]
        own[:, 0] = np.repeat(np.arange(1, len(counts) + 1), num_tiles)
        ends = np.cumsum(counts)
        first_tiles = np.cumsum(num_tiles) - num_tiles
        index = np.arange(len(own)) - first_tiles[own[:, 0] - 1]
        own[:, 1] = (ends - counts)[own[:, 0] - 1] + index * rows_per_tile
        own[:, 2] = np.minimum(own[:, 1] + rows_per_tile, ends[own[:, 0] - 1])
        staged_order, staged_tiles = staging.to_device(order), staging.to_device(tiles.reshape(-1))
        staging.then(lambda: self.order[: len(order)].copy_(staged_order))
        staging.then(lambda: self.tiles[: tiles.size].copy_(staged_tiles))

    def clear(self) -> None:
        """No row has an adapter."""
        self.tiles.zero_()


class LowRankSlots:
    """A linear layer's memory for the adapters that steps may have: `down`, `up`, `ranks` and `blocks` of
    triton_low_rank. It stays where it is."""

    def __init__(self, rows: TiledRows, parts: Sequence[tuple[int, int]], weight: Tensor) -> None:
        """parts: the first output of each of the fused layers, and how many it has. weight: [outputs, inputs]."""
        from tokasaurus.model.decoder.triton_low_rank import column_blocks

        self._rows = rows
        parts = sorted(parts)
        self._parts = {first: index for index, (first, _) in enumerate(parts)}
        num_adapters, max_rank, (num_outputs, num_inputs) = rows.num_adapters, rows.max_rank, weight.shape
        self.down = weight.new_zeros((num_adapters, len(parts), max_rank, num_inputs))
        self.up = weight.new_zeros((num_adapters, num_outputs, max_rank))
        self.ranks = torch.zeros((num_adapters + 1, len(parts)), dtype=torch.int32, device=weight.device)
        self.blocks = column_blocks(parts).to(weight.device)

    def place(self, number: int, parts: Sequence[LowRankRows]) -> None:
        """What the adapter of this number adds from now on. parts: on the host; none: nothing."""
        down, up = self.down[number - 1].zero_(), self.up[number - 1].zero_()
        ranks = torch.zeros(len(self._parts), dtype=torch.int32)
        for part in parts:
            index, rank = self._parts[part.first_row], len(part.down)
            down[index, :rank] = part.down.to(down)
            up[part.first_row : part.first_row + len(part.up), :rank] = part.up.to(up)
            ranks[index] = rank
        self.ranks[number] = ranks.to(self.ranks.device)

    def add(self, out: Tensor, x: Tensor) -> None:
        """Add to out [T, outputs] what the rows' adapters give for x [T, inputs]."""
        add = add_low_rank if torch.compiler.is_compiling() else _add_low_rank  # an operation costs the host more
        add(out, x, self._rows.order, self._rows.tiles, self.down, self.up, self.ranks, self.blocks)


def _add_low_rank(
    out: Tensor, x: Tensor, order: Tensor, tiles: Tensor, down: Tensor, up: Tensor, ranks: Tensor, blocks: Tensor
) -> None:
    """As triton_low_rank.add_low_rank."""
    from tokasaurus.model.decoder import triton_low_rank

    triton_low_rank.add_low_rank(out, x, order, tiles, down, up, ranks, blocks)


add_low_rank = torch.library.custom_op("tokasaurus::add_low_rank", _add_low_rank, mutates_args=("out",))
"""One operation of torch, which a compiler leaves whole."""


@add_low_rank.register_fake
def _compute_nothing(*_arguments: Tensor) -> None:
    """A compiler learns what it needs from the declared arguments: the call returns nothing."""


class RowAdapters:
    """The adapters of the rows that a model's modules compute next. Numbers are from 1 on; 0 is none."""

    def __init__(self, num_adapters: int, tiled: TiledRows | None = None) -> None:
        """num_adapters: most at a time. tiled: for the Triton kernels, where these add to decoder layers."""
        self.num_adapters = num_adapters
        self.tiled = tiled
        self.numbers: Tensor | None = None
        """int32 [T], on the host; None if no row has an adapter."""
        self.adds_in_kernels = False
        """Whether the next forward launches the Triton kernels."""
        self.outside_layers: set[int] = set()
        """Numbers of adapters that change embeddings or logits."""
        self._rows: list[tuple[int, Tensor]] = []

    def set(self, numbers: NDArray[np.int32] | None, device: torch.device, staging: Staging | None = None) -> None:
        """numbers: [T] of the next rows, until the next call; None: no row has one. staging: of the next forward, whose
        arrays are not sent yet; None: only the LM head computes these rows."""
        self.numbers, self._rows, self.adds_in_kernels = None, [], False
        if numbers is None or not numbers.any():
            return
        self.numbers = torch.from_numpy(np.ascontiguousarray(numbers, np.int32))
        if self.tiled is not None and staging is not None:
            self.tiled.stage(numbers, staging)
            self.adds_in_kernels = True
        by_torch: Collection[int] = np.unique(numbers[numbers > 0]).tolist()
        for number in by_torch if self.tiled is None else self.outside_layers.intersection(by_torch):
            self._rows.append((number, torch.from_numpy(np.flatnonzero(numbers == number)).to(device)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, forwards launch the kernels, without any row that has an adapter."""
        assert self.tiled is not None
        self.tiled.clear()
        before, self.adds_in_kernels = self.adds_in_kernels, True
        try:
            yield
        finally:
            self.adds_in_kernels = before

    def rows(self) -> Sequence[tuple[int, Tensor]]:
        """Each number that rows have, and int64 indices of these rows. With the kernels, only of adapters that change
        embeddings or logits."""
        return self._rows

    def added(self, out: Tensor, x: Tensor, adapters: Mapping[int, Sequence[LowRankRows]]) -> Tensor:
        """out [T, outputs] of a linear layer, and what the rows' adapters add to it for x [T, inputs]. adapters: by
        number."""
        for number, rows in self._rows:
            for part in adapters.get(number, ()):
                inner = x[rows] @ part.down.to(x.dtype).T
                outputs = slice(part.first_row, part.first_row + len(part.up))
                out[rows, outputs] += inner @ part.up.to(x.dtype).T
        return out
