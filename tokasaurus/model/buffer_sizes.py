"""Sizes of the buffers that a worker allocates, in numbers alone: `toka plan` counts them without torch, and the
modules that allocate them take them from here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import WindowGroups

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a number by its dtype."""

_SCALE_BYTES = {"int8": 2}
"""Bytes of the scale of a token's keys or values in a KV head, by the dtype of the KV cache."""


@dataclass(frozen=True, slots=True)
class KVSizes:
    """One worker's KV cache in numbers: only the layers and heads of this worker."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    block_layers: int = field(default=0, kw_only=True)
    """Most layers of a group: a block has the keys and values of so many. 0: there is one group, of all layers."""

    def block_bytes(self, dtype: str) -> int:
        """Bytes of a block in a cache of this dtype: keys and values of `page_size` tokens in the layers of a group."""
        head_bytes = self.head_dim * ITEM_BYTES[dtype] + _SCALE_BYTES.get(dtype, 0)
        return 2 * (self.block_layers or self.num_layers) * self.num_kv_heads * self.page_size * head_bytes


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    """0: in the blocks of tables; from 1 on: of layers with windows, see WindowGroups."""
    number: int
    """Among the layers of a block."""


def window_groups(layers: Sequence[AttentionSpec]) -> WindowGroups | None:
    """The groups of a model's layers: as many layers have windows in each as see all tokens, so that their blocks have
    one size. None if there are no such layers, or none with windows."""
    windows = [-layer.chunk if layer.chunk is not None else layer.window for layer in layers]
    limited = [window for window in windows if window is not None]
    if not limited or len(limited) == len(layers) or min(limited) < 0 < max(limited):
        return None
    if min(limited) < 0 and len(set(limited)) > 1:
        return None
    return WindowGroups(-(-len(limited) // (len(layers) - len(limited))), max(limited))


def places_of(layers: Sequence[AttentionSpec], groups: WindowGroups) -> tuple[LayerPlace, ...]:
    """The places of a stage's layers, of a model with these groups."""
    has_window = [layer.window is not None or layer.chunk is not None for layer in layers]
    size = max(len(layers) - sum(has_window), -(-sum(has_window) // groups.num_groups))
    seen, places = [0, 0], []
    for is_limited in has_window:
        group, number = divmod(seen[is_limited], size)
        places.append(LayerPlace(group + is_limited, number))
        seen[is_limited] += 1
    return tuple(places)


def state_bytes(layers: Iterable[LayerSpec], tp_size: int) -> int:
    """Bytes of one sequence's states, and of one snapshot of them, in these layers on one of tp_size ranks."""
    states = (layer.state for layer in layers if layer.state is not None)
    return sum(state.num_numbers(tp_size) for state in states) * ITEM_BYTES["float32"]


GRAPH_STEP = 16


def graph_sizes(max_size: int, step: int = GRAPH_STEP) -> list[int]:
    """max_size and the multiples of `step` below it, largest first: the others then fit in the memory of the first."""
    return [max_size, *range((max_size - 1) // step * step, 0, -step)]


def group_graph_sizes(sizes: Sequence[int]) -> list[int]:
    """Which decode steps in `sizes`, largest first, have a second recording, for steps with prefix groups: the largest,
    and two in each doubling. 12 of 64 sizes up to 1,024."""
    return [
        size
        for size in sizes
        if size > 1 and (size == sizes[0] or size % max(1, 1 << (size - 1).bit_length() >> 2) == 0)
    ]


def max_graph_groups(num_rows: int, max_graph_rows: int) -> int:
    """Prefix groups of a recorded decode step with num_rows rows, padding included. max_graph_rows: of the largest.

    With 1/8 of the rows of the largest step, prefixes need no more of FlashInfer's workspace than decode rows do, from
    4 query heads a KV head on."""
    return min(num_rows // 2, max(16, max_graph_rows // 8))


MAX_GRAPH_TOKENS = 2048
"""Tokens of the largest recorded step. From there on the device takes longer than the host for all launches, even with
a model of 1B parameters."""


def chunk_sizes(largest: int, step: int, max_tokens: int) -> list[int]:
    """Tokens of the graphs beyond the `largest` of decode steps, for steps with prompts: up to max_tokens and
    MAX_GRAPH_TOKENS, `step` or 1/16 of a doubling apart, largest first."""
    sizes, end = [largest], min(max_tokens, MAX_GRAPH_TOKENS)
    while sizes[0] < end:
        sizes.insert(0, min(end, padded_count(sizes[0] + step)))
    return sizes[:-1]


def padded_count(count: int, multiple: int = 1) -> int:
    """`count` rounded up to an allowed number of rows: all up to 16, then 16 per doubling, so at most 1/16 more; and
    that up to a multiple of `multiple`.

    The CPU's matrix library generates and keeps code for each shape: without rounding, the worker grew by 2 MB with
    each new count.
    """
    step = max(1, 1 << ((count - 1).bit_length() - 5)) if count > 16 else 1
    padded = -(-count // step) * step
    return -(-padded // multiple) * multiple


def padded_rank(max_rank: int) -> int:
    """The ranks of adapters for which a GPU has memory: whole blocks of the Triton kernels."""
    return max(16, 1 << (max_rank - 1).bit_length()) if max_rank <= 64 else -(-max_rank // 64) * 64


# Inputs and results of steps

RING_SIZE = 3
"""Buffers in turn: the running step reads one, the step queued after it another, while the host fills the third."""

_BYTES_PER_TOKEN = 88
"""Its id, position and kv index, the row and the target of its prompt logprob, its place in attention's lists, and its
place among rows sorted by adapter."""

_BYTES_PER_ROW = 256 + SAMPLING_DTYPE.itemsize
"""Its slot, first opened and then run, its noise, its place in each list of rows with a feature, its new blocks and the
ranges of its context in attention's lists."""

_BIASES_PER_ROW = 32
"""Biases per row for which the buffers have room, on average; OpenAI's API allows 300 in one request."""

_BYTES_PER_BIAS = 8
_BYTES_PER_TOP = 8
"""A top logprob and its token."""

_OTHER = 1 << 16
"""Alignment, padding, and arrays of a few numbers."""


class BufferSizes(NamedTuple):
    """Bytes of one buffer each."""

    inputs: int = 1 << 20
    results: int = 1 << 16


def sizes_for(max_tokens: int, max_seqs: int, vocab_size: int, num_top: int) -> BufferSizes:
    """Sizes for any step of at most max_tokens tokens and max_seqs rows, each with a mask, top logprobs and rules.

    num_top: most top logprobs of a token. The block tables of many long prefixes that are opened at once, and more
    biases than usual, do not fit: PackedStaging has another buffer for these.
    """
    mask_bytes = -(-vocab_size // 32) * 4
    bytes_per_row = _BYTES_PER_ROW + _BIASES_PER_ROW * _BYTES_PER_BIAS + mask_bytes
    bytes_per_answer = 16 + num_top * _BYTES_PER_TOP
    return BufferSizes(
        inputs=max_tokens * _BYTES_PER_TOKEN + max_seqs * bytes_per_row + _OTHER,
        results=(max_tokens + max_seqs) * bytes_per_answer + _OTHER,
    )


RECORDED_TOKEN_BYTES = 3 * 8
"""What recorded steps read of a token: its id, position and kv index."""

RECORDED_ROW_BYTES = 3 * 8 + 4 * len(SamplingParams._fields) + 2 * 4
"""What recorded decode steps read of a row beside this and its blocks: its slot, noise and sampling
parameters, and its place in attention's lists."""

# Logits

LOGPROBS_AT_ONCE = 256
"""Rows that pass the LM head together: bounds the memory of their logits for prompts of any length."""

_SCRATCH_BYTES = 128 << 20

RULED_BYTES_PER_TOKEN = 8
"""A word to count in, and a changed logit, for each token of the vocabulary."""

AS_SAMPLED_BYTES_PER_TOKEN = 64
"""Bound of the float32 copies of a row, and the 8-byte indices of its sort, while all rules apply by plain torch."""

_MAX_AS_SAMPLED_ROWS = 64


def ruled_rows_at_once(vocab_size: int) -> int:
    """Rows with rules whose logits a GPU changes at once, which bounds the memory: 130 for Llama 3's vocabulary."""
    return max(1, _SCRATCH_BYTES // (RULED_BYTES_PER_TOKEN * vocab_size))


def as_sampled_rows_at_once(vocab_size: int) -> int:
    """Rows whose adjusted logits plain torch computes at once for their logprobs, which bounds the memory: 16 for
    Llama 3's vocabulary."""
    return min(_MAX_AS_SAMPLED_ROWS, max(1, _SCRATCH_BYTES // (AS_SAMPLED_BYTES_PER_TOKEN * vocab_size)))


PROGRAMS_PER_PROCESSOR = 4
"""Programs of the sampler that a multiprocessor runs at once, each with 256 threads."""

PART_BYTES = 16
"""What a program of the sampler leaves of a part of a row."""

FINISHED_ROW_BYTES = 8 + 3 * 4
"""What is left of a sampled row: its token, and what the host reads."""


def parts_of_rows(num_rows: int, num_blocks: int, num_processors: int) -> tuple[int, int]:
    """How many parts the sampler divides each row into, and of how many blocks, if a row has num_blocks: as many parts
    as fill the device, and none is empty."""
    wanted = max(1, PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_rows))
    blocks_per_part = -(-num_blocks // min(wanted, num_blocks))
    return -(-num_blocks // blocks_per_part), blocks_per_part


def sampled_bytes(num_rows: int, num_processors: int) -> int:
    """Bytes of what the sampler leaves of rows and of their parts, at most."""
    return num_rows * FINISHED_ROW_BYTES + (num_rows + PROGRAMS_PER_PROCESSOR * num_processors) * PART_BYTES


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


# Ranks

SUMMED_DTYPES = ("bfloat16", "float32")
"""Torch's kernels sum numbers of these dtypes."""

MAX_SUM_BYTES = 8 << 20
"""Bytes of the largest sum that may take another way than NCCL's: 1,024 tokens with 4,096 numbers of bfloat16. Larger
sums take as long as their bytes need, and NCCL moves these well."""

SUM_ALIGNMENT = 16
"""Bytes that a thread of the kernels reads at a time."""


def buffer_bytes(max_tokens: int, hidden_size: int, dtype: str) -> int:
    """Bytes of each rank's buffer that the others read, a multiple of what a thread reads. max_tokens: of a forward."""
    num_bytes = min(MAX_SUM_BYTES, max_tokens * hidden_size * ITEM_BYTES[dtype]) if dtype in SUMMED_DTYPES else 0
    return num_bytes // SUM_ALIGNMENT * SUM_ALIGNMENT


# FlashInfer

HEAD_DIMS = (64, 128, 256)
"""Head sizes that both of FlashInfer's kernels, prefill and decode, are written for."""

CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads per KV head for which decode runs on CUDA cores. FlashInfer has these kernels for 4, 6 and 8 too, but not
for 5 and 7. Tensor cores are taken from 4 on, and for windows: not measured."""

_MIN_WORKSPACE = 128 << 20
"""Bytes, as its manual advises, for partial results of long contexts that FlashInfer splits."""

_PREFILL_TILE = 128
"""Most query rows of a prefill tile (FA2DetermineCtaTileQ)."""

_TILES = (16, 64, _PREFILL_TILE)
"""Query rows of a tile, all heads of a group counted: the smallest that holds a segment."""

_BLOCKS_PER_PROCESSOR = 2
"""Thread blocks of prefill that FlashInfer counts on for each multiprocessor."""


def decodes_on_cuda_cores(shape: KVSizes, has_window: bool) -> bool:
    """Otherwise on tensor cores, where FlashInfer reads only the tokens in a layer's window, not all before it."""
    return not has_window and shape.num_heads // shape.num_kv_heads in CUDA_CORE_GROUPS


def workspace_bytes(shape: KVSizes, num_processors: int, max_graph_rows: int = 0, has_windows: bool = False) -> int:
    """Bytes for the partial results of split contexts: all tiles that FlashInfer runs at once, in float32 with LSE.

    num_processors: multiprocessors of the device. max_graph_rows: of the largest recorded decode step; 0 without CUDA
    graphs. For a recording on tensor cores, FlashInfer's planner reserves a tile for each row, since it does not know
    that a row is a segment of its own, and as many as would hold all rows together. With prefix groups, likewise for
    each group. has_windows: of any layer.
    """
    tiles = -(-num_processors * _BLOCKS_PER_PROCESSOR // shape.num_kv_heads)
    rows = tiles * _PREFILL_TILE
    group = shape.num_heads // shape.num_kv_heads
    if max_graph_rows and not decodes_on_cuda_cores(shape, has_windows):
        tile = next(size for size in _TILES if group <= size or size == _PREFILL_TILE)
        rows = max(rows, (-(-max_graph_rows * group // tile) + max_graph_rows - 1) * tile)
    if max_graph_rows:
        num_groups = max_graph_groups(max_graph_rows, max_graph_rows)
        rows = max(rows, (-(-max_graph_rows * group // _PREFILL_TILE) + num_groups - 1) * _PREFILL_TILE)
    needed = rows * shape.num_heads * (shape.head_dim + 1) * 4
    return max(_MIN_WORKSPACE, -(-needed // (1 << 20)) << 20)


def num_wrappers(num_kinds: int) -> int:
    """FlashInfer's wrappers that FlashInferBackend keeps, each with a buffer for its plan: two of decode and two of
    prefill for each kind of layer, and one of "fa3" if there is one kind.

    num_kinds: layers with equal scale, window and cap are of one kind."""
    return RING_SIZE * (4 * num_kinds + (num_kinds == 1))


def plan_bytes(max_rows: int) -> int:
    """Bytes of a plan, on the device and in pinned memory: at least 1 MiB, 8 in FlashInfer.

    max_rows: of a recorded step, or of a part of another forward.

    A plan has three int32 and a bool for each tile, two int32 for each row, and a few more. There are at most as many
    tiles as for a group of 64 heads in tiles of 16, or 2 for each of 512 multiprocessors. Without a recording there are
    fewer, at most 2 for each row, since a tile's size is chosen by the mean of the segments.
    """
    num_tiles = max(5 * max_rows, 1024)
    needed = 13 * num_tiles + 8 * max_rows + 1024
    return -(-needed // (1 << 20)) << 20


_FA3_ENTRIES = 7
"""int32 of a plan of "fa3" for each tile of each head."""

_FA3_TILES = {64: 192}
"""Query rows of a tile of "fa3" by head size; 128 for others (PrefillSM90Plan)."""


def fa3_plan_bytes(num_rows: int, num_segments: int, shape: KVSizes, num_processors: int) -> int:
    """Bytes of a plan of "fa3", at most. With over 4,096 tiles, all heads share the plan of one."""
    num_tiles = -(-num_rows // _FA3_TILES.get(shape.head_dim, 128)) + num_segments - 1
    num_heads = 1 if num_tiles > 4096 else shape.num_heads
    alignment = 16 * (_FA3_ENTRIES + 1)
    return 4 * (_FA3_ENTRIES * num_tiles * num_heads + num_processors + 1) + alignment
