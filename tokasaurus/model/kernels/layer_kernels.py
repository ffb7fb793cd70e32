"""Calls of kernels/layers.cpp with torch tensors: products by packed weights, rotary embedding, token embedding."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from tokasaurus.model.kernels.library import KERNEL_DTYPES, Kernels

# T tokens, E input size, O output size, H query heads, K key/value heads, D head size

_PANEL = 32
"""Outputs of a panel: kPanel of products.h."""


class _PackedWeights(ctypes.Structure):
    """PackedWeights of layers.cpp."""

    _fields_ = (
        ("is_bfloat16", ctypes.c_int64),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class LayerKernels:
    """The functions of layers.cpp, bound. Tensors are on the CPU; shapes are the caller's to get right."""

    def __init__(self, kernels: Kernels) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        library = kernels.library
        self.multiply = library.toka_multiply
        self.multiply.argtypes = [pointer, pointer, integer, integer, pointer, number, pointer, pointer]
        self.embed = library.toka_embed
        self.embed.argtypes = [pointer, pointer, integer, pointer]
        self._rotate = library.toka_rotate
        self._rotate.argtypes = [integer, pointer, *(integer,) * 5, pointer, pointer, pointer, number]

    def rotate(
        self, heads: Tensor, num_query_heads: int, cos_sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> None:
        """heads [T, H + K, D], in place, rows may be apart; cos_sin float32 [T, 1, D], from RotaryTable.

        norms: weights [D] of RMS norms over the queries and over the keys, applied before."""
        num_rows, num_heads, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1), "a row's heads lie together"
        query_norm, key_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        self._rotate(
            *(heads.dtype == torch.bfloat16, heads.data_ptr(), heads.stride(0), num_rows, num_heads, num_query_heads),
            *(head_dim, cos_sin.data_ptr(), query_norm, key_norm, eps),
        )


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
        panels = ordered.view(len(ordered), _PANEL, -1, pair).transpose(1, 2)
        self._panels = panels.contiguous()
        self._bias = None if bias is None else _in_panels(bias.unsqueeze(1), is_gated).contiguous()
        self._struct = _PackedWeights(
            weight.dtype == torch.bfloat16,
            self._in_size,
            self._out_size,
            is_gated,
            self._panels.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._struct)

    def multiply(self, x: Tensor, norm: tuple[Tensor, float] | None = None, add_to: Tensor | None = None) -> Tensor:
        """x [T, E], rows may be apart -> [T, O].

        norm: weight [E] and epsilon of an RMS norm that x passes first. add_to: [T, O], contiguous; the product is
        added to it in place, and it is returned.
        """
        assert x.stride(1) == 1
        num_rows = x.shape[0]
        out = torch.empty((num_rows, self._out_size), dtype=self._dtype) if add_to is None else add_to
        norm_weight, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        place = out.data_ptr()
        self._kernels.multiply(
            *(self._address, x.data_ptr(), x.stride(0), num_rows, norm_weight, eps),
            *(0 if add_to is None else place, place),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: indices int64 [T] -> [T, E]. Not for gated weights."""
        out = torch.empty((len(indices), self._in_size), dtype=self._dtype)
        self._kernels.embed(self._address, indices.data_ptr(), len(indices), out.data_ptr())
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
