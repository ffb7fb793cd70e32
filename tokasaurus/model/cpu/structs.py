"""The structs that Python fills and the C++ kernels read, field by field as in C++."""

import ctypes
from collections.abc import Mapping

from tokasaurus.messages.sampling import SAMPLING_DTYPE, SamplingParams


class PackedWeightsStruct(ctypes.Structure):
    """The struct PackedWeights of gemm.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("weight_type", "in_size", "out_size", "is_gated")),
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
    )


class PackedLayerStruct(ctypes.Structure):
    """The struct PackedLayer of forward.h."""

    _fields_ = (
        *((name, PackedWeightsStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("num_query_heads", "num_kv_heads", "head_dim")),
        ("eps", ctypes.c_double),
    )


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


_NUMBERS: dict[str, type[ctypes.c_float] | type[ctypes.c_int32]] = {"f": ctypes.c_float, "i": ctypes.c_int32}
"""The 4-byte types of SAMPLING_DTYPE, by NumPy's code of their kind."""


class SamplingParamsStruct(ctypes.Structure):
    """The struct SamplingParams of sampling.cpp: one row of SAMPLING_DTYPE."""

    _fields_ = tuple((name, _NUMBERS[SAMPLING_DTYPE[name].kind]) for name in SamplingParams._fields)


class LogitRulesStruct(ctypes.Structure):
    """The struct LogitRules of logit_rules.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rule_of_row", "tokens", "block_tables", "lengths")),
        *((name, ctypes.c_void_p) for name in ("num_request_tokens", "bias_starts", "bias_ids", "bias_values")),
        *((name, ctypes.c_int64) for name in ("page_size", "table_width")),
    )


class TokenMasksStruct(ctypes.Structure):
    """The struct TokenMasks of token_masks.h."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("index_of_row", "bits")), ("num_words", ctypes.c_int64))


class TopLogprobsStruct(ctypes.Structure):
    """The struct TopLogprobs of sampling.cpp."""

    _fields_ = (("count", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("index_of_row", "ids", "logprobs")))


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "PackedWeights": PackedWeightsStruct,
    "PackedLayer": PackedLayerStruct,
    "PagedPart": PagedPartStruct,
    "PagedForward": PagedForwardStruct,
    "SamplingParams": SamplingParamsStruct,
    "LogitRules": LogitRulesStruct,
    "TokenMasks": TokenMasksStruct,
    "TopLogprobs": TopLogprobsStruct,
}
"""Every struct, by its name in C++."""


class StructMismatch(Exception):
    """A struct has different sizes in Python and in the kernel library, which would read beyond its fields."""


def check_struct_sizes(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raises StructMismatch if a struct does not have the size that TOKA_STRUCT_SIZE (simd.h) exports for it."""
    for name, struct in structs.items():
        size_in_cpp = getattr(library, f"toka_size_of_{name}")
        size_in_cpp.restype = ctypes.c_int64
        if size_in_cpp() != ctypes.sizeof(struct):
            sizes = f"{size_in_cpp()} bytes in C++ and {ctypes.sizeof(struct)} in Python"
            raise StructMismatch(f"struct {name} has {sizes}; the fields of both must be the same")
