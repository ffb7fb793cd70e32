"""Run all layers of a forward in one call of the kernels (csrc/gemm/forward.cpp)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokasaurus.model.cpu.packed_weights import LayerKernels, PackedWeights
from tokasaurus.model.cpu.structs import PackedLayerStruct, PagedForwardStruct

# T tokens, E hidden size, D head size


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
