"""Weights packed for the kernels, and products with them (kernels/linear.cpp)."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from tokasaurus.model.kernels.huge_pages import HugePageCopies
from tokasaurus.model.kernels.library import KERNEL_DTYPES, Kernels

# T tokens, E input size, O output size

_PANEL = 32
"""Outputs of a panel: kPanel of tiles.h."""


class PackedWeightsStruct(ctypes.Structure):
    """PackedWeights of products.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "in_size", "out_size", "is_gated")),
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
    )


class LayerKernels:
    """The functions over packed weights, bound, and the memory of these."""

    def __init__(self, kernels: Kernels) -> None:
        self.weights = HugePageCopies()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library = kernels.library
        self.multiply = library.toka_multiply
        self.multiply.argtypes = [pointer, pointer, integer, integer, pointer, ctypes.c_double, pointer]
        self.embed = library.toka_embed
        self.embed.argtypes = [pointer, pointer, integer, pointer]
        self.run_layers = library.toka_run_layers
        self.run_layers.argtypes = [pointer, integer, pointer, integer, pointer, pointer]


class PackedWeights:
    """The weight [O, E] of a product, and its bias [O], in the layout that the kernels read. Both are copied.

    is_gated: the weight is [2 O, E], gates before ups, and the product is silu(gate) * up, [O].
    """

    def __init__(self, kernels: LayerKernels, weight: Tensor, bias: Tensor | None, is_gated: bool = False) -> None:
        assert takes(weight)
        self._kernels = kernels
        self._dtype = weight.dtype
        self._in_size = weight.shape[1]
        self._out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
        pair = 2 if weight.dtype == torch.bfloat16 else 1
        ordered = _in_panels(weight, is_gated)  # [panels, 32, E]
        self._panels = kernels.weights.copy(ordered.view(len(ordered), _PANEL, -1, pair).transpose(1, 2))
        self._bias = None if bias is None else _in_panels(bias.unsqueeze(1), is_gated).contiguous()
        self.struct = PackedWeightsStruct(
            weight.dtype == torch.bfloat16,
            self._in_size,
            self._out_size,
            is_gated,
            self._panels.data_ptr(),
            _pointer(self._bias),
        )

    def multiply(self, x: Tensor, norm: tuple[Tensor, float] | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, E], rows may be apart -> [T, O]. norm: weight [E] and epsilon of an RMS norm that x passes first.
        out: a contiguous [T, O] to fill and return."""
        assert x.stride(1) == 1
        if out is None:
            out = torch.empty((x.shape[0], self._out_size), dtype=self._dtype)
        norm_weight, eps = (None, 0.0) if norm is None else norm
        self._kernels.multiply(
            *(ctypes.byref(self.struct), x.data_ptr(), x.stride(0), x.shape[0]),
            *(_pointer(norm_weight), eps, out.data_ptr()),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: indices int64 [T] -> [T, E]. Not for gated weights."""
        out = torch.empty((len(indices), self._in_size), dtype=self._dtype)
        self._kernels.embed(ctypes.byref(self.struct), indices.data_ptr(), len(indices), out.data_ptr())
        return out


def takes(weight: Tensor) -> bool:
    """Whether the kernels multiply by this weight [O, E]."""
    in_whole_pairs = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return weight.device.type == "cpu" and weight.dtype in KERNEL_DTYPES and in_whole_pairs


def _in_panels(weight: Tensor, is_gated: bool) -> Tensor:
    """[O, E] -> [panels, 32, E], padded with zeros; of gated weights, half of each panel is gates, half ups."""
    halves = weight.view(2 if is_gated else 1, -1, weight.shape[1])
    width = _PANEL // len(halves)
    padded = functional.pad(halves, (0, 0, 0, -halves.shape[1] % width))
    return padded.view(len(halves), -1, width, weight.shape[1]).transpose(0, 1).reshape(-1, _PANEL, weight.shape[1])


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
