"""The fastest attention that computes rightly: a backend, and on Hopper FlashInfer's "fa2" or "fa3" for prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.attention.backend import AttentionBackend, BlockLists, KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import Candidate, has_compiled_fa3, install_advice, make_backend, prepare_fa3
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend, has_fa3
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.triton_choice import groups_in_use
from tokasaurus.model.worker.device import make_stopwatch
from tokasaurus.model.worker.memory import kv_shape
from tokasaurus.model.worker.memory_plan import sizes_of_graphs
from tokasaurus.model.worker.self_check import Checks, Measured, measure_attention

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig
    from tokasaurus.model.worker.start import Start

logger = logging.getLogger(__name__)

_PROMPTS = ((2048,), (2048, 4096), (64,) * 32)
"""Tokens of each prompt that are attended to, by forward: one prompt, the second half of a longer one beside it, many
short ones. At most 2,048 of each are computed."""

_NUM_ROUNDS = 3
"""Runs of each way after the first one, in turns; the shortest counts."""

_MARGIN = 0.02
"""fa3 is taken if it is faster by more than this: else starts of one server might choose differently."""


def choose_attention(start: Start) -> str:
    """The fastest attention backend that computes rightly here; FlashInfer's may compile for minutes."""
    config, formats = start.config, (start.kv_cache_dtype, start.activation_dtype)
    start.shape = kv_shape(start.info, start.mesh, config.page_size, *formats, start.device, start.model.sinks)
    max_graph_rows = max(sizes_of_graphs(config), default=0) if start.on_cuda else 0
    start.backend = choose_backend(config, start.shape, start.kernels, max_graph_rows, start.checks)
    if not start.least(int(start.backend.computes_groups and not start.shape.has_chunks)):
        start.limits = replace(start.limits, has_groups=False)
        if config.use_hydragen:
            why = "chunks" if start.shape.has_chunks else "a window by FlashInfer"
            logger.warning("use_hydragen=T does nothing: no prefix groups are computed for layers with %s", why)
    if not start.on_cuda or not isinstance(start.backend, FlashInferBackend):
        return ""
    choose_calls(start.backend, start.shape, start.checks)
    if not start.least(int(has_fa3(start.device))):
        return ""
    return choose_prefill(start.backend, start.shape, start.mesh, start.checks)


def choose_backend(
    config: ServerConfig, shape: KVShape, kernels: Kernels | None, max_graph_rows: int, checks: Checks
) -> AttentionBackend:
    """The fastest backend that works here. max_graph_rows: as in make_backend. Raises FlagRefused."""
    is_checked = shape.device.type == "cuda" or checks.is_thorough

    def attempt(candidate: Candidate) -> AttentionBackend | None:
        built: list[AttentionBackend] = []

        def measure() -> Iterator[Measured]:
            built.clear()
            built.append(candidate.build())
            if is_checked:
                yield from measure_attention(built[-1], shape)

        flag = f"attention_backend={candidate.name}"
        without = f"others are slower{install_advice(candidate.name)}"
        asked_for = None if config.attention_backend is None else flag
        groups = groups_in_use(shape.device, "attention")
        return built[-1] if checks.passes(flag, measure, f"{flag} is", without, asked_for, groups) else None

    try:
        return make_backend(config.attention_backend, shape, kernels, max_graph_rows, attempt)
    except ValueError as error:
        raise FlagRefused(str(error)) from error


def choose_calls(backend: FlashInferBackend, shape: KVShape, checks: Checks) -> None:
    """Let steps call FlashInfer's functions without its wrappers if that is right on all ranks, all of which must call
    this. Replaces the backend's cache."""

    def measure() -> Iterator[Measured]:
        backend.prepare_calls()
        yield from measure_attention(backend, shape)

    what, without = "calling FlashInfer without its wrappers is", "steps with prompts take the host longer"
    if not checks.passes("flashinfer_calls", measure, what, without):
        backend.drop_calls()


def choose_prefill(backend: FlashInferBackend, shape: KVShape, mesh: Mesh, checks: Checks) -> str:
    """Let prompts take "fa3" if that is right and faster on all ranks, all of which must call this. Replaces the
    backend's cache. -> one line for the user."""
    is_ready = backend.computes_by_fa3 and has_compiled_fa3(backend)
    if not least_of_ranks(int(is_ready), mesh, shape.device):
        backend.drop_fa3()
        if not backend.computes_by_fa3:
            return "prompts take fa2, for windows, caps or layers that differ"
        return "prompts take fa2; fa3 is compiled for later starts, unless it has failed to"

    def measure() -> Iterator[Measured]:
        prepare_fa3(backend)
        yield from measure_attention(backend, shape)

    if not checks.passes("flashinfer_fa3", measure, "FlashInfer's fa3 is", "prompts take fa2"):
        backend.drop_fa3()
        return "prompts take fa2"
    fa2_s, fa3_s = time_prefill(backend, shape, mesh)
    if fa3_s >= fa2_s * (1 - _MARGIN):
        backend.drop_fa3()
    name = "fa3" if backend.uses_fa3 else "fa2"
    return f"prompts take {name}: {fa2_s * 1e3:.3g} ms a layer by fa2, {fa3_s * 1e3:.3g} by fa3"


@torch.inference_mode()
def time_prefill(backend: FlashInferBackend, shape: KVShape, mesh: Mesh) -> tuple[float, float]:
    """Seconds of a layer's attention by "fa2" and by "fa3" on the slowest rank, in the geometric mean of the forwards.
    All keys and values are in the padding block: prompts are bound by arithmetic."""
    stopwatch = make_stopwatch(shape.device)
    backend.allocate(1)
    products = [1.0, 1.0]
    for lengths in _PROMPTS:
        part = _part(lengths, shape)
        size = (part.num_rows, shape.num_heads, shape.head_dim)
        query = torch.zeros(size, dtype=shape.query_dtype, device=shape.device)
        output = torch.empty_like(query)
        shortest = [math.inf, math.inf]
        for round_index in range(1 + _NUM_ROUNDS):
            for way, uses_fa3 in enumerate((False, True)):
                backend.uses_fa3 = uses_fa3
                backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64, device=shape.device), (part,)))
                seconds = stopwatch.seconds(lambda: backend.attend(query, 0, part, output))  # noqa: B023
                if round_index:
                    shortest[way] = min(shortest[way], seconds)
        for way, seconds in enumerate(shortest):
            products[way] *= -least_of_ranks(-math.ceil(seconds * 1e9), mesh, shape.device) / 1e9
    backend.uses_fa3 = True
    fa2_s, fa3_s = (product ** (1 / len(_PROMPTS)) for product in products)
    return fa2_s, fa3_s


def _part(lengths: tuple[int, ...], shape: KVShape) -> PagedPart:
    """Prompts of which the last tokens are computed, at most _PROMPTS[0][0] of each; all blocks are block 0."""
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    counts = -(-kv_lengths // shape.page_size)
    rows = kv_lengths.clamp(max=_PROMPTS[0][0])
    block_starts, query_starts = (
        torch.cat((values.new_zeros(1), values.cumsum(0))).to(torch.int32) for values in (counts, rows)
    )
    blocks = torch.zeros(int(counts.sum()), dtype=torch.int32, device=shape.device)
    on_device = (block_starts, kv_lengths - (counts - 1) * shape.page_size, query_starts, kv_lengths)
    starts, last_lengths, own_query_starts, own_lengths = (tensor.to(shape.device) for tensor in on_device)
    lists = BlockLists(block_starts, starts, blocks, last_lengths, own_query_starts, own_lengths)
    return PagedPart(0, int(rows.sum()), query_starts, None, kv_lengths, causal=True, lists=lists)
