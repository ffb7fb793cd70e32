"""The plan of a worker's memory: a table whose entries say how each part is planned. `toka plan` prints it, and a start
reports beside it what it measures (memory.py). Numbers alone: needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import AttentionSpec, attentions_of
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import longest_context
from tokasaurus.model.buffer_sizes import (
    AS_SAMPLED_BYTES_PER_TOKEN,
    GRAPH_STEP,
    HEAD_DIMS,
    ITEM_BYTES,
    LOGPROBS_AT_ONCE,
    RECORDED_ROW_BYTES,
    RECORDED_TOKEN_BYTES,
    RING_SIZE,
    RULED_BYTES_PER_TOKEN,
    KVSizes,
    as_sampled_rows_at_once,
    buffer_bytes,
    chunk_sizes,
    graph_sizes,
    group_graph_sizes,
    max_graph_groups,
    num_wrappers,
    padded_count,
    padded_rank,
    plan_bytes,
    ruled_rows_at_once,
    sampled_bytes,
    sizes_for,
    workspace_bytes,
)
from tokasaurus.model.decoder.parameters import num_in_adapter, num_in_float32, num_parameters, of_class
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.workers import max_adapter_rank, num_adapters

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

CONTEXT_BYTES = 600 << 20
"""CUDA's context, cuBLAS and the kernels' code on the device: an estimate, which differs by device and version."""

WEIGHTS, ROTARY, SLOTS, INPUTS = "weights", "rotary table", "slots", "inputs of steps"
STAGES, SUMS, FORWARD, WORKSPACES = "stage buffers", "sums over ranks", "largest forward", "attention workspaces"
GRAPHS, CONTEXT, ADAPTERS = "CUDA graphs", "CUDA context", "adapters"
"""Names of the table's parts."""

_GRAPH_BYTES = 256 << 10
"""What a driver keeps for the launches between two attentions: an estimate."""

_NUM_PROCESSORS = 132
"""Multiprocessors of an H100 or H200, on which the size of FlashInfer's workspace depends."""

CUDA_FRACTION = 0.95
"""Fraction of the device memory left after weights and the largest forward: the rest covers fragmentation."""

CPU_FRACTION = 0.25
"""Fraction of the available memory for the KV cache on a CPU: the rest is left to the machine's other programs."""


class DoesNotFit(Exception):
    """The message, one line, says what does not fit and which flag to change."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan depends on besides the model. Fields are flags of the same name."""

    device_bytes: int
    dtype: str
    kv_cache_dtype: str
    activation_dtype: str | None
    """None: no linear layer is packed, and all is of `dtype`, as on a CUDA device."""
    tp_size: int
    pp_size: int
    ep: bool
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
    chunk_sizes: tuple[int, ...]
    """Tokens of each larger step that is recorded, largest first."""
    group_sizes: tuple[int, ...]
    """The ones in graph_sizes that have a second recording, for steps with prefix groups."""
    num_adapters: int = 0
    """max_loras, as it holds for these flags."""
    max_lora_rank: int = 0

    @property
    def item(self) -> int:
        """Bytes of a weight, and of a number of the hidden states."""
        return ITEM_BYTES[self.dtype]


def sizes_of(
    config: ServerConfig,
    info: ModelInfo,
    device_bytes: int,
    dtype: str,
    kv_cache_dtype: str,
    activation_dtype: str | None = None,
) -> Sizes:
    graphs = sizes_of_graphs(config)
    return Sizes(
        device_bytes=device_bytes,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        activation_dtype=activation_dtype,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        ep=config.ep,
        page_size=config.page_size,
        max_tokens_per_forward=config.max_tokens_per_forward,
        max_seqs_per_forward=config.max_seqs_per_forward,
        context_length=longest_context(info.context_length, config.max_num_tokens_per_request),
        has_flashinfer=config.attention_backend != "torch",
        has_symmetric_sums=config.symmetric_all_reduce is not False,
        graph_sizes=tuple(graphs),
        chunk_sizes=tuple(sizes_of_chunks(config, graphs)),
        group_sizes=tuple(sizes_of_groups(config, graphs)),
        num_adapters=num_adapters(config),
        max_lora_rank=max_adapter_rank(config),
    )


def sizes_of_graphs(config: ServerConfig) -> list[int]:
    """Sequences, largest first; none without CUDA graphs."""
    if config.use_cudagraphs is False:
        return []
    return graph_sizes(config.max_seqs_per_forward)


def sizes_of_chunks(config: ServerConfig, sizes: list[int]) -> list[int]:
    """Tokens of the recorded steps beyond the decode steps of `sizes`, largest first; none without CUDA graphs."""
    return chunk_sizes(sizes[0], GRAPH_STEP, config.max_tokens_per_forward) if sizes else []


def sizes_of_groups(config: ServerConfig, sizes: list[int]) -> list[int]:
    """Which decode steps in `sizes` have a second recording, for steps with prefix groups; largest first."""
    return [] if config.use_hydragen is False else group_graph_sizes(sizes)


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


NO_STATES_ON_GPUS = "layers with states have no kernels for GPUs yet"


def plan_memory(info: ModelInfo, sizes: Sizes) -> MemoryPlan:
    """Raises DoesNotFit, and ValueError for a tp_size or pp_size by which the model cannot be divided, and for layers
    that GPUs do not compute."""
    if info.spec.has_states:
        raise ValueError(NO_STATES_ON_GPUS)
    numbers = range(sizes.pp_size * sizes.tp_size)
    meshes = [Mesh.of_worker(index, sizes.pp_size, sizes.tp_size, sizes.ep).for_model(info) for index in numbers]
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


def kv_sizes(info: ModelInfo, mesh: Mesh, page_size: int) -> KVSizes:
    """This rank's KV cache. Raises ValueError for a tp_size or pp_size by which the model cannot be divided."""
    return KVSizes(
        num_layers=len(attentions_of(info.spec.layers[index] for index in mesh.stage_layers(info))),
        num_heads=mesh.shard(info.num_heads, "attention heads")[1],
        num_kv_heads=mesh.kv_head_shard(info.num_kv_heads)[1],
        head_dim=info.head_dim,
        page_size=page_size,
    )


def plan_worker(info: ModelInfo, mesh: Mesh, sizes: Sizes) -> WorkerPlan:
    """The memory of one worker. Raises ValueError for a tp_size or pp_size by which the model cannot be divided."""
    shape = kv_sizes(info, mesh, sizes.page_size)
    rank = _Rank(info, mesh, shape, sizes)
    planned = ((entry, entry.plan(rank)) for entry in _TABLE.values())
    parts = tuple(Part(entry.name, *found, entry.is_exact) for entry, found in planned if found is not None)
    left = sizes.device_bytes - sum(part.num_bytes for part in parts)
    block_bytes = shape.block_bytes(sizes.kv_cache_dtype)
    bytes_per_token = block_bytes // sizes.page_size
    num_blocks = int(left * CUDA_FRACTION) // block_bytes - 1  # minus the padding block, as in the server
    return WorkerPlan(mesh.pp_rank, mesh.tp_rank, parts, bytes_per_token, num_blocks)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the parts of one worker are planned from."""

    info: ModelInfo
    mesh: Mesh
    shape: KVSizes
    sizes: Sizes

    @property
    def table_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.sizes.context_length // self.sizes.page_size)

    @property
    def has_flashinfer(self) -> bool:
        """Whether FlashInfer computes attention, where it is installed."""
        sizes = self.sizes
        is_half = sizes.dtype != "float32" and sizes.kv_cache_dtype == sizes.dtype
        return sizes.has_flashinfer and self.shape.head_dim in HEAD_DIMS and is_half

    @property
    def attentions(self) -> list[AttentionSpec]:
        """Of this worker's layers."""
        return list(attentions_of(self.info.spec.layers[index] for index in self.mesh.stage_layers(self.info)))

    @property
    def num_kinds(self) -> int:
        """Kinds of layers, each of which FlashInfer's wrappers are planned for."""
        return len({(layer.scale, layer.window, layer.softcap) for layer in self.attentions})

    @property
    def records_groups(self) -> bool:
        """Whether decode steps with prefix groups are recorded, where FlashInfer computes attention."""
        has_windows = any(attention.window is not None for attention in self.info.spec.attentions)
        return bool(self.sizes.group_sizes) and not has_windows

    @property
    def widest_row(self) -> int:
        """Most numbers that a layer has in memory for each token. Layers run one after another in the same memory."""
        info, shape = self.info, self.shape
        if info.of_class is not None:
            return info.of_class.widest_row
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention_row = 2 * info.hidden_size + 2 * (query + 2 * kv) + query
        # Of experts, a token has several rows of outputs: as they are, and twice in float32.
        num_rows = max((mlp.num_rows for mlp in info.spec.mlps), default=0)
        num_hidden = (2 + (1 + 2 * ITEM_BYTES["float32"] // self.sizes.item) * num_rows) * info.hidden_size
        num_parts = 1 if self.mesh.for_model(info).whole_experts else self.mesh.tp_size  # all may be of one rank
        return max(attention_row, num_hidden + 3 * (info.intermediate_size // num_parts))


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
    info, mesh, sizes, item = rank.info, rank.mesh, rank.sizes, rank.sizes.item
    count = num_parameters(info, mesh)
    what = f"{rank.shape.num_layers} of {info.num_layers} layers"
    if mesh.tp_size > 1:
        what += f", each divided by {mesh.tp_size}"
        what += ", with whole experts" if mesh.for_model(info).whole_experts else ""
    ends = [name for name, is_here in (("embedding", mesh.is_first_stage), ("LM head", mesh.is_last_stage)) if is_here]
    if info.tie_embeddings and len(ends) == 2:
        ends = ["embedding, which is also the LM head"]
    num_bytes = count * item
    if num_wide := num_in_float32(info, mesh):
        num_bytes += num_wide * (ITEM_BYTES["float32"] - item)
    if info.of_class is not None and sizes.activation_dtype is not None:
        of_rank, wide = of_class(info.of_class, info, mesh), ITEM_BYTES[sizes.activation_dtype]
        others = count - of_rank.num_in_linears
        num_packed_too = 0 if sizes.dtype == "float16" else of_rank.num_tied  # which no layout of its own multiplies
        num_bytes += others * (wide - item) + num_packed_too * item
        what += f", {others:,} parameters outside linear layers as {wide} B each, {num_packed_too:,} of the head twice"
    if num_wide and not info.spec.num_experts:
        ends.append(f"{num_wide:,} of states as 4 B")
    elif num_wide:
        active, owners = num_parameters(info, mesh, is_active=True), "routers"
        owners += " and states" if info.spec.has_states else ""
        size = show_size(active * item)
        ends.append(f"{num_wide:,} of {owners} as 4 B; {active:,} ({size}) are active for a token")
    return num_bytes, f"{count:,} parameters x {item} B: {', '.join([what, *ends])}"


def _adapters(rank: _Rank) -> Planned:
    sizes, item = rank.sizes, rank.sizes.item
    if not sizes.num_adapters or not rank.info.is_native or rank.info.spec.has_states:
        return None
    max_rank = padded_rank(sizes.max_lora_rank)
    count = num_in_adapter(rank.info, rank.mesh, max_rank)
    reason = f"{sizes.num_adapters} x {count:,} numbers of rank {max_rank} x {item} B"
    return sizes.num_adapters * count * item, reason


def _rotary(rank: _Rank) -> Planned:
    num_positions, num_numbers = rank.sizes.context_length, rank.info.head_dim * rank.info.spec.num_rotary_tables
    return num_positions * num_numbers * 4, f"{num_positions:,} positions x {num_numbers} x 4 B"


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
    num_buffers = rank.mesh.num_hidden_buffers
    if not num_buffers:
        return None
    num_tokens = padded_count(rank.sizes.max_tokens_per_forward, rank.mesh.tp_size)
    hidden_size, item = rank.info.hidden_size, rank.sizes.item
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
    num_tokens, item, widest = sizes.max_tokens_per_forward, sizes.item, rank.widest_row
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
    wrappers = num_wrappers(rank.num_kinds)
    has_windows = any(layer.window is not None for layer in rank.attentions)
    num_bytes = workspace_bytes(rank.shape, _NUM_PROCESSORS, graph_rows, has_windows) + wrappers * of_wrapper
    reason = f"FlashInfer's workspace for {_NUM_PROCESSORS} multiprocessors"
    if graph_rows:
        reason += f" and graphs of {graph_rows:,} sequences"
    return num_bytes, f"{reason}, and {wrappers} wrappers x {show_size(of_wrapper)}"


def _graphs(rank: _Rank) -> Planned:
    """All graphs share the memory of the largest, and those of decode steps that of the most logits. For each piece of
    a graph the driver keeps some more: a graph has one piece more than the stage has layers, and that of a decode step
    twice as many where attention can be recorded too, or three times with prefix groups. Adapters are recorded without
    prefix groups."""
    sizes, mesh = rank.sizes, rank.mesh
    if not sizes.graph_sizes:
        return None
    num_tokens, num_rows = (*sizes.chunk_sizes, *sizes.graph_sizes)[0], sizes.graph_sizes[0]
    num_recordings = len(sizes.chunk_sizes) + len(sizes.graph_sizes)
    row = rank.widest_row
    if not mesh.is_first_stage:
        row += rank.info.hidden_size  # where graphs read what the stage before sent
    num_bytes = num_tokens * row * sizes.item
    reason = f"{num_tokens:,} tokens x {row:,} x {sizes.item} B"
    if mesh.is_last_stage:
        num_logits = mesh.vocab_shard(rank.info.vocab_size)[1]
        of_samples = sampled_bytes(num_rows, _NUM_PROCESSORS)
        num_bytes += num_rows * num_logits * sizes.item + of_samples
        reason += f" + {num_rows:,} sequences x {num_logits:,} x {sizes.item} B + {of_samples:,} B of samples"
    num_bytes += num_tokens * RECORDED_TOKEN_BYTES + num_rows * RECORDED_ROW_BYTES
    reason += f" + {num_tokens:,} x {RECORDED_TOKEN_BYTES} B + {num_rows:,} x {RECORDED_ROW_BYTES} B of inputs"
    if rank.has_flashinfer:
        num_recordings += len(sizes.graph_sizes)
    if sizes.num_adapters and rank.info.is_native:
        num_recordings *= 2
    if rank.has_flashinfer:
        of_plans = rank.num_kinds * plan_bytes(num_rows)
        num_lists, of_prefixes = num_rows, 0
        if rank.records_groups:
            num_recordings += len(sizes.group_sizes)
            num_lists += max_graph_groups(num_rows, num_rows)
            of_prefixes = of_plans + num_rows * rank.shape.num_heads * 4
        num_bytes += num_lists * rank.table_blocks * 4 + of_plans + of_prefixes
        reason += f" + {num_lists:,} x {rank.table_blocks:,} blocks x 4 B + {of_plans:,} B of plans"
        if of_prefixes:
            reason += f" + {of_prefixes:,} B of prefixes"
    num_pieces = num_recordings * (rank.shape.num_layers + 1)
    num_bytes += num_pieces * _GRAPH_BYTES
    return num_bytes, f"{reason} + {num_pieces:,} pieces x {show_size(_GRAPH_BYTES)}"


def _context(_rank: _Rank) -> Planned:
    return CONTEXT_BYTES, "context, cuBLAS and kernels' code"


_TABLE = {
    entry.name: entry
    for entry in (
        _Entry(WEIGHTS, _weights, is_exact=True, is_on_cpu=True),
        _Entry(ROTARY, _rotary, is_exact=True, is_on_cpu=True),
        _Entry(ADAPTERS, _adapters),
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


def show_size(num_bytes: float) -> str:
    """The size with a unit and four digits, for the user."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
