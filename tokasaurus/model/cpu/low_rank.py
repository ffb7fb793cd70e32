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
        kernels, is_gated = self._weights.kernels, bool(self._weights.struct.is_gated)
        rows_of_halves = _rows_of_halves(self._weights.out_size, kernels.panel_size, is_gated)
        num_rows = self._weights.out_size * (2 if is_gated else 1)
        sizes = [len(part.down) + len(part.down) % 2 for part in parts]  # the kernel takes two ranks at a time
        starts = [sum(sizes[:index]) for index in range(len(parts))]
        ranks = [pad(part.down, (0, 0, 0, size - len(part.down))) for part, size in zip(parts, sizes, strict=True)]
        down = PackedWeights(kernels, torch.cat(ranks).to(self._dtype), None, memory=memory)
        up = torch.zeros((num_rows + 1, sum(sizes)))  # the last row: of padding
        part_of_row = torch.full((num_rows + 1,), -1)
        for index, part in enumerate(parts):
            outputs = slice(part.first_row, part.first_row + len(part.up))
            up[outputs, starts[index] : starts[index] + part.up.shape[1]] = part.up
            part_of_row[outputs] = index
        parts_of_halves = part_of_row[rows_of_halves]
        last = parts_of_halves.amax(1)
        first = torch.where(parts_of_halves < 0, len(parts), parts_of_halves).amin(1)
        halves, numbers, end = torch.zeros((len(rows_of_halves), 3), dtype=torch.int64), list[Tensor](), 0
        for low, high in sorted({*zip(first.tolist(), last.tolist(), strict=True)}):
            if high < 0:
                continue  # nothing is added to these
            alike = torch.nonzero((first == low) & (last == high)).flatten()
            start, stop = starts[low], starts[high] + sizes[high]
            chosen = up[rows_of_halves[alike]][:, :, start:stop].transpose(1, 2)
            numbers.append(chosen.reshape(-1))
            halves[alike] = torch.tensor([start, stop - start, end])
            halves[alike, 2] += chosen[0].numel() * torch.arange(len(alike))
            end += chosen.numel()
        packed = memory.empty((end,), torch.float32)
        torch.cat(numbers, out=packed)
        return PackedLowRank(LowRankStruct(down.struct, packed.data_ptr(), halves.data_ptr()), (down, packed, halves))


def _rows_of_halves(out_size: int, panel_size: int, is_gated: bool) -> Tensor:
    """int64 [2 * panels, panel_size / 2]: which row of the weight each output of each half of a panel is; for padding,
    one after the last."""
    width = panel_size // 2
    num_rows = out_size * (2 if is_gated else 1)
    if is_gated:  # gates are in the first half, ups in the second
        outputs = torch.arange(-(-out_size // width) * width).view(-1, 1, width)
        rows = torch.cat((outputs, outputs + out_size), dim=1)
        return torch.where(outputs < out_size, rows, num_rows).view(-1, width)
    rows = torch.arange(-(-out_size // panel_size) * panel_size).view(-1, width)
    return torch.where(rows < out_size, rows, num_rows)
