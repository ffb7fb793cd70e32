"""Weights packed for the kernels, and gemms with them (csrc/gemm)."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.checkpoint.block_types import dequantize_rows, inputs_of_row
from tokasaurus.checkpoint.spec import Activation, GateLimits, NormSpec
from tokasaurus.model.cpu.bindings import (
    ACTIVATION_DTYPES,
    ACTIVATIONS,
    BLOCK_TYPES,
    ELEMENT_CODES,
    NORM_KINDS,
    HugePageTensors,
    Kernels,
    NormStruct,
    PackedWeightsStruct,
    give_back,
)
from tokasaurus.model.cpu.states import StateKernels

_PART_BYTES = 1 << 20
"""Bytes of quantised blocks that are dequantised at a time."""

# T tokens, E hidden size or input size, O output size, D head size


class LayerKernels:
    """The library's functions that use packed weights, and the memory for packed weights."""

    def __init__(self, kernels: Kernels) -> None:
        self.weights = HugePageTensors()
        self.panel_size = kernels.panel_size
        self.rank_multiple = kernels.rank_multiple
        self.activation_dtype = kernels.activation_dtype
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        library = kernels.library
        self.pack = library.toka_pack
        self.pack.argtypes = [pointer, pointer, pointer]
        self.pack_rows = library.toka_pack_rows
        self.pack_rows.argtypes = [pointer, pointer, integer, integer, pointer]
        self.pack_blocks = library.toka_pack_blocks
        self.pack_blocks.argtypes = [pointer, integer, pointer, integer, integer, pointer]
        self.block_panel_bytes = library.toka_block_panel_bytes
        self.block_panel_bytes.argtypes = [integer, integer]
        self.block_panel_bytes.restype = integer
        self.multiply = library.toka_multiply
        self.multiply.argtypes = [
            *(pointer, pointer, integer, integer, pointer, number, number, pointer, pointer, pointer)
        ]
        self.run_experts = library.toka_run_experts
        self.run_experts.argtypes = [pointer, pointer, pointer, integer, pointer, pointer, pointer]
        self.reserve_experts = library.toka_reserve_experts
        self.reserve_experts.argtypes = [pointer, integer]
        self.embed = library.toka_embed
        self.embed.argtypes = [pointer, pointer, integer, pointer]
        self.run_layers = library.toka_run_layers
        self.run_layers.argtypes = [pointer, integer, pointer, integer, pointer, integer, *([pointer] * 3)]
        self.states = StateKernels(library)
        self.reserve_forward = library.toka_reserve_forward
        self.reserve_forward.argtypes = [pointer, integer, integer]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of a quantised weight, as checkpoint/block_types describes them."""

    type: str
    """A type in BLOCK_TYPES."""
    blocks: Tensor
    """uint8 [rows, bytes of a row], contiguous."""

    def dequantized(self) -> Tensor:
        """float32 [rows, inputs]."""
        num_rows, row_bytes = self.blocks.shape
        whole = torch.empty((num_rows, inputs_of_row(self.type, row_bytes)))
        step = max(1, _PART_BYTES // row_bytes)
        for first in range(0, num_rows, step):
            part = self.blocks[first : first + step]
            whole[first : first + step] = torch.from_numpy(dequantize_rows(part.numpy(), self.type))
        return whole


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A quantised weight [O, E]: the rows of all its parts, in order."""

    in_size: int
    dtype: torch.dtype
    """What weights are rounded to, where the processor multiplies numbers of this type."""
    parts: tuple[BlockRows, ...]
    is_int8: bool = False
    """x is quantised too, and multiplied in integers."""

    @property
    def num_rows(self) -> int:
        return sum(len(part.blocks) for part in self.parts)


class PackedNorm:
    """A norm of rows, with its vectors in float32, as the kernels read them."""

    def __init__(self, spec: NormSpec, weight: Tensor | None, bias: Tensor | None) -> None:
        self._weight, self._bias = (None if vector is None else vector.float() for vector in (weight, bias))
        self.struct = NormStruct(NORM_KINDS[spec.kind], _pointer(self._weight), _pointer(self._bias), spec.eps)

    def write(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Replace the vectors that are given."""
        for own, new in ((self._weight, weight), (self._bias, bias)):
            if own is not None and new is not None:
                own.copy_(new)


class PackedWeights:
    """The weight [O, E] of a linear layer, and its bias [O], copied into the layout that the kernels read.

    activation: applied to outputs, or to gates. is_gated: the weight is [2 O, E], gate rows before up rows, as is the
    bias, and the layer computes activation(gate) * up, [O].
    """

    def __init__(
        self,
        kernels: LayerKernels,
        weight: Tensor | BlockWeight,
        bias: Tensor | None,
        is_gated: bool = False,
        activation: Activation | None = None,
        gate_limits: GateLimits | None = None,
    ) -> None:
        """A quantised weight must fit: see `fits`. gate_limits: of gates, in place of an activation."""
        assert gate_limits is None or is_gated
        self.kernels = kernels
        self.activation_dtype = kernels.activation_dtype(weight.dtype)
        num_rows, self._in_size = (
            (weight.num_rows, weight.in_size) if isinstance(weight, BlockWeight) else tuple(weight.shape)
        )
        self._out_size = num_rows // 2 if is_gated else num_rows
        self.num_weights = num_rows * self._in_size
        panel_width = kernels.panel_size // 2 if is_gated else kernels.panel_size  # outputs of a panel
        self._num_panels = -(-self._out_size // panel_width)
        self._panel_width = panel_width
        self._bias = None if bias is None else torch.zeros(self._num_panels * kernels.panel_size)
        if bias is not None:
            self.write_bias(0, bias)
        self._blocks: Tensor | None = None
        if isinstance(weight, BlockWeight):
            self._blocks = self._place_blocks(weight, panel_width, is_gated)
        else:
            assert takes(weight)
            self._panels = kernels.weights.empty((self._num_panels * kernels.panel_size, self._in_size), weight.dtype)
        self.struct = PackedWeightsStruct(
            ELEMENT_CODES[weight.dtype],
            self._in_size,
            self._out_size,
            is_gated,
            self._panels.data_ptr(),
            _pointer(self._bias),
            _pointer(self._blocks),
            isinstance(weight, BlockWeight) and weight.is_int8,
            ACTIVATIONS[activation],
            *((0, 1, 0) if gate_limits is None else (gate_limits.limit, gate_limits.alpha, gate_limits.up_offset)),
        )
        if isinstance(weight, BlockWeight):
            first_row = 0
            for part in weight.parts:
                self.write_blocks(first_row, part)
                first_row += len(part.blocks)
        else:
            plain = weight.contiguous()
            kernels.pack(ctypes.byref(self.struct), plain.data_ptr(), self._panels.data_ptr())

    @property
    def has_blocks(self) -> bool:
        """Whether the weight is quantised."""
        return self._blocks is not None

    @property
    def block_types(self) -> set[str]:
        """Types of a quantised weight's blocks; none of a plain one's."""
        codes = set() if self._blocks is None else set(self._blocks[:, 0].tolist())
        return {name for name, code in BLOCK_TYPES.items() if code in codes}

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    @property
    def in_size(self) -> int:
        return self._in_size

    @property
    def out_size(self) -> int:
        return self._out_size

    @staticmethod
    def fits(weight: BlockWeight, panel_size: int, is_gated: bool = False) -> bool:
        """Whether each panel has rows of a single type, and activations can be quantised in the same way for all."""
        types = [part.type for part in weight.parts for _ in range(len(part.blocks))]
        if weight.is_int8 and "I8" in types and len(set(types)) > 1:
            return False  # activations would need one scale for a token, and one for each block
        if is_gated:
            return types[: len(types) // 2] == types[len(types) // 2 :] and len(set(types)) == 1
        return all(len(set(types[row : row + panel_size])) == 1 for row in range(0, len(types), panel_size))

    def _place_blocks(self, weight: BlockWeight, panel_width: int, is_gated: bool) -> Tensor:
        """Allocates the panels, of zeros, and returns the type and the offset of each, int64 [panels, 2]."""
        types = [BLOCK_TYPES[part.type] for part in weight.parts for _ in range(len(part.blocks))][: self._out_size]
        assert self.fits(weight, self.kernels.panel_size, is_gated)
        blocks = torch.empty((self._num_panels, 2), dtype=torch.int64)
        offset = 0
        for panel, block_type in enumerate(types[::panel_width]):
            blocks[panel, 0], blocks[panel, 1] = block_type, offset
            offset += self.kernels.block_panel_bytes(block_type, self._in_size)
        self._panels = self.kernels.weights.empty((offset,), torch.uint8).zero_()
        return blocks

    def write(self, first_row: int, rows: Tensor) -> None:
        """Replace the weight's rows from `first_row` on. rows [n, E], in the weight's dtype; gate rows come before up
        rows."""
        rows = rows.to(self._panels.dtype).contiguous()
        pointers = ctypes.byref(self.struct), rows.data_ptr()
        self.kernels.pack_rows(*pointers, first_row, len(rows), self._panels.data_ptr())

    def write_blocks(self, first_row: int, rows: BlockRows) -> None:
        """Replace quantised rows from `first_row` on. rows: of the type that the weight has there."""
        assert rows.blocks.is_contiguous()
        pointers = ctypes.byref(self.struct), BLOCK_TYPES[rows.type], rows.blocks.data_ptr()
        self.kernels.pack_blocks(*pointers, first_row, len(rows.blocks), self._panels.data_ptr())

    def write_bias(self, first: int, values: Tensor) -> None:
        """Replace the bias from output `first` on. values [n]; gates come before ups."""
        assert self._bias is not None
        rows = torch.arange(first, first + len(values))
        part, output = rows // self._out_size, rows % self._out_size
        panel, column = output // self._panel_width, output % self._panel_width
        self._bias[panel * self.kernels.panel_size + part * self._panel_width + column] = values.float()

    def give_back(self) -> None:
        """Return the weight's memory to the system; `write` takes it again."""
        give_back(self._panels)

    def multiply(
        self,
        x: Tensor,
        norm: PackedNorm | None = None,
        out: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        adapters: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """x [T, E] in the activation dtype, any row stride -> [T, O].

        norm: applied to x first. out: contiguous [T, O] to fill and return. scale: factor of the outputs, which a
        softcap limits then, as in ModelSpec. adapters: the address of PackedAdapters of this layer, and the number of
        each row's, int32 [T].
        """
        assert x.stride(1) == 1
        assert x.dtype == self.activation_dtype
        if out is None:
            out = torch.empty((x.shape[0], self._out_size), dtype=self.activation_dtype)
        self.kernels.multiply(
            *(ctypes.byref(self.struct), x.data_ptr(), x.stride(0), x.shape[0]),
            *(None if norm is None else ctypes.addressof(norm.struct), scale, softcap or 0),
            *((None, None) if adapters is None else (adapters[0], adapters[1].data_ptr())),
            out.data_ptr(),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: indices int64 [T] -> [T, E] in the activation dtype. Not for gated weights."""
        out = torch.empty((len(indices), self._in_size), dtype=self.activation_dtype)
        self.kernels.embed(ctypes.byref(self.struct), indices.data_ptr(), len(indices), out.data_ptr())
        return out


def takes(weight: Tensor) -> bool:
    """Whether the kernels support this weight [O, E]."""
    has_whole_pairs = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return weight.device.type == "cpu" and weight.dtype in ACTIVATION_DTYPES and has_whole_pairs


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
