"""Python bindings of the C++ kernels, for torch tensors: the structs that both sides know, the functions, and memory in
huge pages for data that every step reads from end to end."""

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import Activation, GatedDeltaSpec, Mamba2Spec, RouterScores, ShortConvSpec, StateSpec
from tokasaurus.messages.forward import FORWARD_PHASES
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.cpu.build import (
    PLAIN_TORCH,
    InstructionSet,
    LibraryUnavailable,
    choose_set,
    find_or_build,
    kernel_library,
    machine_sets,
)
from tokasaurus.monitoring.cores import lower_thread_priority

logger = logging.getLogger(__name__)

ELEMENT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""The code by which the kernels know a dtype: ElementType in element_type.h."""

KV_CACHE_DTYPES = tuple(ELEMENT_CODES)
"""Dtypes of KV caches that the kernels support."""

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights, activations and logits that the kernels support."""

BLOCK_TYPES = {
    **{"Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8},
    **{"I4_32": 9, "I4_64": 10, "I4_128": 11, "I8": 12, "MXFP4": 13},
}
"""The code by which the kernels know a type of quantised blocks (BlockType in blocks.h), which checkpoint/block_types
describes."""

ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4}
"""The code by which the kernels know what is applied to outputs: ActivationFunction in gemm.h."""

NORM_KINDS = {None: 0, "rms": 1, "layer": 2}
"""The code by which the kernels know a NormSpec's kind; None: no norm. NormKind in norm.h."""

ROUTER_SCORES: dict[RouterScores, int] = {
    **{"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2, "sparsemixer": 3, "sigmoid_of_chosen": 4}
}
"""The code by which the kernels know a router's scores: RouterScores in experts.h."""

HEAD_NORMS = {("head", False): 0, ("head", True): 1, ("width", False): 2}
"""The code by which the kernels know norm_over and norm_by_head of an AttentionSpec: HeadNorms in forward.h."""

_HUGE_PAGE = 2 * 1024 * 1024
"""With pages of 4 KiB, address translation alone takes a tenth of a step's time."""
_CHUNK_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 64
_libc = ctypes.CDLL(None, use_errno=True)


class PackedWeightsStruct(ctypes.Structure):
    """The struct PackedWeights of gemm.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("weight_type", "in_size", "out_size", "is_gated")),
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "blocks")),
        *((name, ctypes.c_int64) for name in ("is_int8", "activation")),
        *((name, ctypes.c_double) for name in ("gate_limit", "gate_alpha", "up_offset")),
    )


class LowRankStruct(ctypes.Structure):
    """The struct LowRank of gemm.h."""

    _fields_ = (
        *(("down", ctypes.c_void_p), ("num_ranks", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("up", "panels")),
    )


class NormStruct(ctypes.Structure):
    """The struct Norm of norm.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_double),
    )


class ExpertsStruct(ctypes.Structure):
    """The struct Experts of experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_experts", "num_chosen")),
        *((name, ctypes.POINTER(PackedWeightsStruct)) for name in ("gate_up", "down")),
        ("router", PackedWeightsStruct),
        ("scores", ctypes.c_int64),
        ("choice_bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_groups", "num_chosen_groups", "normalizes")),
        *((name, ctypes.c_double) for name in ("min_sum", "scale", "jitter")),
        *((name, PackedWeightsStruct) for name in ("shared_gate_up", "shared_down")),
        ("gates_shared", ctypes.c_int64),
        ("weighs_inputs", ctypes.c_int64),
        ("recorded", ctypes.c_void_p),
    )


class PackedLayerStruct(ctypes.Structure):
    """The struct PackedLayer of forward.h."""

    _fields_ = (
        *((name, PackedWeightsStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, NormStruct) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("head_norms", "num_query_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("query_rotary", "rotary", "norms_after_rotary", "is_parallel")),
        *((name, ctypes.c_double) for name in ("clip", "residual_multiplier")),
        *((f"{name}_adapters", ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("state", "states")),
        ("gate", ctypes.POINTER(PackedWeightsStruct)),
    )


class PagedPartStruct(ctypes.Structure):
    """The struct PagedPart of attention_partition.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "num_segments")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "block_table")),
        ("table_stride", ctypes.c_int64),
        ("kv_lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("is_causal", "is_partial")),
        ("tokens_after", ctypes.c_void_p),
    )


class LayerScoresStruct(ctypes.Structure):
    """The struct LayerScores of attention_partition.h."""

    _fields_ = (
        *(("scale", ctypes.c_double), ("softcap", ctypes.c_double), ("window", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("sinks", "blocks")),
        ("place", ctypes.c_int64),
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
        ("scores", ctypes.POINTER(LayerScoresStruct)),
    )


_NUMBERS: dict[str, type[ctypes.c_float] | type[ctypes.c_int32]] = {"f": ctypes.c_float, "i": ctypes.c_int32}
"""The 4-byte types of SAMPLING_DTYPE, by NumPy's code of their kind."""


class SamplingParamsStruct(ctypes.Structure):
    """The struct SamplingParams of sampling.h: one row of SAMPLING_DTYPE."""

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
    """The struct TopLogprobs of sampling.h."""

    _fields_ = (("count", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("index_of_row", "ids", "logprobs")))


class DecodeStepStruct(ctypes.Structure):
    """The struct DecodeStep of decode_step.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("activation_type", "num_layers", "head_dim", "num_tables")),
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "embedding_rows")),
        ("embedding_scale", ctypes.c_double),
        ("final_norm", NormStruct),
        *((name, ctypes.c_double) for name in ("logit_scale", "logit_softcap")),
        *((name, ctypes.c_void_p) for name in ("cos_sin_of_position", "positions", "block_tables")),
        ("table_width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("last_tokens", "cached_tokens", "sequence_keys")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("slots", "row_adapters", "segments", "sampling_params", "forward")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "kv_indices")),
        *((name, ctypes.c_void_p) for name in ("noise_keys", "kv_lengths", "cos_sin", "hidden", "logits", "sampled")),
    )


STATE_KINDS: dict[type[StateSpec], int] = {GatedDeltaSpec: 0, ShortConvSpec: 1, Mamba2Spec: 2}
"""Codes of StateKind in states.h."""


class StateLayerStruct(ctypes.Structure):
    """The struct StateLayer of states.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "num_heads", "num_keys", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("num_channels", "conv_size")),
        *((name, ctypes.c_void_p) for name in ("conv", "conv_bias", "rates", "step_bias", "skip", "norm")),
        *((name, ctypes.c_double) for name in ("eps", "min_step")),
        ("norm_before_gate", ctypes.c_int64),
        ("scales", ctypes.c_float * 5),
        ("row_size", ctypes.c_int64),
    )


class StateSegmentsStruct(ctypes.Structure):
    """The struct StateSegments of states.h."""

    _fields_ = (
        ("num_chains", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "num_tokens", "sources", "targets", "chains")),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Norm": NormStruct,
    "PackedWeights": PackedWeightsStruct,
    "LowRank": LowRankStruct,
    "Experts": ExpertsStruct,
    "PackedLayer": PackedLayerStruct,
    "PagedPart": PagedPartStruct,
    "PagedForward": PagedForwardStruct,
    "LayerScores": LayerScoresStruct,
    "SamplingParams": SamplingParamsStruct,
    "LogitRules": LogitRulesStruct,
    "TokenMasks": TokenMasksStruct,
    "TopLogprobs": TopLogprobsStruct,
    "DecodeStep": DecodeStepStruct,
    "StateLayer": StateLayerStruct,
    "StateSegments": StateSegmentsStruct,
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


def activation_code(tensor: Tensor) -> int:
    """The element code of weights, activations or logits."""
    assert tensor.dtype in ACTIVATION_DTYPES, f"the kernels do not support activations of {tensor.dtype}"
    return ELEMENT_CODES[tensor.dtype]


def cache_code(cache: Tensor) -> int:
    """The element code of a KV cache."""
    return ELEMENT_CODES[cache.dtype]


class Kernels:
    """The functions of the built library.

    Precondition of all: tensors are on the CPU and have the documented shapes, which are not checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        check_struct_sizes(self._library, STRUCTS)
        constants = (
            "toka_max_head_dim",
            "toka_max_group",
            "toka_panel_size",
            "toka_max_expert_rows",
            "toka_max_tiled_rows",
            "toka_has_bfloat16_arithmetic",
            "toka_rank_multiple",
        )
        for name in constants:
            getattr(self._library, name).restype = ctypes.c_int64
        self.max_head_dim: int = self._library.toka_max_head_dim()
        self.max_group: int = self._library.toka_max_group()
        self.panel_size: int = self._library.toka_panel_size()
        self.max_expert_rows: int = self._library.toka_max_expert_rows()
        self.max_tiled_rows: int = self._library.toka_max_tiled_rows()
        self.rank_multiple: int = self._library.toka_rank_multiple()
        self.has_bfloat16_arithmetic = bool(self._library.toka_has_bfloat16_arithmetic())
        self._phase_seconds = (ctypes.c_double * len(FORWARD_PHASES))()
        self.set_num_threads(torch.get_num_threads())
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._library.toka_attend.argtypes = [
            *(integer, integer, pointer, integer, pointer, pointer, pointer, pointer, *(integer,) * 4, pointer)
        ]
        self._library.toka_attend_layout.argtypes = [
            *(integer, pointer, integer, pointer, pointer, integer, integer, integer, integer, integer)
        ]
        self._library.toka_merge.argtypes = [integer, *(pointer,) * 5, integer, integer]
        self._library.toka_write_kv.argtypes = [
            *(integer, integer, pointer, pointer, integer, integer, pointer, integer, pointer, pointer, *(integer,) * 3)
        ]
        self._library.toka_sample.argtypes = [integer, pointer, integer, integer, *(pointer,) * 8]
        self._library.toka_decode_step.argtypes = [pointer]
        self._library.toka_reserve_adapters.argtypes = [integer, integer, integer]
        self._library.toka_token_logprobs.argtypes = [
            *(integer, pointer, integer, integer, pointer, pointer, pointer, integer, pointer, pointer)
        ]

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the activations that gemms read and write, given the dtype of the weights."""
        if weight_dtype == torch.bfloat16 and not self.has_bfloat16_arithmetic:
            return torch.float32
        return weight_dtype

    def set_num_threads(self, num_threads: int) -> None:
        """Set the number of threads of all kernels."""
        self._library.toka_set_num_threads(ctypes.c_int64(num_threads))

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        part: PagedPartStruct,
        is_partial: bool,
        page_size: int,
        scores: LayerScoresStruct,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one part -> output [rows, H, D], float32 if partial, and LSE, float32 [rows, H].

        query: [rows, H, D], any row stride. cache: one layer's, [blocks, K, 2, ...].
        """
        num_rows, num_heads, head_dim = query.shape
        assert query.stride()[1:] == (head_dim, 1), "a row's heads lie together"
        output_dtype = torch.float32 if is_partial else query.dtype
        output = torch.empty((num_rows, num_heads, head_dim), dtype=output_dtype)
        lse = torch.empty((num_rows, num_heads), dtype=torch.float32)
        self._library.toka_attend(
            *(activation_code(query), cache_code(cache), query.data_ptr(), query.stride(0)),
            *(output.data_ptr(), lse.data_ptr(), cache.data_ptr(), ctypes.addressof(part)),
            *(num_heads, cache.shape[1], head_dim, page_size, ctypes.addressof(scores)),
        )
        return output, lse

    def attend_layout(self, query: Tensor, layer_index: int, forward: PagedForwardStruct, num_kv_heads: int) -> Tensor:
        """Attention of a whole layout -> [T, H, D]; 0 for padding.

        query: [T, H, D], any row stride.
        """
        num_rows, num_heads, head_dim = query.shape
        assert query.stride()[1:] == (head_dim, 1), "a row's heads lie together"
        output = torch.empty((num_rows, num_heads, head_dim), dtype=query.dtype)
        self._library.toka_attend_layout(
            *(activation_code(query), query.data_ptr(), query.stride(0), output.data_ptr()),
            *(ctypes.addressof(forward), layer_index, num_rows, num_heads, num_kv_heads, head_dim),
        )
        return output

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], output: Tensor) -> Tensor:
        """Two outputs float32 [R, H, D] with LSE float32 [R, H] -> `output` [R, H, D], filled. All are contiguous."""
        assert all(tensor.is_contiguous() for tensor in (*first, *second, output)), "outputs of attend are contiguous"
        assert output.shape == first[0].shape == second[0].shape
        num_rows, num_heads, head_dim = output.shape
        self._library.toka_merge(
            *(activation_code(output), first[0].data_ptr(), first[1].data_ptr()),
            *(second[0].data_ptr(), second[1].data_ptr(), output.data_ptr(), num_rows * num_heads, head_dim),
        )
        return output

    def write_kv(
        self, key: Tensor, value: Tensor, kv_indices: Tensor, cache: Tensor, page_size: int, blocks: int | None = None
    ) -> None:
        """Write key and value [T, K, D], any row stride, into one layer's cache at kv_indices, int64 [T]. blocks: as in
        LayerScores."""
        num_tokens, num_kv_heads, head_dim = key.shape
        assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1), "a row's heads lie together"
        self._library.toka_write_kv(
            *(
                activation_code(key),
                cache_code(cache),
                key.data_ptr(),
                value.data_ptr(),
                key.stride(0),
                value.stride(0),
            ),
            *(kv_indices.data_ptr(), num_tokens, cache.data_ptr(), blocks),
            *(num_kv_heads, head_dim, page_size),
        )

    def reserve_adapters(self, num_rows: int, max_rank: int, dtype: torch.dtype) -> None:
        """Allocate what adapters of up to max_rank keep between gemms of up to num_rows rows. dtype: of activations."""
        num_ranks = 3 * -(-max_rank // self.rank_multiple) * self.rank_multiple  # of queries, keys and values
        self._library.toka_reserve_adapters(num_rows, num_ranks, int(dtype == torch.bfloat16))

    def phase_seconds(self) -> tuple[float, ...]:
        """Seconds that each of FORWARD_PHASES has taken since `reset_phases`."""
        self._library.toka_phase_seconds(self._phase_seconds)
        return tuple(self._phase_seconds)

    def reset_phases(self) -> None:
        self._library.toka_reset_phases()

    @property
    def library(self) -> ctypes.CDLL:
        """The loaded library, for modules that bind further functions."""
        return self._library

    def sample(
        self,
        logits: Tensor,
        params: Tensor,
        noise_keys: Tensor,
        rules: LogitRulesStruct | None,
        masks: tuple[Tensor, Tensor] | None,
        as_sampled: Tensor | None,
        tokens: Tensor,
        logprobs: Tensor | None,
        top: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Sample from logits [R, V], contiguous, into tokens int64 [R] and, unless None, logprobs float32 [R].

        params, noise_keys: as device_params and noise_keys of SamplingRows, contiguous.
        masks: index_of_row int32 [R], each row's index among the A rows with a mask, or -1; and the masks, int32
        [A, words].
        as_sampled: bool [R], rows whose logprobs are of the distribution that tokens are drawn from; None for no row.
        Requires logprobs.
        top: index_of_row int32 [R], each row's index among the A rows that want top-k logprobs, or -1; and the outputs,
        ids int32 [A, K] and logprobs float32 [A, K]. Requires logprobs.
        """
        num_rows, vocab_size = logits.shape
        masks_struct = None
        if masks is not None:
            masks_struct = TokenMasksStruct(*(tensor.data_ptr() for tensor in masks), masks[1].shape[1])
        assert logprobs is not None or as_sampled is None, "these are logprobs"
        top_struct = None
        if top is not None:
            assert logprobs is not None, "top-k logprobs require logprobs of the sampled tokens"
            assert top[1].shape[1] <= vocab_size, "k must not exceed the vocabulary"
            top_struct = TopLogprobsStruct(top[1].shape[1], *(tensor.data_ptr() for tensor in top))
        self._library.toka_sample(
            *(activation_code(logits), logits.data_ptr(), num_rows, vocab_size),
            *(params.data_ptr(), noise_keys.data_ptr()),
            *(None if struct is None else ctypes.addressof(struct) for struct in (rules, masks_struct)),
            None if as_sampled is None else as_sampled.data_ptr(),
            *(tokens.data_ptr(), 0 if logprobs is None else logprobs.data_ptr()),
            None if top_struct is None else ctypes.addressof(top_struct),
        )

    def decode_step(self, step: DecodeStepStruct) -> None:
        """Compute a decode step, whose fields point to all that it reads and fills."""
        self._library.toka_decode_step(ctypes.addressof(step))

    def fill_token_logprobs(
        self, logits: Tensor, target_ids: Tensor, logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor
    ) -> None:
        """Fill the other arguments, as in prompt_logprobs.TokenLogprobs, from logits [Q, V] and target_ids int32 [Q].

        All are contiguous.
        """
        num_rows, vocab_size = logits.shape
        assert top_ids.shape[1] <= vocab_size, "k must not exceed the vocabulary"
        self._library.toka_token_logprobs(
            *(activation_code(logits), logits.data_ptr(), num_rows, vocab_size),
            *(target_ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr()),
            *(top_ids.shape[1], top_ids.data_ptr(), top_logprobs.data_ptr()),
        )


@functools.cache
def load_kernels(cpu_isa: str | None = None) -> Kernels | None:
    """The kernels for an instruction set of this machine (None: the best), built if they have not been built yet.

    Returns None for cpu_isa=torch and, after one warning line, if there are no kernels for this machine. Raises
    UserError if the kernels that cpu_isa asks for are unavailable.
    """
    if cpu_isa == PLAIN_TORCH:
        return None
    try:
        supported = machine_sets()
        chosen = choose_set(cpu_isa, supported)
        if chosen is None:
            raise LibraryUnavailable("they need AVX2 and FMA, or NEON")
        return _load_first([chosen] if cpu_isa is not None else supported)
    except LibraryUnavailable as error:
        if cpu_isa is not None:
            raise FlagRefused(f"cpu_isa={cpu_isa}: no CPU kernels: {error}") from error
        logger.warning("no CPU kernels; using plain torch, which is slower: %s", error)
        return None


def _load_first(levels: Sequence[InstructionSet]) -> Kernels:
    """Kernels of the first instruction set whose library can be built: an old compiler may not know the newest.

    Raises LibraryUnavailable, for the first set, if none can be built."""
    first_error: LibraryUnavailable | None = None
    for level in levels:
        try:
            return Kernels(find_or_build(kernel_library(level)))
        except LibraryUnavailable as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def allocate_huge_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros; the system provides memory at first use, in huge pages where possible.

    Raises OSError if the system cannot reserve num_bytes.
    """
    memory = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def give_back(memory: Tensor) -> None:
    """Return the whole pages of `memory`, contiguous, to the system. They are zero afterwards, and provided again at
    their next use. Raises OSError."""
    page = mmap.PAGESIZE
    start, end = -(-memory.data_ptr() // page) * page, (memory.data_ptr() + memory.nbytes) // page * page
    if start < end and _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def touch_in_background(memory: Tensor, kernels: Kernels, num_threads: int) -> list[threading.Thread]:
    """Touch all of `memory`, contiguous [A, B], so that the system provides it; returns the running threads.

    The order is the first 2 MiB of each of the A areas, then the next 2 MiB of each, and so on. The threads have low
    priority and end with the process. The memory may be used meanwhile: touching it does not change its contents.
    """
    touch = kernels.library.toka_touch
    touch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    num_taken = ctypes.c_int64(0)

    def run() -> None:
        lower_thread_priority()
        touch(memory.data_ptr(), len(memory), memory[0].nbytes, ctypes.byref(num_taken))

    threads = [threading.Thread(target=run, name="touch", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads


class HugePageTensors:
    """Allocates tensors in consecutive memory, so that small ones share huge pages.

    A chunk of memory is freed when all of its tensors are.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to 64 bytes."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._rest):
            self._rest = allocate_huge_pages(max(num_bytes, _CHUNK_BYTES))
        memory = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return memory.view(dtype).view(shape)
