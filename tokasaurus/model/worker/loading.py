"""Load a model worker: device, weights, attention backend and runner, each checked before it is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tokasaurus.checkpoint import Checkpoint, check_weight_sizes, weight_files
from tokasaurus.messages.status import FlagRefused, PhaseDone, UserError
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels, load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, choose_gemm
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.registry import build_decoder
from tokasaurus.model.decoder.weights import FilledModules, load_weights, return_freed_memory
from tokasaurus.model.execution.device_batch import padded_count
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks, num_hidden_buffers
from tokasaurus.model.parallel.symmetric_all_reduce import buffer_bytes
from tokasaurus.model.staging.packed import sizes_for
from tokasaurus.model.worker.all_reduce_start import choose_all_reduce, is_tried
from tokasaurus.model.worker.attention_check import measure_attention
from tokasaurus.model.worker.device import (
    choose_activation_dtype,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    is_compiled,
)
from tokasaurus.model.worker.memory_plan import (
    INPUTS,
    ROTARY,
    SLOTS,
    STAGES,
    SUMS,
    WEIGHTS,
    WORKSPACES,
    sizes_of_graphs,
)
from tokasaurus.model.worker.memory_report import MemoryReport
from tokasaurus.model.worker.self_check import Checks, ComputesWrongly, describe
from tokasaurus.model.worker.step_check import measure_layers
from tokasaurus.model.worker.threads import set_worker_threads
from tokasaurus.model.worker.triton_check import switch_off_wrong_kernels
from tokasaurus.model.worker.warmup import ForwardLimits
from tokasaurus.monitoring.trace import Trace

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

PROCESS = "model worker"

Fill: TypeAlias = Callable[[Decoder, FilledModules], None]
"""Fills all weight shards of a model, and notes each."""


class Phases:
    """Times the phases of a start and reports each to the user."""

    def __init__(self, report: Callable[[PhaseDone], None]) -> None:
        self.console = Console(stderr=True)
        self._report = report
        self._last_end = time.perf_counter()

    @contextmanager
    def __call__(self, name: str, has_progress_bar: bool = False) -> Iterator[list[str]]:
        """Time the body, including the code between the previous phase and this one; a terminal shows a spinner.

        Strings that the body appends to the list are shown to the user.
        """
        details: list[str] = []
        with nullcontext() if has_progress_bar else self.console.status(f"{PROCESS}: {name}"):
            yield details
        started, self._last_end = self._last_end, time.perf_counter()
        self._report(PhaseDone(PROCESS, name, self._last_end - started, ", ".join(details)))


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A model on its device, with a backend whose KV cache has no size yet."""

    mesh: Mesh
    device: torch.device
    kernels: Kernels | None
    """The CPU kernels, if the device is a CPU and has them."""
    compiler: Compiler | None
    model: Decoder
    shape: KVShape
    backend: AttentionBackend
    slots: SlotTable
    runner: ModelRunner
    limits: ForwardLimits
    memory: MemoryReport
    checks: Checks

    def least(self, value: int) -> int:
        """The least value of all ranks, which must call this together."""
        return least_of_ranks(value, self.mesh, self.device)


def load_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    mesh: Mesh,
    index: int,
    phases: Phases,
    fill: Fill | None = None,
    checks: Checks | None = None,
) -> LoadedWorker:
    """Load the model and check what computes it. Raises UserError.

    mesh: the other ranks of its group must call this too.
    index: among the workers of all replicas; it chooses the CUDA device.
    fill: fills the weights; None: from the checkpoint's files.
    checks: of a single rank; None: the usual ones of a start.
    """
    info = checkpoint.info
    if fill is None:
        check_weight_sizes(weight_files(checkpoint.directory), info)
    context_length = min(info.context_length, config.max_num_tokens_per_request or info.context_length)
    platform = _choose_platform(config, mesh, index, phases)
    device, kernels = platform.device, platform.kernels
    compiler = Compiler(is_required=config.torch_compile is True) if platform.compiles else None
    memory = MemoryReport(config, info, mesh, device, platform.dtype, platform.kv_cache_dtype)
    if checks is None:
        checks = Checks(lambda works: bool(least_of_ranks(int(works), mesh, device)))
    if is_tried(config.symmetric_all_reduce, mesh, device):
        with phases("all-reduce") as details, memory.part(SUMS, outside_torch=True):
            num_bytes = buffer_bytes(config.max_tokens_per_forward, info.hidden_size, platform.activation_dtype)
            first_device = index - mesh.tp_rank
            mesh, described = choose_all_reduce(
                *(config.symmetric_all_reduce, mesh, device, platform.activation_dtype, num_bytes, first_device),
                on_left_out=partial(checks.leave_out, "symmetric_all_reduce"),
            )
            details.append(described)
    model = _load_model(checkpoint, mesh, platform, compiler, context_length, fill, memory, phases)
    shape = KVShape(
        num_layers=len(mesh.stage_layers(info)),
        num_heads=mesh.shard(info.num_heads, "attention heads")[1],
        num_kv_heads=mesh.kv_head_shard(info.num_kv_heads)[1],
        head_dim=info.head_dim,
        page_size=config.page_size,
        dtype=platform.kv_cache_dtype,
        device=device,
        activation_dtype=platform.activation_dtype,
    )
    if device.type == "cuda":
        with phases("Triton kernels"):
            switch_off_wrong_kernels(shape, model, checks)
        with phases("attention"), memory.part(WORKSPACES):  # FlashInfer may compile for minutes
            backend = _choose_backend(config, shape, None, max(sizes_of_graphs(config), default=0), checks)
    else:
        backend = _choose_backend(config, shape, kernels, 0, checks)
    limits = ForwardLimits(config.max_tokens_per_forward, config.max_seqs_per_forward, context_length, info.vocab_size)
    with memory.part(SLOTS):
        max_blocks = -(-context_length // config.page_size)
        slots = SlotTable(SlotTableSize(config.max_seqs_per_forward + 1, max_blocks), device)
    slots.rules.allocate(config.page_size)  # the padding block: the first forwards write to no other
    trace = Trace.of(config, mesh.name(PROCESS), index // mesh.num_ranks, row=1 + mesh.world_rank)
    links = None
    if mesh.pp_size > 1:
        with memory.part(STAGES):
            links = _link_stages(mesh, model, limits, device, trace)
    with memory.part(INPUTS):
        runner = ModelRunner(
            *(model, backend, slots, config.page_size, device, kernels, compiler),
            mesh=mesh,
            buffer_sizes=sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, config.max_topk_logprobs),
            async_tp_threshold=config.async_tp_threshold,
            trace=trace,
            links=links,
        )
    loaded = LoadedWorker(mesh, device, kernels, compiler, model, shape, backend, slots, runner, limits, memory, checks)
    if compiler is not None:
        with phases("compiled layers"):
            _check_compiled(loaded, compiler, config)
    return loaded


@dataclass(frozen=True, slots=True)
class _Platform:
    """Where a worker computes, and in which formats."""

    device: torch.device
    kernels: Kernels | None
    compiles: bool
    """Whether torch compiles the layers."""
    dtype: torch.dtype
    """Of the weights."""
    activation_dtype: torch.dtype
    kv_cache_dtype: torch.dtype


def _choose_platform(config: ServerConfig, mesh: Mesh, index: int, phases: Phases) -> _Platform:
    """index: as in load_worker. Raises FlagRefused."""
    with phases("device") as details:
        device = choose_device(config.device, index)
        if device.type != "cpu" and config.cpu_isa is not None:
            raise FlagRefused(f"cpu_isa={config.cpu_isa}: only device=cpu allows it, not device={device.type}")
        if config.async_tp_threshold is not None:
            from tokasaurus.model.parallel.async_tp import enable_fused_gemms  # slow to import

            enable_fused_gemms(config.async_tp_threshold, mesh, device, first_device=index - mesh.tp_rank)
        kernels = load_kernels(config.cpu_isa) if device.type == "cpu" else None
        compiles = is_compiled(config.torch_compile, device)
        dtype = choose_dtype(config.dtype, device, kernels, compiles)
        activation_dtype = choose_activation_dtype(dtype, kernels, compiles)
        kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype, activation_dtype)
        details.append(f"{device}, {_describe_dtypes(dtype, activation_dtype, kv_cache_dtype)}")
        if device.type == "cpu":
            num_threads = set_worker_threads(config.dp_size * config.pp_size * config.tp_size)
            details.append(f"{num_threads} threads")
            if kernels is not None:
                kernels.set_num_threads(num_threads)
    return _Platform(device, kernels, compiles, dtype, activation_dtype, kv_cache_dtype)


def _load_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    platform: _Platform,
    compiler: Compiler | None,
    context_length: int,
    fill: Fill | None,
    memory: MemoryReport,
    phases: Phases,
) -> Decoder:
    """This rank's part of the model, with weights in the layouts of its gemms. fill: as in load_worker."""
    choice = ALWAYS_KERNELS
    if platform.kernels is not None and platform.dtype in ACTIVATION_DTYPES:
        with phases("gemm") as details:
            choice = choose_gemm(platform.kernels, checkpoint.info, platform.dtype)
            details.append(choice.describe())
    with phases("weights", has_progress_bar=True), memory.part(WEIGHTS, ROTARY, on_cpu=True):
        model = _build_model(checkpoint, mesh, platform.dtype)
        model.materialize(platform.device, context_length)
        model.begin_packing(platform.kernels, choice, compiler)
        filled = FilledModules(model, model.pack_module)
        if fill is None:
            _load_weights(model, checkpoint, filled, phases.console)
        else:
            fill(model, filled)
        model.end_packing()
        return_freed_memory()
    return model


def _choose_backend(
    config: ServerConfig, shape: KVShape, kernels: Kernels | None, max_graph_rows: int, checks: Checks
) -> AttentionBackend:
    """The fastest backend that works here. max_graph_rows: as in make_backend. Raises FlagRefused."""

    def check(backend: AttentionBackend) -> None:
        feature = f"attention: {type(backend).__name__}"
        for measured in checks.noting(feature, partial(measure_attention, backend, shape)):
            if not measured.is_right:
                raise ComputesWrongly(describe(measured))

    try:
        return make_backend(
            *(config.attention_backend, shape, kernels, max_graph_rows),
            check=check if shape.device.type == "cuda" or checks.is_thorough else None,
            all_agree=checks.all_agree,
            on_left_out=lambda name, reason: checks.leave_out(f"attention_backend={name}", reason),
        )
    except ValueError as error:
        raise FlagRefused(str(error)) from error


def check_layers(loaded: LoadedWorker, flag: str | None = None) -> bool:
    """Whether all layers, compiled or not, compute what torch's modules do. flag: as in Checks.passes."""
    runner = loaded.runner
    measure = partial(
        measure_layers,
        *(runner.executor, loaded.model, loaded.backend, loaded.shape, loaded.mesh, loaded.compiler),
        *(runner.token_multiple, loaded.limits.context_length),
    )
    if loaded.compiler is None:
        return loaded.checks.describe_wrong("layers", measure) is None
    what, without = "torch_compile is", "the layers run uncompiled, which is slower"
    return loaded.checks.passes("torch_compile", measure, what, without, flag)


def _check_compiled(loaded: LoadedWorker, compiler: Compiler, config: ServerConfig) -> None:
    """Compile the layers; switch the compiler off if it fails, which it logs itself, or if they compute wrongly."""
    if not check_layers(loaded, "torch_compile=T" if config.torch_compile else None):
        compiler.switch_off()
    elif compiler.has_failed:
        loaded.checks.leave_out("torch_compile", "it does not compile here")


def _link_stages(mesh: Mesh, model: Decoder, limits: ForwardLimits, device: torch.device, trace: Trace) -> StageLinks:
    num_tokens = padded_count(limits.max_tokens, mesh.tp_size)
    buffers = [model.new_hidden(num_tokens, device) for _ in range(num_hidden_buffers(mesh))]
    return StageLinks(mesh, buffers, limits.max_seqs + 1, trace)


def _describe_dtypes(*dtypes: torch.dtype) -> str:
    """dtypes: of weights, activations and KV cache -> text for the user."""
    weights, activations, kv_cache = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    if weights == activations == kv_cache:
        return weights
    return f"{weights} weights, {activations} activations, {kv_cache} KV cache"


def _build_model(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    try:
        return build_decoder(checkpoint.info, mesh, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error


def _load_weights(model: Decoder, checkpoint: Checkpoint, filled: FilledModules, console: Console) -> None:
    files = weight_files(checkpoint.directory)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("weights", total=sum(file.stat().st_size for file in files))
        shards = iter(model.weight_shards())  # a list would keep packed weights in memory
        load_weights(files, shards, model.ignores, lambda size: progress.advance(task, size), filled.note)
