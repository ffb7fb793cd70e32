"""What the kernels read of a layer with a state (csrc/states), and the call that moves states on."""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.checkpoint.spec import GatedDeltaSpec, Mamba2Spec, StateSpec
from tokasaurus.model.cpu.bindings import STATE_KINDS, StateLayerStruct, StateSegmentsStruct, activation_code

MAX_CONV_SIZE = 8
"""Tokens that the longest convolution sees."""

# T tokens, F features, W numbers that enter the layer's last gemm


class StateKernels:
    """The library's function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.run = library.toka_run_states
        self.run.argtypes = [pointer, pointer, pointer, integer, pointer, integer, pointer]


def segments_struct(segments: tuple[NDArray[np.int32], ...]) -> StateSegmentsStruct:
    """segments: starts, num_tokens, sources, targets and chains of Segments, which must live as long."""
    assert all(array.flags.c_contiguous and array.dtype == np.int32 for array in segments)
    return StateSegmentsStruct(len(segments[4]) - 1, *(array.ctypes.data for array in segments))


class PackedState:
    """A rank's share of a layer, between its two linear layers."""

    def __init__(
        self,
        kernels: StateKernels,
        spec: StateSpec,
        num_parts: int,
        conv: Tensor,
        conv_bias: Tensor | None,
        vectors: Mapping[str, Tensor],
    ) -> None:
        """num_parts: the layer's heads are this many parts of all. conv: [channels, tokens]. vectors: as StateLayer has
        them."""
        self._kernels = kernels
        heads = keys = key_dim = value_dim = before_gate = 0
        eps = min_step = 0.0
        scales = (1.0,) * 5
        if isinstance(spec, GatedDeltaSpec):
            heads, keys = spec.num_value_heads // num_parts, spec.num_key_heads // num_parts
            key_dim, value_dim, eps = spec.key_dim, spec.value_dim, spec.eps
        elif isinstance(spec, Mamba2Spec):
            heads, keys = spec.num_heads // num_parts, spec.num_rank_groups(num_parts)
            key_dim, value_dim, eps, min_step = spec.state_size, spec.head_dim, spec.eps, spec.min_step
            before_gate, scales = int(spec.norm_before_gate), spec.scales
        self._owned = self._tensors(conv, conv_bias, vectors)
        self._width = heads * value_dim or len(conv)
        self.struct = StateLayerStruct(
            *(STATE_KINDS[type(spec)], heads, keys, key_dim, value_dim, len(conv), spec.conv_size),
            *(None if tensor is None else tensor.data_ptr() for tensor in self._owned),
            *(eps, min_step, before_gate, (ctypes.c_float * 5)(*scales), spec.num_numbers(num_parts)),
        )

    @staticmethod
    def _tensors(conv: Tensor, conv_bias: Tensor | None, vectors: Mapping[str, Tensor]) -> list[Tensor | None]:
        rates = vectors["A_log"].exp() if "A_log" in vectors else None
        tensors = conv.T, conv_bias, rates, *(vectors.get(name) for name in ("dt_bias", "D", "norm"))
        return [None if tensor is None else tensor.float().contiguous().clone() for tensor in tensors]

    def write(self, conv: Tensor, conv_bias: Tensor | None, vectors: Mapping[str, Tensor]) -> None:
        """Replace all weights, in place."""
        for own, new in zip(self._owned, self._tensors(conv, conv_bias, vectors), strict=True):
            if own is not None and new is not None:
                own.copy_(new)

    @staticmethod
    def computes(spec: StateSpec, num_parts: int) -> bool:
        """Whether the kernels compute such a layer, divided into so many parts."""
        is_divided = isinstance(spec, Mamba2Spec) and spec.has_norm and spec.num_groups == 1 and num_parts > 1
        return spec.conv_size <= MAX_CONV_SIZE and not is_divided  # ranks would sum between two parts of the kernel

    def mix(self, features: Tensor, memory: Tensor, segments: tuple[NDArray[np.int32], ...]) -> Tensor:
        """features [T, F] -> [T, W], 0 for tokens of no segment. memory: float32 [rows, numbers], which is changed.
        segments: as of segments_struct."""
        assert features.is_contiguous()
        out = torch.empty((len(features), self._width), dtype=features.dtype)
        struct = segments_struct(segments)
        self._kernels.run(
            *(ctypes.addressof(self.struct), ctypes.addressof(struct), memory.data_ptr(), activation_code(features)),
            *(features.data_ptr(), len(features), out.data_ptr()),
        )
        return out
