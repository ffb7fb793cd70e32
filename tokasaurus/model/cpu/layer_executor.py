"""Run all layers of a forward in one call of the kernels (csrc/gemm/forward.cpp)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokasaurus.model.cpu.packed_weights import LayerKernels, PackedWeights, PackedWeightsStruct

# T tokens, E hidden size, D head size


class PagedPartStruct(ctypes.Structure):
    """The struct PagedPart of attention_partition.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "num_segments")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "block_table")),
        ("table_stride", ctypes.c_int64),
        ("kv_lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("is_causal", "is_partial")),
    )


class PagedForwardStruct(ctypes.Structure):
    """The struct PagedForward of attention_layout.h."""

    _fields_ = (
        ("cache_type", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_size", "page_size")),
        ("kv_indices", ctypes.c_void_p),
        ("parts", ctypes.POINTER(PagedPartStruct)),
        ("num_parts", ctypes.c_int64),
        ("prefix", ctypes.POINTER(PagedPartStruct)),
    )


class _PackedLayerStruct(ctypes.Structure):
    """The struct PackedLayer of forward.cpp."""

    _fields_ = (
        *((name, PackedWeightsStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("num_query_heads", "num_kv_heads", "head_dim")),
        ("eps", ctypes.c_double),
    )


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

    def struct(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> _PackedLayerStruct:
        weights = (self.qkv, self.out, self.gate_up, self.down)
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        return _PackedLayerStruct(
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
        self._structs = (_PackedLayerStruct * len(structs))(*structs)

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
