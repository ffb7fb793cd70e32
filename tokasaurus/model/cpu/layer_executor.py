"""Weights packed for the kernels, gemms with them, and all layers of a forward in one call (csrc/gemm)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tokasaurus.model.cpu.bindings import (
    ACTIVATION_DTYPES,
    HugePageTensors,
    Kernels,
    PackedLayerStruct,
    PackedWeightsStruct,
    PagedForwardStruct,
    activation_code,
)

# T tokens, E hidden size or input size, O output size, D head size


class LayerKernels:
    """The library's functions that use packed weights, and the memory for packed weights."""

    def __init__(self, kernels: Kernels) -> None:
        self.weights = HugePageTensors()
        self.panel_size = kernels.panel_size
        self.activation_dtype = kernels.activation_dtype
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library = kernels.library
        self.pack = library.toka_pack
        self.pack.argtypes = [pointer, pointer, pointer]
        self.multiply = library.toka_multiply
        self.multiply.argtypes = [pointer, pointer, integer, integer, pointer, ctypes.c_double, pointer]
        self.embed = library.toka_embed
        self.embed.argtypes = [pointer, pointer, integer, pointer]
        self.run_layers = library.toka_run_layers
        self.run_layers.argtypes = [pointer, integer, pointer, integer, pointer, pointer]
        self.reserve_forward = library.toka_reserve_forward
        self.reserve_forward.argtypes = [pointer, integer]


class PackedWeights:
    """The weight [O, E] of a linear layer, and its bias [O], copied into the layout that the kernels read.

    is_gated: the weight is [2 O, E], gate rows before up rows, and the layer computes silu(gate) * up, [O].
    """

    def __init__(self, kernels: LayerKernels, weight: Tensor, bias: Tensor | None, is_gated: bool = False) -> None:
        assert takes(weight)
        assert bias is None or not is_gated, "no model has a gated layer with a bias"
        self._kernels = kernels
        self.activation_dtype = kernels.activation_dtype(weight.dtype)
        self._in_size = weight.shape[1]
        self._out_size = weight.shape[0] // 2 if is_gated else weight.shape[0]
        panel_width = kernels.panel_size // 2 if is_gated else kernels.panel_size  # outputs of a panel
        num_panels = -(-self._out_size // panel_width)
        self._panels = kernels.weights.empty((num_panels * kernels.panel_size, self._in_size), weight.dtype)
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = functional.pad(bias.float(), (0, -self._out_size % panel_width))
        self.struct = PackedWeightsStruct(
            activation_code(weight),
            self._in_size,
            self._out_size,
            is_gated,
            self._panels.data_ptr(),
            _pointer(self._bias),
        )
        plain = weight.contiguous()
        kernels.pack(ctypes.byref(self.struct), plain.data_ptr(), self._panels.data_ptr())

    def multiply(self, x: Tensor, norm: tuple[Tensor, float] | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, E] in the activation dtype, any row stride -> [T, O].

        norm: weight, float32 [E], and epsilon of an RMS norm applied to x first. out: contiguous [T, O] to fill and
        return.
        """
        assert x.stride(1) == 1
        assert x.dtype == self.activation_dtype
        if out is None:
            out = torch.empty((x.shape[0], self._out_size), dtype=self.activation_dtype)
        norm_weight, eps = (None, 0.0) if norm is None else norm
        self._kernels.multiply(
            *(ctypes.byref(self.struct), x.data_ptr(), x.stride(0), x.shape[0]),
            *(_pointer(norm_weight), eps, out.data_ptr()),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: indices int64 [T] -> [T, E] in the activation dtype. Not for gated weights."""
        out = torch.empty((len(indices), self._in_size), dtype=self.activation_dtype)
        self._kernels.embed(ctypes.byref(self.struct), indices.data_ptr(), len(indices), out.data_ptr())
        return out


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer's weights."""

    qkv: PackedWeights
    out: PackedWeights
    gate_up: PackedWeights
    down: PackedWeights
    attention_norm: Tensor
    """float32 [E], weight of the norm before attention."""

    mlp_norm: Tensor
    """float32 [E], weight of the norm before the feed-forward."""

    query_norm: Tensor | None
    """float32 [D], weight of the norm over each query head; None without."""

    key_norm: Tensor | None
    """float32 [D], weight of the norm over each key head; None without."""

    def struct(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> PackedLayerStruct:
        weights = (self.qkv, self.out, self.gate_up, self.down)
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        return PackedLayerStruct(
            *(packed.struct for packed in weights),
            *(0 if norm is None else norm.data_ptr() for norm in norms),
            *(num_heads, num_kv_heads, head_dim, eps),
        )


class PackedLayers:
    """The layers of a pipeline stage. Without tensor parallelism, which would have to sum over ranks between gemms."""

    def __init__(
        self,
        kernels: LayerKernels,
        layers: Sequence[PackedLayer],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> None:
        self._kernels = kernels
        self._layers = tuple(layers)  # they own what the structs point to
        structs = [layer.struct(num_heads, num_kv_heads, head_dim, eps) for layer in layers]
        self._structs = (PackedLayerStruct * len(structs))(*structs)

    def run(self, hidden: Tensor, cos_sin: Tensor, paged: PagedForwardStruct) -> None:
        """Run all layers on hidden [T, E], contiguous and in the activation dtype, in place.

        cos_sin: float32 [T, 1, D], from RotaryTable. paged: the KV cache, with as many layers as these, and the planned
        layout of the T tokens.
        """
        assert hidden.is_contiguous()
        assert hidden.dtype == self._layers[0].qkv.activation_dtype
        assert cos_sin.is_contiguous()
        self._kernels.run_layers(
            *(ctypes.addressof(self._structs), len(self._structs), ctypes.addressof(paged)),
            *(hidden.shape[0], cos_sin.data_ptr(), hidden.data_ptr()),
        )

    def reserve(self, num_rows: int) -> None:
        """Allocate and touch the memory that forwards of up to num_rows tokens keep between calls."""
        self._kernels.reserve_forward(ctypes.addressof(self._structs), num_rows)


def takes(weight: Tensor) -> bool:
    """Whether the kernels support this weight [O, E]."""
    has_whole_pairs = weight.dtype == torch.float32 or weight.shape[1] % 2 == 0
    return weight.device.type == "cpu" and weight.dtype in ACTIVATION_DTYPES and has_whole_pairs


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
