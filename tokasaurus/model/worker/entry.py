"""Process entry of a model worker: device, weights, KV cache, warm-up, then the step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tokasaurus.checkpoint import Checkpoint, check_weight_sizes, weight_files
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.lifecycle import (
    DEFAULT_HYDRAGEN,
    EngineLimits,
    Failed,
    FlagRefused,
    PhaseDone,
    Ready,
    UserError,
    longest_sequence,
)
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels, load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, choose_gemm
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.registry import build_decoder
from tokasaurus.model.decoder.weights import FilledModules, load_weights, return_freed_memory
from tokasaurus.model.execution.cuda_recorder import CudaRecorder, measure_graphs
from tokasaurus.model.execution.device_batch import padded_count
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.process_group import is_about_another_rank, joined, least_of_ranks
from tokasaurus.model.parallel.stage_links import StageLinks, num_hidden_buffers
from tokasaurus.model.staging.sizes import sizes_for
from tokasaurus.model.worker.device import (
    choose_activation_dtype,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    is_compiled,
)
from tokasaurus.model.worker.forward_memory import largest_forward, reserve
from tokasaurus.model.worker.hydragen_costs import describe, find_costs
from tokasaurus.model.worker.kv_sizing import size_kv_cache
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.memory_plan import INPUTS, ROTARY, SLOTS, STAGES, WEIGHTS, WORKSPACES, sizes_of_graphs
from tokasaurus.model.worker.memory_report import MemoryReport
from tokasaurus.model.worker.self_check import check_attention, describe_wrong_graphs
from tokasaurus.model.worker.threads import leave_threads_to, set_worker_threads
from tokasaurus.model.worker.triton_check import switch_off_wrong_kernels
from tokasaurus.model.worker.warmup import ForwardLimits, WarmUpTimes, warm_up, warm_up_small
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage
from tokasaurus.monitoring.trace import Trace

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

PROCESS = "model worker"

CAUSE_SECONDS = 1.0
"""After the failure of another rank: time for the launcher to learn its cause, in seconds."""


def run_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    index: int,
    rendezvous: Path | None,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
    status: Sender[PhaseDone | Ready | Failed],
) -> None:
    """Run the steps of one rank of one replica until `inputs` is closed.

    index: among the workers of all replicas, as in Mesh.of_worker. rendezvous: see parallel/process_group.
    """
    mesh = Mesh.of_worker(index, config.pp_size, config.tp_size)
    try:
        mesh.check(checkpoint.info)
    except ValueError as error:
        raise FlagRefused(str(error)) from error
    try:
        with _joined(config, mesh, index, rendezvous, status.send) as own_mesh:
            worker = start_worker(config, checkpoint, own_mesh, index, status.send)
            outputs.send(Ready(PROCESS, worker.limits))
            status.send(Ready(PROCESS))
            # A CUDA device runs asynchronously; a CPU step is complete when the call returns.
            steps_behind = 0 if worker.device.type == "cpu" else 1
            threads = nullcontext() if worker.kernels is None else leave_threads_to(worker.kernels)
            with threads:
                run_steps(worker.runner, inputs, outputs if mesh.replies else None, steps_behind)
            worker.runner.drop_graphs()  # NCCL's end waits for recorded collectives, which only their graphs' end frees
    except RuntimeError as error:
        if mesh.num_ranks == 1 or not is_about_another_rank(error):
            raise
        inputs.drain()
        if not inputs.is_closed:  # otherwise another rank has ended in order, without steps that were never sent to it
            # The launcher ends this worker because of the other one. A report of this one would hide the cause.
            time.sleep(CAUSE_SECONDS)
            raise


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that is ready to run steps."""

    runner: ModelRunner
    limits: EngineLimits
    device: torch.device
    kernels: Kernels | None
    """The CPU kernels, if they run all layers of every forward; else None."""


@contextmanager
def _joined(
    config: ServerConfig, mesh: Mesh, index: int, rendezvous: Path | None, report: Callable[[PhaseDone], None]
) -> Iterator[Mesh]:
    """As parallel/process_group.joined; shown to the user as a phase if there is something to join."""
    if mesh.num_ranks == 1:
        yield mesh
        return
    began_s = time.perf_counter()
    with joined(mesh, rendezvous, choose_device(config.device, index)) as own_mesh:
        report(PhaseDone(PROCESS, "join ranks", time.perf_counter() - began_s))
        yield own_mesh


def start_worker(
    config: ServerConfig, checkpoint: Checkpoint, mesh: Mesh, index: int, report: Callable[[PhaseDone], None]
) -> StartedWorker:
    """Load the model, size the KV cache, warm up, and compile if the config asks for it. Raises UserError.

    mesh: the other ranks of its group must call this too.
    index: among the workers of all replicas; it chooses the CUDA device.
    With the CPU attention backend, the KV cache's memory is reserved on return and touched in the background.
    """

    console = Console(stderr=True)
    last_end = time.perf_counter()

    @contextmanager
    def phase(name: str, has_progress_bar: bool = False) -> Iterator[list[str]]:
        """Time the body, including the code between the previous phase and this one; a terminal shows a spinner.

        Strings that the body appends to the list are shown to the user.
        """
        nonlocal last_end
        details: list[str] = []
        with nullcontext() if has_progress_bar else console.status(f"{PROCESS}: {name}"):
            yield details
        started, last_end = last_end, time.perf_counter()
        report(PhaseDone(PROCESS, name, last_end - started, ", ".join(details)))

    info = checkpoint.info
    check_weight_sizes(weight_files(checkpoint.directory), info)
    context_length = min(info.context_length, config.max_num_tokens_per_request or info.context_length)
    with phase("device") as details:
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
    choice = ALWAYS_KERNELS
    if kernels is not None and dtype in ACTIVATION_DTYPES:
        with phase("gemm") as details:
            choice = choose_gemm(kernels, info, dtype)
            details.append(choice.describe())
    compiler = Compiler(is_required=config.torch_compile is True) if compiles else None
    memory = MemoryReport(config, info, mesh, device, dtype, kv_cache_dtype)
    with phase("weights", has_progress_bar=True), memory.part(WEIGHTS, ROTARY, on_cpu=True):
        model = _build_model(checkpoint, mesh, dtype)
        model.materialize(device, context_length)
        model.begin_packing(kernels, choice, compiler)
        _load_weights(model, checkpoint, console)
        model.end_packing()
        return_freed_memory()
    shape = KVShape(
        num_layers=len(mesh.stage_layers(info)),
        num_heads=mesh.shard(info.num_heads, "attention heads")[1],
        num_kv_heads=mesh.kv_head_shard(info.num_kv_heads)[1],
        head_dim=info.head_dim,
        page_size=config.page_size,
        dtype=kv_cache_dtype,
        device=device,
        activation_dtype=activation_dtype,
    )

    def all_agree(works: bool) -> bool:
        return bool(least_of_ranks(int(works), mesh, device))

    if device.type == "cuda":
        switch_off_wrong_kernels(shape, model, all_agree)
    try:
        # FlashInfer may compile for minutes.
        with phase("attention") if device.type == "cuda" else nullcontext(), memory.part(WORKSPACES):
            graph_rows = max(sizes_of_graphs(config), default=0) if device.type == "cuda" else 0
            backend = make_backend(
                *(config.attention_backend, shape, kernels, graph_rows),
                check=partial(check_attention, shape=shape) if device.type == "cuda" else None,
                all_agree=all_agree,
            )
    except ValueError as error:
        raise FlagRefused(str(error)) from error
    max_blocks = -(-context_length // config.page_size)
    with memory.part(SLOTS):
        slots = SlotTable(SlotTableSize(config.max_seqs_per_forward + 1, max_blocks), device)
    slots.rules.allocate(config.page_size)  # the padding block: the first forwards write to no other
    limits = ForwardLimits(config.max_tokens_per_forward, config.max_seqs_per_forward, context_length, info.vocab_size)
    sizes = sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, config.max_topk_logprobs)
    places = model, backend, slots, config.page_size, device, kernels, compiler
    trace = Trace.of(config, mesh.name(PROCESS), index // mesh.num_ranks, row=1 + mesh.world_rank)
    links = None
    if mesh.pp_size > 1:
        with memory.part(STAGES):
            links = _link_stages(mesh, model, limits, device, trace)
    with memory.part(INPUTS):
        runner = ModelRunner(
            *places,
            mesh=mesh,
            buffer_sizes=sizes,
            async_tp_threshold=config.async_tp_threshold,
            trace=trace,
            links=links,
        )

    forward_memory = None  # unknown where torch computes: its operations allocate temporaries of unknown size
    if runner.always_on_kernels:
        forward_memory = largest_forward(
            *(info, limits, config.page_size, model.activation_dtype.itemsize),
            *(torch.get_num_threads(), config.max_topk_logprobs),
        )

    def run_largest() -> WarmUpTimes:
        # Long contexts only on CUDA: the CPU kernels take the same memory at any context length. Plain torch on a CPU
        # bounds its attention memory, but would take too long here.
        return warm_up(runner, limits, config.page_size, is_context_costly=device.type == "cuda")

    graphs = _graph_sizes(config, device)

    def measure_all_graphs() -> int:
        return measure_graphs(runner, graphs, device)

    with phase("KV cache") as details:
        plan = size_kv_cache(
            config, info.num_layers, shape, backend, forward_memory, run_largest, measure_all_graphs, memory
        )
        # No rank takes memory for blocks that another one lacks.
        num_blocks = least_of_ranks(plan.num_blocks, mesh, device)
        try:
            with memory.kv_cache(num_blocks):
                backend.allocate(num_blocks + 1)
        except (OSError, RuntimeError) as error:  # from a system that does not overcommit memory; from torch
            first_line, *_ = [*str(error).splitlines(), ""]
            reason = describe_shortage(error, LESS_MEMORY) or first_line
            raise UserError(f"the KV cache of {num_blocks:,} blocks cannot be reserved: {reason}") from error
        slots.rules.allocate((num_blocks + 1) * config.page_size)
        details.append(plan.arithmetic)
        if num_blocks < plan.num_blocks:
            details.append(f"limited to {num_blocks:,} blocks, the least of all ranks")
    with phase("warm-up") as details:
        if forward_memory is not None:
            reserve(forward_memory, model, limits)
        # All ranks run the same steps.
        if least_of_ranks(int(forward_memory is not None), mesh, device):
            times = warm_up_small(runner, limits, config.page_size)
        else:
            times = run_largest()
        if compiler is not None:
            compiler.end_warm_up()
            details.append(compiler.describe())
    if graphs:
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        with phase("CUDA graphs", has_progress_bar=True) as details, bar:
            runner.record_graphs(CudaRecorder(device), graphs, partial(bar.track, description="CUDA graphs"))
            details.append(f"{len(graphs)} sizes, up to {graphs[0]} sequences")
            if links is None:
                wrong = describe_wrong_graphs(runner, activation_dtype)
                if not least_of_ranks(int(wrong is None), mesh, device):
                    wrong = wrong or "they compute wrongly on another rank"
                    if config.use_cudagraphs:
                        raise FlagRefused(f"use_cudagraphs=T: {wrong}")
                    logger.warning("use_cudagraphs is switched off: %s; decode steps are slower without", wrong)
                    runner.drop_graphs()
    hydragen = DEFAULT_HYDRAGEN
    if config.use_hydragen is not False and None in (config.hydragen_min_group_size, config.hydragen_min_prefix_len):
        with phase("shared prefixes") as details, torch.inference_mode():
            hydragen = find_costs(backend, shape, num_blocks, config.max_seqs_per_forward, kernels)
            details.append(describe(hydragen))
    with phase("memory") as details:
        details += memory.lines()
    if kernels is not None:
        kernels.reset_phases()
    # not earlier: the measurements above need an idle machine
    backend.touch_in_background(max(1, torch.get_num_threads() // 2))
    num_kv_tokens = num_blocks * config.page_size
    max_tokens, limited_by = longest_sequence(info.context_length, config.max_num_tokens_per_request, num_kv_tokens)
    limits_found = EngineLimits(
        *(num_blocks, config.page_size, max_tokens, hydragen),
        *(times.per_token, times.single_token, limited_by, times.per_pair),
    )
    return StartedWorker(runner, limits_found, device, kernels if runner.always_on_kernels else None)


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


def _graph_sizes(config: ServerConfig, device: torch.device) -> list[int]:
    """In sequences, largest first; none if no graphs are wanted."""
    sizes = sizes_of_graphs(config) if device.type == "cuda" else []
    # From the threshold on, forwards need a multiple of tp_size tokens, and collectives that were never recorded.
    return [size for size in sizes if config.async_tp_threshold is None or size < config.async_tp_threshold]


def _build_model(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    try:
        return build_decoder(checkpoint.info, mesh, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error


def _load_weights(model: Decoder, checkpoint: Checkpoint, console: Console) -> None:
    """Load all weights; each module is packed as soon as its last weight is loaded."""
    filled = FilledModules(model, model.pack_module)
    files = weight_files(checkpoint.directory)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("weights", total=sum(file.stat().st_size for file in files))
        shards = iter(model.weight_shards())  # a list would keep packed weights in memory
        load_weights(files, shards, model.ignores, lambda size: progress.advance(task, size), filled.note)
