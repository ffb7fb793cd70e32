"""All decoder layers of a forward in one call of the CPU kernels (csrc/gemm/forward.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokasaurus.checkpoint.spec import ExpertsSpec, LayerSpec
from tokasaurus.model.cpu.bindings import (
    ACTIVATIONS,
    HEAD_NORMS,
    NormStruct,
    PackedLayerStruct,
    PackedWeightsStruct,
    PagedForwardStruct,
)
from tokasaurus.model.cpu.experts import PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedNorm, PackedWeights
from tokasaurus.model.cpu.low_rank import PackedAdapters

# T tokens, E hidden size, D head size


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer: what it computes, and its weights."""

    spec: LayerSpec
    rotary: int
    """Index of the keys' table of cosines and sines, and the queries' unless the spec has another; -1: none."""
    qkv: PackedWeights
    out: PackedWeights
    mlp: tuple[PackedWeights, PackedWeights] | PackedExperts
    """gate_up and down, or experts with their router."""
    norms: tuple[PackedNorm | None, ...]
    """Before attention and before the MLP, after attention and after the MLP, of queries and of keys."""
    adapters: tuple[PackedAdapters | None, ...] = (None,) * 4
    """Of qkv, out, gate_up and down; None: no adapter adds to it."""

    def struct(self) -> PackedLayerStruct:
        attention, mlp = self.spec.own_attention, self.mlp
        own = (
            (*(packed.struct for packed in mlp), None)
            if isinstance(mlp, tuple)
            else (PackedWeightsStruct(), PackedWeightsStruct(), ctypes.pointer(mlp.struct))
        )
        return PackedLayerStruct(
            *(self.qkv.struct, self.out.struct, *own),
            *(NormStruct() if norm is None else norm.struct for norm in self.norms),
            HEAD_NORMS[attention.norm_over, attention.norm_by_head],
            *(attention.num_heads, attention.num_kv_heads, attention.head_dim),
            self.rotary if attention.query_rotary is None else attention.query_rotary,
            *(self.rotary, attention.norms_after_rotary, self.spec.is_parallel),
            *(attention.clip or 0, self.spec.residual_multiplier),
            *(None if adapters is None else adapters.address for adapters in self.adapters),
        )


class PackedLayers:
    """The layers of a pipeline stage. Without tensor parallelism, which would have to sum over ranks between gemms."""

    @staticmethod
    def computes(layer: LayerSpec) -> bool:
        """Whether the kernels compute such a layer."""
        if layer.attention is None or layer.mlp is None or layer.state is not None or layer.attention.has_out_gate:
            return False
        mlp = layer.mlp.expert if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
        return mlp.activation in ACTIVATIONS

    def __init__(self, kernels: LayerKernels, layers: Sequence[PackedLayer]) -> None:
        self._kernels = kernels
        self._layers = tuple(layers)  # they own what the structs point to
        structs = [layer.struct() for layer in layers]
        self.structs = (PackedLayerStruct * len(structs))(*structs)

    def run(
        self, hidden: Tensor, cos_sin: Tensor, paged: PagedForwardStruct, row_adapters: Tensor | None = None
    ) -> None:
        """Run all layers on hidden [T, E], contiguous and in the activation dtype, in place.

        cos_sin: float32 [T, tables, D], from RotaryTable. paged: the KV cache, with as many layers as these, and the
        planned layout of the T tokens. row_adapters: int32 [T], the number of each token's, or 0.
        """
        assert hidden.is_contiguous()
        assert hidden.dtype == self._layers[0].qkv.activation_dtype
        assert cos_sin.is_contiguous()
        self._kernels.run_layers(
            *(ctypes.addressof(self.structs), len(self.structs), ctypes.addressof(paged)),
            *(hidden.shape[0], cos_sin.data_ptr(), cos_sin.shape[1]),
            *(None if row_adapters is None else row_adapters.data_ptr(), hidden.data_ptr()),
        )

    def reserve(self, num_rows: int) -> None:
        """Allocate and touch the memory that forwards of up to num_rows tokens keep between calls."""
        self._kernels.reserve_forward(ctypes.addressof(self.structs), len(self.structs), num_rows)
