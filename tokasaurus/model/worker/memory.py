"""The memory of a worker in a start: what is measured of each part, beside its plan (memory_plan.py), and the KV cache,
which gets what the other parts leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import ExpertsSpec, attentions_of
from tokasaurus.messages.status import UserError, WindowGroups
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.buffer_sizes import (
    LOGPROBS_AT_ONCE,
    num_mask_words,
    places_of,
    state_bytes,
    window_groups,
)
from tokasaurus.model.cpu.bindings import allocate_huge_pages
from tokasaurus.model.cpu.experts import MAX_ROWS
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.memory_plan import (
    _TABLE,
    ADAPTERS,
    CONTEXT_BYTES,
    CPU_FRACTION,
    CUDA_FRACTION,
    FORWARD,
    GRAPHS,
    kv_sizes,
    plan_worker,
    show_size,
    sizes_of,
)
from tokasaurus.model.worker.warmup import ForwardLimits
from tokasaurus.monitoring.available_memory import available_memory
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.workers import num_replicas, num_workers

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


_TITLE = "toka-worker"
"""How the names of workers' processes begin."""

_TILE_QUERIES = 192
"""Most query heads in an attention tile, with AMX: kTileQueries of attention_partition.h."""

_MAX_HEAD_DIM = 256
"""Largest head size that a thread's tile has room for: kMaxHeadDim of int8_cache.h."""

_CHUNK_TOKENS = 128
"""Tokens whose keys and values a thread widens at a time: kChunk of attention_tile.h."""

_PARTITIONS_PER_THREAD = 16
"""Partitions of tiles that are merged at the end: twice kPartitionsPerThread of attention_work.h, for rounding up."""

_FLOAT = 4
_INDEX = 8
_INT8_BYTES_PER_INPUT = 3.625
"""Int8Rows of int8_tile.h: a code of 8 bits, perhaps another of 16 bits, and the rest for scales and sums."""

_PART_INPUTS, _TILE_ROWS, _PART_SUMS_BYTES = 2048, 32, 256 * 1024
"""gemm.cpp: rows of more inputs are kept in tiles of so many, and each thread keeps sums of so many bytes."""

_SUM_BYTES_PER_INPUT = _FLOAT * (1 / 32 + 1 / 64 + 1 / 128)
"""Of group_sums of gemm.cpp: a float32 for groups of each size."""

_IN_PLANES = ((6, 4.375), (2, 10.375))
"""Rows in planes, with quantised weights: kMaxPlaneRows of gemm.cpp and the bytes of Int8Rows for each input, with
dot products of integers and with pairs of codes."""

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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kv_shape(
    info: ModelInfo,
    mesh: Mesh,
    page_size: int,
    kv_cache_dtype: torch.dtype,
    activation_dtype: torch.dtype,
    device: torch.device,
    sinks: tuple[torch.Tensor | None, ...] = (),
) -> KVShape:
    """This rank's KV cache. sinks: as in KVShape. Raises ValueError for a tp_size or pp_size by which the model cannot
    be divided."""
    sizes = kv_sizes(info, mesh, page_size)
    layers = attentions_of(info.spec.layers[index] for index in mesh.stage_layers(info))
    groups = groups_of(info, mesh, device)
    places = () if groups is None else places_of(layers, groups)
    return KVShape(
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        page_size=page_size,
        dtype=kv_cache_dtype,
        device=device,
        activation_dtype=activation_dtype,
        layers=layers,
        sinks=sinks,
        places=places,
        num_groups=0 if groups is None else groups.num_groups,
        block_layers=1 + max((place.number for place in places), default=-1),
    )


def groups_of(info: ModelInfo, mesh: Mesh, device: torch.device) -> WindowGroups | None:
    """The groups of the model's layers, where they have blocks of their own: on CPUs, if the layers are ours, none of
    them has a state, and each stage has one that sees all tokens."""
    if device.type != "cpu" or not info.is_native or info.spec.has_states:
        return None
    for stage in (replace(mesh, pp_rank=rank) for rank in range(mesh.pp_size)):
        own = attentions_of(info.spec.layers[index] for index in stage.stage_layers(info))
        if all(layer.window is not None or layer.chunk is not None for layer in own):
            return None
    return window_groups(info.spec.attentions)


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
        """dtypes: of the weights, the KV cache and activations."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Asking for the free memory makes the context, which the plan counts too.
        free_bytes = torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES if self._is_cuda else 0
        names = [*map(dtype_name, dtypes)][: 2 if self._is_cuda else 3]
        self._plan = plan_worker(info, mesh, sizes_of(config, info, free_bytes, *names))
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
        planned = sum(map(self.planned, names))
        self._add(" and ".join(names), show_size(planned), show_size(measured_bytes))

    def planned(self, name: str) -> int:
        """Bytes of a part; 0 if the plan lacks it."""
        return sum(part.num_bytes for part in self._plan.parts if part.name == name)

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


def plan_fixed(
    num_tokens: int, page_size: int, block: BlockBytes, available_bytes: int, num_groups: int = 1
) -> KVCachePlan:
    """A KV cache of at least `num_tokens`, as the user asked, on each of the workers that share the available memory.

    num_groups: of layers, each with its own blocks. Raises UserError if memory does not suffice.
    """
    num_blocks = -(-num_tokens // page_size) * num_groups
    needed = (num_blocks + 1) * block.total  # with the padding block
    if needed > available_bytes:
        most = max(0, available_bytes // block.total - 1) // num_groups * page_size
        on_workers = "" if block.num_workers == 1 else f" on {block.num_workers} workers together"
        raise UserError(
            f"kv_cache_num_tokens={num_tokens}: needs {show_size(needed)}{on_workers}, but only"
            f" {show_size(available_bytes)} are available, enough for at most {most}"
        )
    return KVCachePlan(
        num_blocks,
        f"{num_tokens:,} tokens asked / {page_size} a block{_for_groups(num_groups)} = {num_blocks:,} blocks of"
        f" {show_size(block.own)}"
        f" = {show_size(num_blocks * block.own)}",
    )


def _for_groups(num_groups: int) -> str:
    """Why tokens take several blocks, for the user; "" if they do not."""
    return "" if num_groups == 1 else f" x {num_groups} groups of layers"


def plan_auto(
    available_bytes: int,
    what_is_available: str,
    fraction: float,
    page_size: int,
    block: BlockBytes,
    num_groups: int = 1,
) -> KVCachePlan:
    """A KV cache that takes a fraction of the available memory; each worker gets the same number of blocks. num_groups:
    as in plan_fixed. Raises UserError if no block fits."""
    budget = int(available_bytes * fraction)
    num_blocks = budget // block.total - 1  # minus the padding block
    if num_blocks < num_groups:
        raise UserError(
            f"{show_size(budget)} of memory is too little for a KV cache with {block.describe()}; it is {fraction:g} of"
            f" {show_size(available_bytes)} {what_is_available};"
            " free some memory, or set kv_cache_num_tokens, or a lower max_tokens_per_forward"
        )
    return KVCachePlan(
        num_blocks,
        f"{show_size(available_bytes)} {what_is_available} x {fraction:g} / {block.describe()}"
        f" = {num_blocks:,} blocks of {page_size}{_in_tokens(num_blocks, page_size, num_groups)}",
    )


def _in_tokens(num_blocks: int, page_size: int, num_groups: int) -> str:
    """What blocks are in tokens, for the user."""
    num_tokens = num_blocks // num_groups * page_size
    if num_groups == 1:
        return f" = {num_tokens:,} tokens"
    return f", for {num_groups} groups of layers = {num_tokens:,} tokens, more where windows give blocks back"


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The states for which a worker has memory: as many on all ranks."""

    max_seqs: int
    """Of running sequences."""
    num_snapshots: int
    """Kept for prompts to come; 0 if no layer has a state."""
    num_bytes: int
    """On all workers that share the available memory, together."""
    arithmetic: str
    """One line for the user."""


def size_states(config: ServerConfig, info: ModelInfo, mesh: Mesh, available_bytes: int) -> StatePlan:
    """As many snapshots as running sequences, as far as both fit into half of what the KV cache may take with its
    defaults; else what all sequences leave, but at least one in _STATES_PER_SNAPSHOT.

    available_bytes: to all workers that share the memory. Raises UserError if not even one sequence's fit."""
    own = state_bytes((info.spec.layers[index] for index in mesh.stage_layers(info)), mesh.tp_size)
    total = state_bytes(info.spec.layers, mesh.tp_size) * mesh.tp_size * num_replicas(config)
    wanted, budget = config.max_seqs_per_forward, int(available_bytes * CPU_FRACTION / 2)
    most = budget // total - 1  # the padding slot has one
    num_snapshots = min(wanted, max(1, most // _STATES_PER_SNAPSHOT, most - wanted))
    max_seqs = min(wanted, most - num_snapshots)
    if max_seqs < 1:
        raise UserError(
            f"{show_size(budget)} of memory is too little for the states of a sequence and of a prompt,"
            f" {show_size(total)} each; it is half of {CPU_FRACTION:g} of {show_size(available_bytes)} available"
        )
    num_states = max_seqs + num_snapshots
    return StatePlan(
        *(max_seqs, num_snapshots, (num_states + 1) * total),
        f"states of {max_seqs:,} sequences and {num_snapshots:,} prompts x {show_size(own)} ="
        f" {show_size(num_states * own)}",
    )


_STATES_PER_SNAPSHOT = 4


def size_kv_cache(
    config: ServerConfig,
    num_layers: int,
    shape: KVShape,
    backend: AttentionBackend,
    memory: MemoryTable,
    run_largest: Callable[[], object],
    measure_graphs: Callable[[], int],
    place: Place | None = None,
    states: StatePlan | None = None,
) -> KVCachePlan:
    """The size that kv_cache_num_tokens sets, else a fraction of what the table's other parts leave of the free memory.

    num_layers: with attention, of all stages. run_largest: runs the largest forward. measure_graphs: records some
    graphs, and returns the bytes that all will take; both are called with a KV cache of the padding block alone, on
    CUDA, and noted in the table. place: of this replica. states: whose memory is not taken yet. Raises UserError if
    memory does not suffice.
    """
    own, num_groups = shape.bytes_per_block, 1 + shape.num_groups
    if shape.device.type == "cpu":
        workers = num_workers(config)
        # Of stages with groups, the one with the largest blocks decides.
        total = own * config.pp_size if shape.places else own // shape.num_layers * num_layers
        block = BlockBytes(own, total * num_replicas(config) * config.tp_size, workers)
        near_bytes = None
        if place is not None and config.kv_cache_num_tokens is None:  # what the user asks for may lie elsewhere too
            near_bytes = place.num_bytes // (config.pp_size * config.tp_size)
        available, what = free_cpu_bytes(workers, memory.forward_bound, near_bytes)
        if states is not None:
            available, what = max(0, available - states.num_bytes), f"{what}, without states"
        fraction = CPU_FRACTION
    else:
        block = BlockBytes(own, own)
        _measure_on_cuda(shape.device, backend, memory, run_largest, measure_graphs)
        free = torch.cuda.mem_get_info(shape.device)[0]
        to_load = memory.planned(ADAPTERS) - memory.measured.get(ADAPTERS, 0)
        available = max(0, free - memory.measured[FORWARD] - memory.measured[GRAPHS] - max(0, to_load))
        what, fraction = "free after weights, the largest forward and graphs", CUDA_FRACTION
    if config.kv_cache_num_tokens is not None:
        return plan_fixed(config.kv_cache_num_tokens, config.page_size, block, available, num_groups)
    return plan_auto(available, what, fraction, config.page_size, block, num_groups)


def free_cpu_bytes(num_workers: int, forward: ForwardMemory | None, near_bytes: int | None = None) -> tuple[int, str]:
    """What num_workers may use together beside their largest forwards, at least 0; and what that is, for the user.

    near_bytes: memory near to each worker, if only that counts."""
    memory = available_memory()
    available, limit = memory.num_bytes, f"(limit: {memory.limited_by})"
    if num_workers > 1:
        available = available_to_all(available, own_bytes(), sibling_bytes(), num_workers)
    if near_bytes is not None and (near := num_workers * max(0, near_bytes - own_bytes())) < available:
        available, limit = near, f"(limit: the memory nodes, {show_size(near_bytes)} for each worker)"
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


def graph_bytes(runner: ModelRunner, sizes: Sequence[int], chunk_sizes: Sequence[int], device: torch.device) -> int:
    """Bytes that the graphs of these sizes, largest first, will take, estimated by recording the first and the last of
    both. chunk_sizes: as in ModelRunner.record_graphs.

    The others need what the last does beyond the memory of the first. The graphs recorded here stay.
    """
    free: list[int] = [_free_bytes(device)]
    ends, chunk_ends = (_ends(of_kind) for of_kind in (sizes, chunk_sizes))
    runner.record_graphs(CudaRecorder(device), ends, partial(_note_free, free, device), chunk_ends)
    taken = [max(0, before - after) for before, after in itertools.pairwise(free)]  # chunks first
    num_others = len(chunk_sizes) - len(chunk_ends), len(sizes) - len(ends)
    last = taken[len(chunk_ends) - 1] if chunk_ends else 0, taken[-1]
    return sum(taken) + sum(number * of_one for number, of_one in zip(num_others, last, strict=True))


def group_graph_bytes(runner: ModelRunner, sizes: Sequence[int], device: torch.device) -> int:
    """Bytes that recordings with prefix groups of these sizes will take besides, estimated in the same way. The graphs
    of graph_bytes exist, and have the first and the last size."""
    free: list[int] = [_free_bytes(device)]
    runner.record_groups(_ends(sizes), partial(_note_free, free, device))
    taken = [max(0, before - after) for before, after in itertools.pairwise(free)]
    return sum(taken) + (len(sizes) - len(taken)) * taken[-1]


def _ends(sizes: Sequence[int]) -> list[int]:
    return sorted({*sizes[:1], *sizes[-1:]})


def _note_free(free: list[int], device: torch.device, recorded: Iterable[int]) -> Iterator[int]:
    """Adds the free bytes after each recording to `free`."""
    for index, size in enumerate(recorded):
        if index:
            free.append(_free_bytes(device))
        yield size
    free.append(_free_bytes(device))


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
    has_blocks: bool = False,
    max_tiled_rows: int = 0,
) -> ForwardMemory:
    """The memory of a forward with as many tokens and rows as `limits` allows.

    activation_bytes: size of one activation element. num_threads: threads of the kernels. num_top: most top-k logprobs
    of a token. is_int8: activations are quantised. has_blocks: weights are. max_tiled_rows: of the kernels.
    """
    num_tokens = limits.max_tokens
    num_rows = min(limits.max_seqs, num_tokens)
    num_logit_rows = _num_logit_rows(limits)
    num_blocks = -(-limits.context_length // page_size)  # of the longest sequence
    query_size = info.num_heads * info.head_dim
    kv_size = info.num_kv_heads * info.head_dim

    # forward.cpp: queries, keys and values; attention's output; the intermediate activations of the feed-forward; and,
    # where outputs are normalised, one of them.
    layers = info.spec.layers
    has_out_norms = any(layer.attention_out_norm or layer.mlp_out_norm for layer in layers)
    inner_size = max(info.hidden_size * isinstance(layer.mlp, ExpertsSpec) for layer in layers)
    gates_size = max(query_size * attention.has_out_gate for attention in info.spec.attentions)
    inner_size = max(info.intermediate_size, inner_size, gates_size)  # of experts, their output
    # Layers with states give their features and outputs where others have queries, keys and values.
    states = [layer.state for layer in layers if layer.state is not None]
    num_features = max((sum(state.output_sizes.values()) for state in states), default=0)
    num_channels = max((state.num_channels(1) for state in states), default=0)  # among them, as many as outputs
    layer_row = max(query_size + 2 * kv_size, num_features) + max(query_size, num_channels) + inner_size
    layer_row += has_out_norms * info.hidden_size
    # Plus the cosines and sines of the rotary embedding.
    hidden_row = info.hidden_size * activation_bytes + info.spec.num_rotary_tables * info.head_dim * _FLOAT
    # The LSE of every head; the output and LSE of rows that share a prefix; lists of tiles, for each window; each
    # thread's tile; and the partitions of tiles to be merged.
    num_windows = len({(attention.window, attention.chunk) for attention in info.spec.attentions})
    num_tiles = (2 * num_rows + num_tokens * info.num_heads // _TILE_QUERIES + 1) * info.num_kv_heads * num_windows
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
    # experts.cpp: rows of experts before the first product and after each; of tokens, the normed states, also in
    # float32, the shared expert's activations, and what the router gives.
    widest = max(info.intermediate_size, query_size, info.hidden_size)
    of_experts, widest_rows, in_planes = 0, num_tokens * widest, _planes_bytes(num_tokens, 1, widest)
    tiled = 0
    for mlp in set(info.spec.mlps):
        if isinstance(mlp, ExpertsSpec):
            rows = min(num_tokens * mlp.num_rows, MAX_ROWS)
            own = rows * (info.hidden_size + mlp.expert.width) * activation_bytes + 4 * rows * _INDEX
            shared_width = 0 if mlp.shared is None else mlp.shared.width
            own += num_tokens * (info.hidden_size + shared_width) * activation_bytes
            own += num_tokens * (info.hidden_size + mlp.router.num_experts + 1) * _FLOAT
            of_experts = max(of_experts, own)
            widest_input = max(info.hidden_size, mlp.expert.width)
            widest_rows = max(widest_rows, rows * widest_input)
            in_planes = max(in_planes, _planes_bytes(rows, mlp.router.num_experts, widest_input))
            if widest_input > _PART_INPUTS:
                tiled = max(tiled, (rows + _TILE_ROWS * mlp.router.num_experts) * widest_input)
        elif widest > _PART_INPUTS:
            tiled = max(tiled, (min(num_tokens, max_tiled_rows) + _TILE_ROWS) * widest)
    if activation_bytes == _FLOAT or is_int8 or not max_tiled_rows:
        tiled = 0
    panel_bytes = _MAX_PANEL * _FLOAT  # for each input
    return ForwardMemory(
        kept={
            "layers": num_tokens * layer_row * activation_bytes,
            "normed states": num_tokens * info.hidden_size * activation_bytes,
            "logits": num_logit_rows * info.vocab_size * activation_bytes,
            "widened weights": num_threads * widest * panel_bytes,
            "quantised activations": int(widest_rows * _INT8_BYTES_PER_INPUT) if is_int8 else 0,
            "sums of groups": int(widest_rows * _SUM_BYTES_PER_INPUT) if has_blocks and not is_int8 else 0,
            "planes": in_planes if has_blocks and not is_int8 else 0,
            "rows in tiles": tiled * activation_bytes,
            "sums of parts": num_threads * _PART_SUMS_BYTES if widest > _PART_INPUTS else 0,
            "experts": of_experts,
        },
        passing={
            # states.cpp, Work, which stays: channels, outputs, and three numbers of each head, which has at least 24.
            "states": num_tokens * (2 * num_channels + num_channels // 8) * _FLOAT,
            "hidden states": num_tokens * hidden_row + num_logit_rows * info.hidden_size * activation_bytes,
            "attention": attention,
            "sampling": num_threads * _VOCABULARIES_PER_THREAD * info.vocab_size * _FLOAT + masks,
            "answers": answers,
            "batch": host + _OTHER,
        },
    )


def _planes_bytes(num_rows: int, num_groups: int, in_size: int) -> int:
    """What the kernels keep at most for rows in planes, of up to num_rows rows in num_groups groups."""
    return max(int(min(num_rows, num_groups * most) * in_size * per_input) for most, per_input in _IN_PLANES)


def reserve(memory: ForwardMemory, model: Model, limits: ForwardLimits) -> None:
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
