"""The memory of a worker, by one table: each entry says how a part is planned and how a start measures it.

`toka plan` prints what is planned, a start reports what it has measured beside that, and the KV cache gets what the
other parts leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import psutil
import torch

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import UserError, longest_context
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.flashinfer_backend import HEAD_DIMS, plan_bytes, workspace_bytes
from tokasaurus.model.cpu.bindings import allocate_huge_pages
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.families import build_decoder
from tokasaurus.model.execution.device_batch import padded_count
from tokasaurus.model.execution.graphs import CudaRecorder, graph_sizes
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import num_hidden_buffers
from tokasaurus.model.parallel.symmetric_all_reduce import buffer_bytes
from tokasaurus.model.sampling.prompt_logprobs import LOGPROBS_AT_ONCE
from tokasaurus.model.sampling.rules import (
    AS_SAMPLED_BYTES_PER_TOKEN,
    RULED_BYTES_PER_TOKEN,
    as_sampled_rows_at_once,
    num_mask_words,
    ruled_rows_at_once,
)
from tokasaurus.model.staging.packed import RING_SIZE, sizes_for
from tokasaurus.model.worker.warmup import ForwardLimits
from tokasaurus.monitoring.available_memory import available_memory

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

CONTEXT_BYTES = 600 << 20
"""CUDA's context, cuBLAS and the kernels' code on the device: an estimate, which differs by device and version."""

WEIGHTS, ROTARY, SLOTS, INPUTS = "weights", "rotary table", "slots", "inputs of steps"
STAGES, SUMS, FORWARD, WORKSPACES = "stage buffers", "sums over ranks", "largest forward", "attention workspaces"
GRAPHS, CONTEXT = "CUDA graphs", "CUDA context"
"""Names of the table's parts."""

_GRAPH_BYTES = 256 << 10
"""What a driver keeps for the launches between two attentions: an estimate."""

_NUM_PROCESSORS = 132
"""Multiprocessors of an H100 or H200, on which the size of FlashInfer's workspace depends."""
_NUM_WRAPPERS = 12
"""FlashInfer's wrappers that FlashInferBackend keeps, each with a buffer for its plan."""

CPU_FRACTION = 0.25
"""Fraction of the available memory for the KV cache on a CPU: the rest is left to the machine's other programs."""

CUDA_FRACTION = 0.95
"""Fraction of the device memory left after weights and the largest forward: the rest covers fragmentation."""

_TITLE = "toka-worker"
"""How the names of workers' processes begin."""

_TILE_QUERIES = 96
"""Most query heads in an attention tile: kTileQueries of attention_partition.h."""

_MAX_HEAD_DIM = 256
"""Largest head size that a thread's tile has room for: kMaxHeadDim of attention_partition.h."""

_CHUNK_TOKENS = 128
"""Tokens whose keys and values a thread widens at a time: kChunk of attention_tile.h."""

_PARTITIONS_PER_THREAD = 16
"""Partitions of tiles that are merged at the end: twice kPartitionsPerThread of attention_work.h, for rounding up."""

_FLOAT = 4
_INDEX = 8
_INT8_BYTES_PER_INPUT = 3.625
"""Int8Rows of int8_tile.h: a code of 8 bits, perhaps another of 16 bits, and the rest for scales and sums."""

_HOST_INDICES_PER_TOKEN = 24
_HOST_INDICES_PER_ROW = 64
"""Indices in the arrays that device_batch.py, slot_table.py and sample.py build for a step: generous estimates."""

_BLOCK_TABLE_COPIES = 10
"""int32 copies of the block tables: of rows, of prefix groups, of rows with rules, and the 8-byte gather indices."""

_BYTES_PER_PARTITION = 240
"""Entries in attention's lists of tiles and partitions, which grow by doubling."""

_VOCABULARIES_PER_THREAD = 10
"""Most float32 copies of a row of logits in sampling: changed, allowed, masked and likely logits, token counts, tokens
seen, and 8-byte candidates in a list that grows by doubling."""

_MAX_PANEL = 32
"""Most outputs in a weight panel: kPanel of gemm_tile.h. Each thread widens one panel at a time."""

_OTHER = 4 << 20
"""Bytes for Python objects and the allocators' rounding."""


class DoesNotFit(Exception):
    """The message, one line, says what does not fit and which flag to change."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan depends on besides the model. Fields are flags of the same name."""

    device_bytes: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    tp_size: int
    pp_size: int
    page_size: int
    max_tokens_per_forward: int
    max_seqs_per_forward: int
    context_length: int
    """Most tokens of a sequence, by the model and the flag."""
    has_flashinfer: bool
    has_symmetric_sums: bool
    """Whether sums over tensor-parallel ranks may use memory that these share."""
    graph_sizes: tuple[int, ...]
    """Sequences of each decode step that is recorded, largest first; empty without CUDA graphs."""


def sizes_of(
    config: ServerConfig, info: ModelInfo, device_bytes: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> Sizes:
    return Sizes(
        device_bytes=device_bytes,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        page_size=config.page_size,
        max_tokens_per_forward=config.max_tokens_per_forward,
        max_seqs_per_forward=config.max_seqs_per_forward,
        context_length=longest_context(info.context_length, config.max_num_tokens_per_request),
        has_flashinfer=config.attention_backend != "torch",
        has_symmetric_sums=config.symmetric_all_reduce is not False,
        graph_sizes=tuple(sizes_of_graphs(config)),
    )


def sizes_of_graphs(config: ServerConfig) -> list[int]:
    """Sequences, largest first; none without CUDA graphs."""
    if config.use_cudagraphs is False:
        return []
    return graph_sizes(config.cudagraph_max_size or config.max_seqs_per_forward, config.cudagraph_step)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a worker's memory."""

    name: str
    num_bytes: int
    reason: str
    is_exact: bool
    """Otherwise an estimate: the server measures it."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The memory of one worker."""

    pp_rank: int
    tp_rank: int
    parts: tuple[Part, ...]
    """All but the KV cache."""
    kv_bytes_per_token: int
    num_kv_blocks: int
    """Usable blocks, without the padding block; below 1 if the parts leave no room."""

    @property
    def num_fixed_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of all workers of a replica."""

    sizes: Sizes
    workers: tuple[WorkerPlan, ...]

    @property
    def least(self) -> WorkerPlan:
        """The worker with the fewest KV blocks, which decides for all."""
        return min(self.workers, key=lambda worker: worker.num_kv_blocks)

    @property
    def num_kv_tokens(self) -> int:
        return self.least.num_kv_blocks * self.sizes.page_size

    def num_sequences(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` tokens that fit the KV cache at once, if they share nothing."""
        return self.least.num_kv_blocks // -(-num_tokens // self.sizes.page_size)


def plan_memory(info: ModelInfo, sizes: Sizes) -> MemoryPlan:
    """Raises DoesNotFit, and ValueError for a tp_size or pp_size by which the model cannot be divided."""
    meshes = [Mesh.of_worker(index, sizes.pp_size, sizes.tp_size) for index in range(sizes.pp_size * sizes.tp_size)]
    plan = MemoryPlan(sizes, tuple(plan_worker(info, mesh, sizes) for mesh in meshes))
    least = plan.least
    if least.num_kv_blocks < 1:
        weights, *others = least.parts
        of_others = least.num_fixed_bytes - weights.num_bytes
        forward = next(part for part in others if part.name == FORWARD)
        flag = "a larger tp_size or pp_size"
        if least.num_fixed_bytes - forward.num_bytes < sizes.device_bytes:
            flag = "a lower max_tokens_per_forward or max_seqs_per_forward"
        raise DoesNotFit(
            f"device_memory={show_size(sizes.device_bytes)}: {show_size(weights.num_bytes)} of weights and "
            f"{show_size(of_others)} of {', '.join(part.name for part in others)} leave no room for a KV cache; {flag} "
            "needs less on each device"
        )
    return plan


def kv_shape(
    info: ModelInfo,
    mesh: Mesh,
    page_size: int,
    kv_cache_dtype: torch.dtype,
    activation_dtype: torch.dtype,
    device: torch.device,
) -> KVShape:
    """This rank's KV cache. Raises ValueError for a tp_size or pp_size by which the model cannot be divided."""
    return KVShape(
        num_layers=len(mesh.stage_layers(info)),
        num_heads=mesh.shard(info.num_heads, "attention heads")[1],
        num_kv_heads=mesh.kv_head_shard(info.num_kv_heads)[1],
        head_dim=info.head_dim,
        page_size=page_size,
        dtype=kv_cache_dtype,
        device=device,
        activation_dtype=activation_dtype,
    )


def plan_worker(info: ModelInfo, mesh: Mesh, sizes: Sizes) -> WorkerPlan:
    """The memory of one worker. Raises ValueError for a tp_size or pp_size by which the model cannot be divided."""
    shape = kv_shape(info, mesh, sizes.page_size, sizes.kv_cache_dtype, sizes.dtype, torch.device("meta"))
    rank = _Rank(info, mesh, shape, sizes)
    planned = ((entry, entry.plan(rank)) for entry in _TABLE.values())
    parts = tuple(Part(entry.name, *found, entry.is_exact) for entry, found in planned if found is not None)
    left = sizes.device_bytes - sum(part.num_bytes for part in parts)
    bytes_per_token = shape.bytes_per_block // sizes.page_size
    num_blocks = int(left * CUDA_FRACTION) // shape.bytes_per_block - 1  # minus the padding block, as in the server
    return WorkerPlan(mesh.pp_rank, mesh.tp_rank, parts, bytes_per_token, num_blocks)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the parts of one worker are planned from."""

    info: ModelInfo
    mesh: Mesh
    shape: KVShape
    sizes: Sizes

    @property
    def table_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.sizes.context_length // self.sizes.page_size)

    @property
    def has_flashinfer(self) -> bool:
        """Whether FlashInfer computes attention, where it is installed."""
        sizes = self.sizes
        is_half = sizes.dtype != torch.float32 and sizes.kv_cache_dtype == sizes.dtype
        return sizes.has_flashinfer and self.shape.head_dim in HEAD_DIMS and is_half

    @property
    def widest_row(self) -> int:
        """Most numbers that a layer has in memory for each token. Layers run one after another in the same memory."""
        info, shape = self.info, self.shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention_row = 2 * info.hidden_size + 2 * (query + 2 * kv) + query
        return max(attention_row, 2 * info.hidden_size + 3 * (info.intermediate_size // self.mesh.tp_size))


Planned: TypeAlias = tuple[int, str] | None
"""Bytes, and the reason of the number; None: this worker has no such part."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """How one part is planned, and how a start measures it."""

    name: str
    plan: Callable[[_Rank], Planned]
    is_exact: bool = False
    is_on_cpu: bool = False
    """A worker on a CPU has this part too, of the planned size. All others differ there, and are not shown."""
    is_outside_torch: bool = False
    """Torch's allocator does not count it."""


def _weights(rank: _Rank) -> Planned:
    """Counted on the server's modules, on the meta device."""
    info, mesh, dtype = rank.info, rank.mesh, rank.sizes.dtype
    model = build_decoder(info, mesh, dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    what = f"{rank.shape.num_layers} of {info.num_layers} layers"
    if mesh.tp_size > 1:
        what += f", each divided by {mesh.tp_size}"
    ends = [name for name, is_here in (("embedding", mesh.is_first_stage), ("LM head", mesh.is_last_stage)) if is_here]
    if info.tie_embeddings and len(ends) == 2:
        ends = ["embedding, which is also the LM head"]
    return num_bytes, f"{num_parameters:,} parameters x {dtype.itemsize} B: {', '.join([what, *ends])}"


def _rotary(rank: _Rank) -> Planned:
    num_positions, head_dim = rank.sizes.context_length, rank.info.head_dim
    return num_positions * head_dim * 4, f"{num_positions:,} positions x {head_dim} x 4 B"


def _slots(rank: _Rank) -> Planned:
    num_slots, num_blocks = rank.sizes.max_seqs_per_forward + 1, rank.table_blocks
    per_slot = 4 * num_blocks + 4 * len(SamplingParams._fields) + 8
    reason = f"{num_slots:,} slots x {per_slot:,} B: a table of {num_blocks:,} blocks, sampling parameters, last token"
    return num_slots * per_slot, reason


def _inputs(rank: _Rank) -> Planned:
    max_tokens, max_seqs = rank.sizes.max_tokens_per_forward, rank.sizes.max_seqs_per_forward
    num_bytes = RING_SIZE * sizes_for(max_tokens, max_seqs, rank.info.vocab_size, num_top=0).inputs
    return num_bytes, f"{RING_SIZE} steps' arrays: {max_tokens:,} tokens and {max_seqs:,} rows with masks each"


def _stage_buffers(rank: _Rank) -> Planned:
    """Hidden states that are sent and received."""
    num_buffers = num_hidden_buffers(rank.mesh)
    if not num_buffers:
        return None
    num_tokens = padded_count(rank.sizes.max_tokens_per_forward, rank.mesh.tp_size)
    hidden_size, item = rank.info.hidden_size, rank.sizes.dtype.itemsize
    num_bytes = num_buffers * num_tokens * hidden_size * item
    return num_bytes, f"{num_buffers} x {num_tokens:,} tokens x {hidden_size:,} x {item} B between stages"


def _sums(rank: _Rank) -> Planned:
    """The memory through which tensor-parallel ranks sum."""
    sizes = rank.sizes
    num_bytes = buffer_bytes(sizes.max_tokens_per_forward, rank.info.hidden_size, sizes.dtype)
    if sizes.tp_size == 1 or not sizes.has_symmetric_sums or not num_bytes:
        return None
    return num_bytes, "a buffer that the GPUs share, if they can"


def _largest_forward(rank: _Rank) -> Planned:
    """The activations of a layer at its widest, and the logits."""
    sizes, mesh, vocab_size = rank.sizes, rank.mesh, rank.info.vocab_size
    num_tokens, item, widest = sizes.max_tokens_per_forward, sizes.dtype.itemsize, rank.widest_row
    num_bytes = num_tokens * widest * item
    reason = f"{num_tokens:,} tokens x {widest:,} x {item} B of a layer"
    if mesh.is_last_stage:
        num_rows = min(max(sizes.max_seqs_per_forward, LOGPROBS_AT_ONCE), num_tokens)
        if mesh.tp_size > 1:  # a rank's logits of all rows; its rows' logits of all tokens, as received and as joined
            num_rows = 3 * -(-num_rows // mesh.tp_size)
        copies, what = max(
            (min(num_rows, ruled_rows_at_once(vocab_size)) * RULED_BYTES_PER_TOKEN, "penalties"),
            (
                min(num_rows, as_sampled_rows_at_once(vocab_size)) * AS_SAMPLED_BYTES_PER_TOKEN,
                "log-probabilities as sampled",
            ),
        )
        num_bytes += (num_rows * item + copies) * vocab_size
        reason += f" + {vocab_size:,} logits x ({num_rows:,} rows x {item} B + {copies:,} B of rows with {what})"
    return num_bytes, reason


def _workspaces(rank: _Rank) -> Planned:
    if not rank.has_flashinfer:
        return None
    graph_rows = max(rank.sizes.graph_sizes, default=0)
    of_wrapper = plan_bytes(rank.sizes.max_tokens_per_forward)
    num_bytes = workspace_bytes(rank.shape, _NUM_PROCESSORS, graph_rows) + _NUM_WRAPPERS * of_wrapper
    reason = f"FlashInfer's workspace for {_NUM_PROCESSORS} multiprocessors"
    if graph_rows:
        reason += f" and graphs of {graph_rows:,} sequences"
    return num_bytes, f"{reason}, and {_NUM_WRAPPERS} wrappers x {show_size(of_wrapper)}"


def _graphs(rank: _Rank) -> Planned:
    """All graphs share the memory of the largest. For each piece of a graph the driver keeps some more: a graph has one
    piece more than the stage has layers, and twice as many where attention can be recorded too."""
    sizes, mesh = rank.sizes, rank.mesh
    if not sizes.graph_sizes:
        return None
    largest, num_pieces = sizes.graph_sizes[0], len(sizes.graph_sizes) * (rank.shape.num_layers + 1)
    row = rank.widest_row
    if not mesh.is_first_stage:
        row += rank.info.hidden_size  # where graphs read what the stage before sent
    if mesh.is_last_stage:
        row += mesh.vocab_shard(rank.info.vocab_size)[1]
    num_bytes = largest * row * sizes.dtype.itemsize
    reason = f"{largest:,} sequences x {row:,} x {sizes.dtype.itemsize} B"
    if rank.has_flashinfer:
        num_pieces *= 2
        num_bytes += largest * rank.table_blocks * 4
        reason += f" + {largest:,} x {rank.table_blocks:,} blocks x 4 B"
    num_bytes += num_pieces * _GRAPH_BYTES
    return num_bytes, f"{reason} + {num_pieces:,} pieces x {show_size(_GRAPH_BYTES)}"


def _context(_rank: _Rank) -> Planned:
    return CONTEXT_BYTES, "context, cuBLAS and kernels' code"


_TABLE = {
    entry.name: entry
    for entry in (
        _Entry(WEIGHTS, _weights, is_exact=True, is_on_cpu=True),
        _Entry(ROTARY, _rotary, is_exact=True, is_on_cpu=True),
        _Entry(SLOTS, _slots, is_exact=True),
        _Entry(INPUTS, _inputs, is_exact=True),
        _Entry(STAGES, _stage_buffers, is_exact=True),
        _Entry(SUMS, _sums, is_outside_torch=True),
        _Entry(FORWARD, _largest_forward),
        _Entry(WORKSPACES, _workspaces),
        _Entry(GRAPHS, _graphs),
        _Entry(CONTEXT, _context),
    )
}
"""Every part but the KV cache, which gets what they leave."""


class MemoryTable:
    """One worker's table in a start: its plan, and what has been measured of each part. Made before anything is
    allocated on the device."""

    def __init__(
        self,
        config: ServerConfig,
        info: ModelInfo,
        mesh: Mesh,
        device: torch.device,
        *dtypes: torch.dtype,
    ) -> None:
        """dtypes: of the weights and of the KV cache."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Asking for the free memory makes the context, which the plan counts too.
        free_bytes = torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES if self._is_cuda else 0
        self._plan = plan_worker(info, mesh, sizes_of(config, info, free_bytes, *dtypes))
        self._page_size = config.page_size
        self.measured: dict[str, int] = {}
        """Bytes by part; parts that are measured together are under the first one's name."""
        self.forward_bound: ForwardMemory | None = None
        """Bound of the largest forward on a CPU, which does not measure it, if the kernels run all layers; else
        None."""
        self._lines: list[str] = []

    @contextmanager
    def measure(self, *names: str) -> Iterator[None]:
        """Measure what the body allocates: these parts of the table."""
        entries = [_TABLE[name] for name in names]
        if not (self._is_cuda or all(entry.is_on_cpu for entry in entries)):
            yield
            return
        used_bytes = self._taken_bytes if any(entry.is_outside_torch for entry in entries) else self._used_bytes
        before = used_bytes()
        yield
        self.note(used_bytes() - before, *names)

    def note(self, measured_bytes: int, *names: str) -> None:
        """What was measured of these parts of the table, which the plan may lack."""
        self.measured[names[0]] = measured_bytes
        planned = sum(part.num_bytes for part in self._plan.parts if part.name in names)
        self._add(" and ".join(names), show_size(planned), show_size(measured_bytes))

    def replan(self, name: str, changed_bytes: int) -> None:
        """One part takes so many bytes more than planned, or fewer, for a reason that the plan does not know."""
        parts = tuple(
            replace(part, num_bytes=part.num_bytes + changed_bytes) if part.name == name else part
            for part in self._plan.parts
        )
        self._plan = replace(self._plan, parts=parts)

    @contextmanager
    def measure_kv_cache(self, num_blocks: int) -> Iterator[None]:
        """Measure the allocation of the KV cache, with its padding block: num_blocks usable ones."""
        before = self._reserved_bytes()
        yield
        measured = (self._reserved_bytes() - before) / ((num_blocks + 1) * self._page_size)
        self._add("KV cache per token", f"{self._plan.kv_bytes_per_token:,} B", f"{measured:,.0f} B")
        if self._is_cuda:
            planned = max(0, self._plan.num_kv_blocks) * self._page_size
            self._add("KV cache", f"{planned:,} tokens", f"{num_blocks * self._page_size:,}")

    def lines(self) -> list[str]:
        """Lines for the user: each part, planned and measured."""
        return self._lines

    def _add(self, what: str, planned: str, measured: str) -> None:
        self._lines.append(f"{what} {planned} planned, {measured} measured")

    def _used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else own_bytes()

    def _taken_bytes(self) -> int:
        """Bytes in use on the device, by all processes."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _reserved_bytes(self) -> int:
        """On a CPU, the system provides a cache's memory at first use: until then it has addresses only."""
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else int(psutil.Process().memory_info().vms)


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of a worker's KV cache."""

    num_blocks: int
    """Usable blocks, without the padding block."""

    arithmetic: str
    """How num_blocks was computed; one line for the user."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The memory of one KV block: every worker of a replica has a part of it, as large as its layers and heads."""

    own: int
    """Bytes on this worker."""

    total: int
    """Bytes on all workers that share the available memory, together."""

    num_workers: int = 1
    """How many these are."""

    def describe(self) -> str:
        """`total`, for the user."""
        of_workers = "" if self.num_workers == 1 else f" of {self.num_workers} workers"
        return f"{show_size(self.total)} a block{of_workers}"


def plan_fixed(num_tokens: int, page_size: int, block: BlockBytes, available_bytes: int) -> KVCachePlan:
    """A KV cache of at least `num_tokens`, as the user asked, on each of the workers that share the available memory.

    Raises UserError if memory does not suffice.
    """
    num_blocks = -(-num_tokens // page_size)
    needed = (num_blocks + 1) * block.total  # with the padding block
    if needed > available_bytes:
        most = max(0, available_bytes // block.total - 1) * page_size
        on_workers = "" if block.num_workers == 1 else f" on {block.num_workers} workers together"
        raise UserError(
            f"kv_cache_num_tokens={num_tokens}: needs {show_size(needed)}{on_workers}, but only"
            f" {show_size(available_bytes)} are available, enough for at most {most}"
        )
    return KVCachePlan(
        num_blocks,
        f"{num_tokens:,} tokens asked / {page_size} a block = {num_blocks:,} blocks of {show_size(block.own)}"
        f" = {show_size(num_blocks * block.own)}",
    )


def plan_auto(
    available_bytes: int, what_is_available: str, fraction: float, page_size: int, block: BlockBytes
) -> KVCachePlan:
    """A KV cache that takes a fraction of the available memory; each worker gets the same number of blocks. Raises
    UserError if no block fits."""
    budget = int(available_bytes * fraction)
    num_blocks = budget // block.total - 1  # minus the padding block
    if num_blocks < 1:
        raise UserError(
            f"{show_size(budget)} of memory is too little for a KV cache with {block.describe()}; it is {fraction:g} of"
            f" {show_size(available_bytes)} {what_is_available};"
            " free some memory, or set kv_cache_num_tokens, or a lower max_tokens_per_forward"
        )
    return KVCachePlan(
        num_blocks,
        f"{show_size(available_bytes)} {what_is_available} x {fraction:g} / {block.describe()}"
        f" = {num_blocks:,} blocks of {page_size} = {num_blocks * page_size:,} tokens",
    )


def show_size(num_bytes: float) -> str:
    """The size with a unit and four digits, for the user."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def size_kv_cache(
    config: ServerConfig,
    num_layers: int,
    shape: KVShape,
    backend: AttentionBackend,
    memory: MemoryTable,
    run_largest: Callable[[], object],
    measure_graphs: Callable[[], int],
) -> KVCachePlan:
    """The size that kv_cache_num_tokens sets, else a fraction of what the table's other parts leave of the free memory.

    num_layers: of all stages. run_largest: runs the largest forward. measure_graphs: records some graphs, and returns
    the bytes that all will take; both are called with a KV cache of the padding block alone, on CUDA, and noted in the
    table. Raises UserError if memory does not suffice.
    """
    own = shape.bytes_per_block
    if shape.device.type == "cpu":
        num_workers = config.dp_size * config.pp_size * config.tp_size
        block = BlockBytes(own, own // shape.num_layers * num_layers * config.dp_size * config.tp_size, num_workers)
        available, what = _free_cpu_bytes(num_workers, memory.forward_bound)
        fraction = CPU_FRACTION
    else:
        block = BlockBytes(own, own)
        _measure_on_cuda(shape.device, backend, memory, run_largest, measure_graphs)
        free = torch.cuda.mem_get_info(shape.device)[0]
        available = max(0, free - memory.measured[FORWARD] - memory.measured[GRAPHS])
        what, fraction = "free after weights, the largest forward and graphs", CUDA_FRACTION
    if config.kv_cache_num_tokens is not None:
        return plan_fixed(config.kv_cache_num_tokens, config.page_size, block, available)
    return plan_auto(available, what, fraction, config.page_size, block)


def _free_cpu_bytes(num_workers: int, forward: ForwardMemory | None) -> tuple[int, str]:
    """What num_workers may use together beside their largest forwards, at least 0; and what that is, for the user."""
    memory = available_memory()
    available, limit = memory.num_bytes, f"(limit: {memory.limited_by})"
    if num_workers > 1:
        available = available_to_all(available, own_bytes(), sibling_bytes(), num_workers)
    if forward is None:
        return available, f"of memory available {limit}"
    return max(0, available - num_workers * forward.total), f"available after weights and the largest forward {limit}"


def _measure_on_cuda(
    device: torch.device,
    backend: AttentionBackend,
    memory: MemoryTable,
    run_largest: Callable[[], object],
    measure_graphs: Callable[[], int],
) -> None:
    """Note what the largest forward and the graphs take, with only the padding block as cache."""
    backend.allocate(1)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest()
    memory.note(torch.cuda.max_memory_allocated(device) - before, FORWARD)
    torch.cuda.empty_cache()
    memory.note(measure_graphs(), GRAPHS)


def graph_bytes(runner: ModelRunner, sizes: Sequence[int], device: torch.device) -> int:
    """Bytes that the graphs of these sizes, largest first, will take, estimated by recording the first and the last.

    The others need what the last does beyond the memory of the first. The graphs recorded here are dropped.
    """
    if not sizes:
        return 0
    free: list[int] = [_free_bytes(device)]

    def note(recorded: Iterable[int]) -> Iterator[int]:
        for index, size in enumerate(recorded):
            if index:
                free.append(_free_bytes(device))
            yield size
        free.append(_free_bytes(device))

    runner.record_graphs(CudaRecorder(device), sorted({sizes[0], sizes[-1]}), note)
    runner.drop_graphs()
    torch.cuda.empty_cache()
    first, *others = (before - after for before, after in itertools.pairwise(free))
    return max(0, first) + max(0, *others, 0) * (len(sizes) - 1)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Upper bounds in bytes, by part of the forward."""

    kept: dict[str, int]
    """Memory kept between forwards."""

    passing: dict[str, int]
    """Memory freed at the end of a forward."""

    @property
    def total(self) -> int:
        return sum(self.kept.values()) + sum(self.passing.values())


def largest_forward(
    info: ModelInfo,
    limits: ForwardLimits,
    page_size: int,
    activation_bytes: int,
    num_threads: int,
    num_top: int,
    is_int8: bool = False,
) -> ForwardMemory:
    """The memory of a forward with as many tokens and rows as `limits` allows.

    activation_bytes: size of one activation element. num_threads: threads of the kernels. num_top: most top-k logprobs
    of a token. is_int8: activations are quantised.
    """
    num_tokens = limits.max_tokens
    num_rows = min(limits.max_seqs, num_tokens)
    num_logit_rows = _num_logit_rows(limits)
    num_blocks = -(-limits.context_length // page_size)  # of the longest sequence
    query_size = info.num_heads * info.head_dim
    kv_size = info.num_kv_heads * info.head_dim

    # forward.cpp: queries, keys and values; attention's output; and the intermediate activations of the feed-forward.
    layer_row = query_size + 2 * kv_size + query_size + info.intermediate_size
    # Plus the cosines and sines of the rotary embedding.
    hidden_row = info.hidden_size * activation_bytes + info.head_dim * _FLOAT
    # The LSE of every head; the output and LSE of rows that share a prefix; lists of tiles; each thread's tile; and
    # the partitions of tiles to be merged.
    num_tiles = (2 * num_rows + num_tokens * info.num_heads // _TILE_QUERIES + 1) * info.num_kv_heads
    attention = (
        num_tokens * info.num_heads * _FLOAT
        + num_rows * (query_size + info.num_heads) * _FLOAT
        + num_tiles * _BYTES_PER_PARTITION
        + num_threads * (3 * _TILE_QUERIES + 2 * _CHUNK_TOKENS) * _MAX_HEAD_DIM * _FLOAT
        + num_threads * _PARTITIONS_PER_THREAD * _TILE_QUERIES * (info.head_dim + 1) * _FLOAT
    )
    # Masks three times: as received, unpickled, and as a tensor.
    masks = 3 * num_rows * num_mask_words(info.vocab_size) * _FLOAT
    # Ids and log-probabilities of sampled tokens and of prompt tokens, and the message that carries them.
    answers = 2 * (num_rows + num_tokens) * (2 * _INDEX + num_top * 2 * _FLOAT)
    host = (
        num_tokens * _HOST_INDICES_PER_TOKEN * _INDEX
        + num_rows * _HOST_INDICES_PER_ROW * _INDEX
        + num_rows * num_blocks * _BLOCK_TABLE_COPIES * 4
    )
    panel_bytes = _MAX_PANEL * _FLOAT  # for each input
    widest = max(info.intermediate_size, query_size, info.hidden_size)
    return ForwardMemory(
        kept={
            "layers": num_tokens * layer_row * activation_bytes,
            "normed states": num_tokens * info.hidden_size * activation_bytes,
            "logits": num_logit_rows * info.vocab_size * activation_bytes,
            "widened weights": num_threads * widest * panel_bytes,
            "quantised activations": int(num_tokens * widest * _INT8_BYTES_PER_INPUT) if is_int8 else 0,
        },
        passing={
            "hidden states": num_tokens * hidden_row + num_logit_rows * info.hidden_size * activation_bytes,
            "attention": attention,
            "sampling": num_threads * _VOCABULARIES_PER_THREAD * info.vocab_size * _FLOAT + masks,
            "answers": answers,
            "batch": host + _OTHER,
        },
    )


def reserve(memory: ForwardMemory, model: Decoder, limits: ForwardLimits) -> None:
    """Allocate the kept memory, then allocate, touch and free the passing memory.

    A lack of memory thus fails the start instead of a later forward.
    """
    model.reserve(limits.max_tokens, _num_logit_rows(limits))
    allocate_huge_pages(sum(memory.passing.values())).fill_(1)


def _num_logit_rows(limits: ForwardLimits) -> int:
    """Most rows that pass the LM head together: rows that sample, or rows for prompt logprobs."""
    return max(min(limits.max_seqs, limits.max_tokens), min(limits.max_tokens, LOGPROBS_AT_ONCE))


def available_to_all(available_bytes: int, own_bytes: int, others_bytes: Iterable[int], num_workers: int) -> int:
    """Bytes that num_workers may still use together, if each of the others came to need what this one uses now.

    own_bytes: used by this worker. others_bytes: used by each of the others that exist. One that has loaded less than
    this one will take the difference; one that has filled its KV cache already has what it may take.
    """
    others = list(others_bytes)[: num_workers - 1]
    others += [0] * (num_workers - 1 - len(others))
    return max(0, available_bytes + sum(other - own_bytes for other in others))


def own_bytes() -> int:
    """Memory that belongs to this process alone, without files such as libraries."""
    return _bytes_of(psutil.Process())


def sibling_bytes() -> Iterator[int]:
    """`own_bytes` of each other worker of this server."""
    own = psutil.Process()
    launcher = own.parent()
    for child in [] if launcher is None else launcher.children():
        try:
            if child.pid != own.pid and child.name().startswith(_TITLE):
                yield _bytes_of(child)
        except psutil.Error:  # it has just ended, or the system does not tell
            continue


def _bytes_of(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))  # only Linux tells what is shared
