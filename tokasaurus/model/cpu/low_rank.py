"""What adapters add to a linear layer's outputs, as the kernels read it (csrc/gemm). Source: arXiv 2106.09685."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokasaurus.model.cpu.bindings import HugePageTensors, LowRankStruct
from tokasaurus.model.cpu.layer_executor import PackedWeights


@dataclass(frozen=True, slots=True)
class LowRankRows:
    """What an adapter adds to the outputs of a linear layer from `first_row` on: those of x · downᵀ · upᵀ."""

    first_row: int
    down: Tensor
    """[ranks, in]."""
    up: Tensor
    """float32 [outputs, ranks]; the adapter's scale is in it."""


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """What an adapter adds to a packed layer's outputs."""

    struct: LowRankStruct
    owned: tuple[object, ...]
    """What the struct points to."""


class PackedAdapters:
    """The adapters of a packed layer, by number from 1 on."""

    def __init__(self, weights: PackedWeights, dtype: torch.dtype, num_adapters: int) -> None:
        """dtype: of the layer's weights."""
        self._weights = weights
        self._dtype = dtype
        self._structs = (LowRankStruct * (num_adapters + 1))()
        self._owned: list[PackedLowRank | None] = [None] * (num_adapters + 1)

    @property
    def address(self) -> int:
        """Of the structs, which has that of number 0 first."""
        return ctypes.addressof(self._structs)

    def place(self, number: int, adapter: PackedLowRank | None) -> None:
        """The adapter of this number; None adds nothing."""
        self._owned[number] = adapter
        self._structs[number] = LowRankStruct() if adapter is None else adapter.struct

    def pack(self, parts: Sequence[LowRankRows], memory: HugePageTensors) -> PackedLowRank:
        """An adapter that is made of these parts, at least one, none of whose outputs overlap. memory: for it."""
        kernels, weights, dtype = self._weights.kernels, self._weights.struct, self._dtype
        pair = 2 if kernels.activation_dtype(dtype) == torch.bfloat16 else 1
        sizes = [len(part.down) + len(part.down) % 2 for part in parts]  # counts of ranks are even
        ends = torch.tensor(sizes).cumsum(0)
        ranks = [pad(part.down, (0, 0, 0, size - len(part.down))) for part, size in zip(parts, sizes, strict=True)]
        down = torch.cat(ranks)
        num_ranks = -(-len(down) // kernels.rank_multiple) * kernels.rank_multiple
        down = pad(down, (0, 0, 0, num_ranks - len(down))).to(dtype)
        whole = num_ranks // kernels.panel_size * kernels.panel_size
        packed_down = memory.empty(tuple(down.shape), dtype)
        sides = (down[:whole], kernels.panel_size, 0), (down[whole:], kernels.rank_multiple, whole)
        for rows, width, first in sides:
            panels = rows.view(-1, width, down.shape[1] // pair, pair).transpose(1, 2)
            packed_down[first : first + len(rows)].view(panels.shape).copy_(panels)

        rows_of_halves = _rows_of_halves(weights.out_size, kernels.panel_size, bool(weights.is_gated))
        up = torch.zeros((int(rows_of_halves.max()) + 1, num_ranks))
        part_of_row = torch.full((len(up),), -1)
        for index, part in enumerate(parts):
            outputs, first = slice(part.first_row, part.first_row + len(part.up)), int(ends[index]) - sizes[index]
            up[outputs, first : first + part.up.shape[1]] = part.up
            part_of_row[outputs] = index
        of_halves = part_of_row[rows_of_halves]
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        lasts = starts[of_halves.amax(-1) + 1]  # 0 where nothing is added
        firsts = starts[torch.where(of_halves < 0, len(parts), of_halves).amin(-1)].minimum(lasts)
        counts = (lasts - firsts).amax(1)
        firsts = firsts.minimum(num_ranks - counts.unsqueeze(1))  # zeros, where a half has fewer ranks
        numbers, end = list[Tensor](), 0
        structs = torch.cat((counts.unsqueeze(1), firsts, counts.unsqueeze(1)), dim=1)
        for low, high, count in sorted({*map(tuple, torch.cat((firsts, counts.unsqueeze(1)), dim=1).tolist())}):
            alike = torch.nonzero((firsts[:, 0] == low) & (firsts[:, 1] == high) & (counts == count)).flatten()
            halves = up[rows_of_halves[alike]]  # [panels, 2, outputs, ranks]
            chosen = torch.cat((halves[:, 0, :, low : low + count], halves[:, 1, :, high : high + count]), dim=1)
            numbers.append(chosen.view(len(alike), kernels.panel_size, count // pair, pair).transpose(1, 2).flatten())
            structs[alike, 0] = end + count * kernels.panel_size * torch.arange(len(alike))
            end += len(numbers[-1])
        packed_up = memory.empty((end,), dtype)
        packed_up.copy_(torch.cat(numbers))
        struct = LowRankStruct(packed_down.data_ptr(), num_ranks, packed_up.data_ptr(), structs.data_ptr())
        return PackedLowRank(struct, (packed_down, packed_up, structs))


def _rows_of_halves(out_size: int, panel_size: int, is_gated: bool) -> Tensor:
    """int64 [panels, 2, panel_size / 2]: which row of the weight each output of each half of a panel is; for padding,
    one after the last."""
    width = panel_size // 2
    if is_gated:  # gates are in the first half, ups in the second
        outputs = torch.arange(-(-out_size // width) * width).view(-1, 1, width)
        rows = torch.cat((outputs, outputs + out_size), dim=1)
        return torch.where(outputs < out_size, rows, 2 * out_size)
    rows = torch.arange(-(-out_size // panel_size) * panel_size).view(-1, 2, width)
    return torch.where(rows < out_size, rows, out_size)
