"""The memory of each worker on a CUDA device, part by part, with the reason of each number."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.messages.generation import SamplingParams
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.flashinfer_backend import HEAD_DIMS, plan_bytes, workspace_bytes
from tokasaurus.model.decoder.registry import build_decoder
from tokasaurus.model.execution.device_batch import padded_count
from tokasaurus.model.execution.graphs import graph_sizes
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import num_hidden_buffers
from tokasaurus.model.parallel.symmetric_all_reduce import buffer_bytes
from tokasaurus.model.sampling.prompt_logprobs import LOGPROBS_AT_ONCE
from tokasaurus.model.sampling.rules import ruled_rows_at_once
from tokasaurus.model.staging.packed import RING_SIZE, sizes_for
from tokasaurus.model.worker.kv_memory import CUDA_FRACTION, show_size

CONTEXT_BYTES = 600 << 20
"""CUDA's context, cuBLAS and the kernels' code on the device: an estimate, which differs by device and version."""

WEIGHTS, ROTARY, SLOTS, INPUTS = "weights", "rotary table", "slots", "inputs of steps"
SUMS = "sums over ranks"
STAGES, FORWARD, WORKSPACES, GRAPHS = "stage buffers", "largest forward", "attention workspaces", "CUDA graphs"
"""Names of parts."""

_GRAPH_BYTES = 256 << 10
"""What a driver keeps for the launches between two attentions: an estimate."""

_NUM_PROCESSORS = 132
"""Multiprocessors of an H100 or H200, on which the size of FlashInfer's workspace depends."""
_NUM_WRAPPERS = 12
"""FlashInfer's wrappers that FlashInferBackend keeps, each with a buffer for its plan."""


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


class MemoryFlags(Protocol):
    """The flags, of the server or of `toka plan`, that change how much memory is used."""

    tp_size: int
    pp_size: int
    page_size: int
    max_tokens_per_forward: int
    max_seqs_per_forward: int
    max_num_tokens_per_request: int | None
    symmetric_all_reduce: bool | None
    attention_backend: str | None
    use_cudagraphs: bool | None
    cudagraph_max_size: int | None
    cudagraph_step: int


def sizes_of(
    flags: MemoryFlags, info: ModelInfo, device_bytes: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype
) -> Sizes:
    return Sizes(
        device_bytes=device_bytes,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        tp_size=flags.tp_size,
        pp_size=flags.pp_size,
        page_size=flags.page_size,
        max_tokens_per_forward=flags.max_tokens_per_forward,
        max_seqs_per_forward=flags.max_seqs_per_forward,
        context_length=min(info.context_length, flags.max_num_tokens_per_request or info.context_length),
        has_flashinfer=flags.attention_backend != "torch",
        has_symmetric_sums=flags.symmetric_all_reduce is not False,
        graph_sizes=tuple(sizes_of_graphs(flags)),
    )


def sizes_of_graphs(flags: MemoryFlags) -> list[int]:
    """Sequences, largest first; none without CUDA graphs."""
    if flags.use_cudagraphs is False:
        return []
    return graph_sizes(flags.cudagraph_max_size or flags.max_seqs_per_forward, flags.cudagraph_step)


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


def plan_worker(info: ModelInfo, mesh: Mesh, sizes: Sizes) -> WorkerPlan:
    """The memory of one worker. Raises ValueError for a tp_size or pp_size by which the model cannot be divided."""
    num_layers = len(mesh.stage_layers(info))
    shape = KVShape(
        num_layers=num_layers,
        num_heads=mesh.shard(info.num_heads, "attention heads")[1],
        num_kv_heads=mesh.kv_head_shard(info.num_kv_heads)[1],
        head_dim=info.head_dim,
        page_size=sizes.page_size,
        dtype=sizes.kv_cache_dtype,
        device=torch.device("meta"),
        activation_dtype=sizes.dtype,
    )
    parts = (
        _weights(info, mesh, sizes, num_layers),
        Part(
            ROTARY,
            sizes.context_length * info.head_dim * 4,
            f"{sizes.context_length:,} positions x {info.head_dim} x 4 B",
            is_exact=True,
        ),
        _slots(sizes),
        _inputs(info, sizes),
        *_stage_buffers(info, mesh, sizes),
        *_sums(info, sizes),
        _largest_forward(info, mesh, shape, sizes),
        *_workspaces(shape, sizes),
        *_graphs(info, mesh, shape, sizes),
        Part("CUDA context", CONTEXT_BYTES, "context, cuBLAS and kernels' code", is_exact=False),
    )
    left = sizes.device_bytes - sum(part.num_bytes for part in parts)
    bytes_per_token = shape.bytes_per_block // sizes.page_size
    num_blocks = int(left * CUDA_FRACTION) // shape.bytes_per_block - 1  # minus the padding block, as in the server
    return WorkerPlan(mesh.pp_rank, mesh.tp_rank, parts, bytes_per_token, num_blocks)


def _weights(info: ModelInfo, mesh: Mesh, sizes: Sizes, num_layers: int) -> Part:
    """Of the very modules that the server fills, which exist without memory until then."""
    model = build_decoder(info, mesh, sizes.dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    what = f"{num_layers} of {info.num_layers} layers"
    if mesh.tp_size > 1:
        what += f", each divided by {mesh.tp_size}"
    ends = [name for name, is_here in (("embedding", mesh.is_first_stage), ("LM head", mesh.is_last_stage)) if is_here]
    if info.tie_embeddings and len(ends) == 2:
        ends = ["embedding, which is also the LM head"]
    reason = f"{num_parameters:,} parameters x {sizes.dtype.itemsize} B: {', '.join([what, *ends])}"
    return Part(WEIGHTS, num_bytes, reason, is_exact=True)


def _slots(sizes: Sizes) -> Part:
    num_slots = sizes.max_seqs_per_forward + 1
    num_blocks = -(-sizes.context_length // sizes.page_size)
    per_slot = 4 * num_blocks + 4 * len(SamplingParams._fields) + 8
    reason = f"{num_slots:,} slots x {per_slot:,} B: a table of {num_blocks:,} blocks, sampling parameters, last token"
    return Part(SLOTS, num_slots * per_slot, reason, is_exact=True)


def _inputs(info: ModelInfo, sizes: Sizes) -> Part:
    max_tokens, max_seqs = sizes.max_tokens_per_forward, sizes.max_seqs_per_forward
    num_bytes = RING_SIZE * sizes_for(max_tokens, max_seqs, info.vocab_size, num_top=0).inputs
    reason = f"{RING_SIZE} steps' arrays: {max_tokens:,} tokens and {max_seqs:,} rows with masks each"
    return Part(INPUTS, num_bytes, reason, is_exact=True)


def _stage_buffers(info: ModelInfo, mesh: Mesh, sizes: Sizes) -> list[Part]:
    """For hidden states that are sent and received."""
    num_buffers = num_hidden_buffers(mesh)
    if not num_buffers:
        return []
    num_tokens, item = padded_count(sizes.max_tokens_per_forward, mesh.tp_size), sizes.dtype.itemsize
    num_bytes = num_buffers * num_tokens * info.hidden_size * item
    reason = f"{num_buffers} x {num_tokens:,} tokens x {info.hidden_size:,} x {item} B between stages"
    return [Part(STAGES, num_bytes, reason, is_exact=True)]


def _sums(info: ModelInfo, sizes: Sizes) -> list[Part]:
    """What the ranks read of each other."""
    num_bytes = buffer_bytes(sizes.max_tokens_per_forward, info.hidden_size, sizes.dtype)
    if sizes.tp_size == 1 or not sizes.has_symmetric_sums or not num_bytes:
        return []
    return [Part(SUMS, num_bytes, "a buffer that the GPUs share, if they can", is_exact=False)]


def _widest_row(info: ModelInfo, mesh: Mesh, shape: KVShape) -> int:
    """Most numbers that a layer has in memory for each token. Layers run one after another in the same memory."""
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention_row = 2 * info.hidden_size + 2 * (query + 2 * kv) + query
    return max(attention_row, 2 * info.hidden_size + 3 * (info.intermediate_size // mesh.tp_size))


def _graphs(info: ModelInfo, mesh: Mesh, shape: KVShape, sizes: Sizes) -> list[Part]:
    """All graphs use the memory of the largest, beside what the driver keeps of each piece: one more than there are
    layers in each, and as much again where attention can be recorded too."""
    if not sizes.graph_sizes:
        return []
    largest, num_pieces = sizes.graph_sizes[0], len(sizes.graph_sizes) * (shape.num_layers + 1)
    row = _widest_row(info, mesh, shape)
    if not mesh.is_first_stage:
        row += info.hidden_size  # where graphs read what the stage before sent
    if mesh.is_last_stage:
        row += mesh.vocab_shard(info.vocab_size)[1]
    num_bytes = largest * row * sizes.dtype.itemsize
    reason = f"{largest:,} sequences x {row:,} x {sizes.dtype.itemsize} B"
    if _has_flashinfer(shape, sizes):
        num_pieces *= 2
        num_blocks = -(-sizes.context_length // sizes.page_size)
        num_bytes += largest * num_blocks * 4
        reason += f" + {largest:,} x {num_blocks:,} blocks x 4 B"
    num_bytes += num_pieces * _GRAPH_BYTES
    reason += f" + {num_pieces:,} pieces x {show_size(_GRAPH_BYTES)}"
    return [Part(GRAPHS, num_bytes, reason, is_exact=False)]


def _largest_forward(info: ModelInfo, mesh: Mesh, shape: KVShape, sizes: Sizes) -> Part:
    """The activations of a layer at its widest, and the logits."""
    num_tokens, item = sizes.max_tokens_per_forward, sizes.dtype.itemsize
    widest = _widest_row(info, mesh, shape)
    num_bytes = num_tokens * widest * item
    reason = f"{num_tokens:,} tokens x {widest:,} x {item} B of a layer"
    if mesh.is_last_stage:
        num_rows = min(max(sizes.max_seqs_per_forward, LOGPROBS_AT_ONCE), num_tokens)
        if mesh.tp_size > 1:  # a rank's logits of all rows, and those of all tokens of its rows as received and joined
            num_rows = 3 * -(-num_rows // mesh.tp_size)
        num_ruled = min(num_rows, ruled_rows_at_once(info.vocab_size))
        num_bytes += (num_rows * item + num_ruled * 8) * info.vocab_size
        reason += f" + {info.vocab_size:,} logits x ({num_rows:,} rows x {item} B + {num_ruled:,} with penalties x 8 B)"
    return Part(FORWARD, num_bytes, reason, is_exact=False)


def _workspaces(shape: KVShape, sizes: Sizes) -> list[Part]:
    if not _has_flashinfer(shape, sizes):
        return []
    graph_rows = max(sizes.graph_sizes, default=0)
    of_wrapper = plan_bytes(sizes.max_tokens_per_forward)
    num_bytes = workspace_bytes(shape, _NUM_PROCESSORS, graph_rows) + _NUM_WRAPPERS * of_wrapper
    reason = f"FlashInfer's workspace for {_NUM_PROCESSORS} multiprocessors"
    if graph_rows:
        reason += f" and graphs of {graph_rows:,} sequences"
    reason += f", and {_NUM_WRAPPERS} wrappers x {show_size(of_wrapper)}"
    return [Part(WORKSPACES, num_bytes, reason, is_exact=False)]


def _has_flashinfer(shape: KVShape, sizes: Sizes) -> bool:
    """Whether it computes attention, where it is installed."""
    is_half = sizes.dtype != torch.float32 and sizes.kv_cache_dtype == sizes.dtype
    return sizes.has_flashinfer and shape.head_dim in HEAD_DIMS and is_half
