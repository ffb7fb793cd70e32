"""All decoder layers of a forward in one call of the CPU kernels (csrc/gemm/forward.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokasaurus.checkpoint.spec import AttentionSpec, ExpertsSpec, LayerSpec
from tokasaurus.model.cpu.bindings import (
    ACTIVATIONS,
    HEAD_NORMS,
    NormStruct,
    PackedLayerStruct,
    PackedWeightsStruct,
    PagedForwardStruct,
    StateSegmentsStruct,
)
from tokasaurus.model.cpu.experts import PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedNorm, PackedWeights
from tokasaurus.model.cpu.low_rank import PackedAdapters
from tokasaurus.model.cpu.states import PackedState

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
    state: PackedState | None = None
    """In place of attention, between qkv and out."""
    gate: PackedWeights | None = None
    """Of what is attended."""

    def struct(self) -> PackedLayerStruct:
        attention, mlp = self.spec.attention, self.mlp
        own = (
            (*(packed.struct for packed in mlp), None)
            if isinstance(mlp, tuple)
            else (PackedWeightsStruct(), PackedWeightsStruct(), ctypes.pointer(mlp.struct))
        )
        return PackedLayerStruct(
            *(self.qkv.struct, self.out.struct, *own),
            *(NormStruct() if norm is None else norm.struct for norm in self.norms),
            *((0, 0, 0, 0, -1, -1, 0) if attention is None else self._of_attention(attention)),
            *(self.spec.is_parallel, 0 if attention is None else attention.clip or 0, self.spec.residual_multiplier),
            *(None if adapters is None else adapters.address for adapters in self.adapters),
            *(None if self.state is None else ctypes.addressof(self.state.struct), None),
            None if self.gate is None else ctypes.pointer(self.gate.struct),
        )

    def _of_attention(self, attention: AttentionSpec) -> tuple[int, ...]:
        rotary = self.rotary if attention.query_rotary is None else attention.query_rotary
        sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
        norms = HEAD_NORMS[attention.norm_over, attention.norm_by_head]
        return norms, *sizes, rotary, self.rotary, attention.norms_after_rotary


class PackedLayers:
    """The layers of a pipeline stage. Without tensor parallelism, which would have to sum over ranks between gemms."""

    @staticmethod
    def computes(layer: LayerSpec) -> bool:
        """Whether the kernels compute such a layer."""
        if layer.mlp is None or (layer.attention is None) == (layer.state is None):
            return False
        mlp = layer.mlp.expert if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
        return mlp.activation in ACTIVATIONS

    def __init__(self, kernels: LayerKernels, layers: Sequence[PackedLayer]) -> None:
        self._kernels = kernels
        self._layers = tuple(layers)  # they own what the structs point to
        structs = [layer.struct() for layer in layers]
        self.structs = (PackedLayerStruct * len(structs))(*structs)

    def run(
        self,
        hidden: Tensor,
        cos_sin: Tensor,
        paged: PagedForwardStruct,
        row_adapters: Tensor | None = None,
        segments: StateSegmentsStruct | None = None,
    ) -> None:
        """Run all layers on hidden [T, E], contiguous and in the activation dtype, in place.

        cos_sin: float32 [T, tables, D], from RotaryTable. paged: the KV cache, with as many layers as have attention,
        and the planned layout of the T tokens. row_adapters: int32 [T], the number of each token's, or 0. segments: of
        layers with states.
        """
        assert hidden.is_contiguous()
        assert hidden.dtype == self._layers[0].qkv.activation_dtype
        assert cos_sin.is_contiguous()
        self._kernels.run_layers(
            *(ctypes.addressof(self.structs), len(self.structs), ctypes.addressof(paged)),
            *(hidden.shape[0], cos_sin.data_ptr(), cos_sin.shape[1]),
            None if row_adapters is None else row_adapters.data_ptr(),
            *(None if segments is None else ctypes.addressof(segments), hidden.data_ptr()),
        )

    def place_states(self, memory: Sequence[Tensor]) -> None:
        """The memory of the layers with states, in order: float32 [rows, numbers]."""
        own = (struct for struct in self.structs if struct.state)
        for struct, rows in zip(own, memory, strict=True):
            struct.states = rows.data_ptr()

    def reserve(self, num_rows: int) -> None:
        """Allocate and touch the memory that forwards of up to num_rows tokens keep between calls."""
        self._kernels.reserve_forward(ctypes.addressof(self.structs), len(self.structs), num_rows)
