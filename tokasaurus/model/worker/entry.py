"""Process entry of a model worker: load the model, size the KV cache, warm up, record graphs, then run steps."""

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
from rich.progress import Progress

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.status import (
    DEFAULT_HYDRAGEN,
    EngineLimits,
    Failed,
    FlagRefused,
    PhaseDone,
    Ready,
    UserError,
    longest_sequence,
)
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.execution.cuda_recorder import CudaRecorder, graph_bytes
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.collectives import is_about_another_rank, joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.device import choose_device
from tokasaurus.model.worker.forward_memory import ForwardMemory, largest_forward, reserve
from tokasaurus.model.worker.group_step_price import with_step_price
from tokasaurus.model.worker.hydragen_costs import describe, find_costs
from tokasaurus.model.worker.kv_sizing import size_kv_cache
from tokasaurus.model.worker.loading import PROCESS, LoadedWorker, Phases, load_worker
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.memory_plan import sizes_of_graphs
from tokasaurus.model.worker.self_check import Measure, Measured
from tokasaurus.model.worker.step_check import measure_graphs
from tokasaurus.model.worker.threads import leave_threads_to
from tokasaurus.model.worker.warmup import WarmUpTimes, warm_up, warm_up_small
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

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
    phases = Phases(report)
    loaded = load_worker(config, checkpoint, mesh, index, phases)
    runner, device, kernels = loaded.runner, loaded.device, loaded.kernels
    context_length = checkpoint.info.context_length
    forward_memory = None  # unknown where torch computes: its operations allocate temporaries of unknown size
    if runner.always_on_kernels:
        forward_memory = largest_forward(
            *(checkpoint.info, loaded.limits, config.page_size, loaded.model.activation_dtype.itemsize),
            *(torch.get_num_threads(), config.max_topk_logprobs),
        )
    graphs = graph_sizes_of(config, device)
    with phases("KV cache") as details:
        num_blocks = _allocate_kv_cache(config, checkpoint.info.num_layers, loaded, forward_memory, graphs, details)
    with phases("warm-up") as details:
        if forward_memory is not None:
            reserve(forward_memory, loaded.model, loaded.limits)
        # All ranks run the same steps.
        if loaded.least(int(forward_memory is not None)):
            times = warm_up_small(runner, loaded.limits, config.page_size)
        else:
            times = _run_largest(loaded, config.page_size)
        if loaded.compiler is not None:
            loaded.compiler.end_warm_up()
            details.append(loaded.compiler.describe())
    if graphs:
        record_graphs(config, loaded, graphs, num_blocks, phases)
    hydragen = DEFAULT_HYDRAGEN
    if config.use_hydragen is not False and None in (config.hydragen_min_group_size, config.hydragen_min_prefix_len):
        with phases("shared prefixes") as details, torch.inference_mode():
            hydragen = find_costs(loaded.backend, loaded.shape, num_blocks, config.max_seqs_per_forward, kernels)
            trial = runner, loaded.backend, loaded.shape, num_blocks, loaded.limits, checkpoint.info.num_layers
            details.append(describe(hydragen))
            hydragen = with_step_price(hydragen, *trial, details)
    if loaded.checks.results:
        with phases("checks") as details:
            details.append(f"{len(loaded.checks.results)} comparisons in {loaded.checks.seconds:.1f} s")
    with phases("memory") as details:
        details += loaded.memory.lines()
    if kernels is not None:
        kernels.reset_phases()
    # not earlier: the measurements above need an idle machine
    loaded.backend.touch_in_background(max(1, torch.get_num_threads() // 2))
    num_kv_tokens = num_blocks * config.page_size
    max_tokens, limited_by = longest_sequence(context_length, config.max_num_tokens_per_request, num_kv_tokens)
    limits_found = EngineLimits(
        *(num_blocks, config.page_size, max_tokens, hydragen),
        *(times.per_token, times.single_token, limited_by, times.per_pair),
        switched_off=tuple(loaded.checks.switched_off),
    )
    return StartedWorker(runner, limits_found, device, kernels if runner.always_on_kernels else None)


def graph_sizes_of(config: ServerConfig, device: torch.device) -> list[int]:
    """In sequences, largest first; none if no graphs are wanted."""
    sizes = sizes_of_graphs(config) if device.type == "cuda" else []
    # From the threshold on, forwards need a multiple of tp_size tokens, and collectives that were never recorded.
    return [size for size in sizes if config.async_tp_threshold is None or size < config.async_tp_threshold]


def _run_largest(loaded: LoadedWorker, page_size: int) -> WarmUpTimes:
    # Long contexts only on CUDA: the CPU kernels take the same memory at any context length. Plain torch on a CPU
    # bounds its attention memory, but would take too long here.
    return warm_up(loaded.runner, loaded.limits, page_size, is_context_costly=loaded.device.type == "cuda")


def _allocate_kv_cache(
    config: ServerConfig,
    num_layers: int,
    loaded: LoadedWorker,
    forward_memory: ForwardMemory | None,
    graphs: list[int],
    details: list[str],
) -> int:
    """Usable blocks, the same on all ranks. num_layers: of all stages. graphs: sizes that will be recorded;
    emptied if none can be."""
    backend, memory = loaded.backend, loaded.memory
    plan = size_kv_cache(
        *(config, num_layers, loaded.shape, backend, forward_memory),
        run_largest=partial(_run_largest, loaded, config.page_size),
        measure_graphs=partial(_graph_bytes, config, loaded, graphs),
        memory=memory,
    )
    # No rank takes memory for blocks that another one lacks.
    num_blocks = loaded.least(plan.num_blocks)
    try:
        with memory.kv_cache(num_blocks):
            backend.allocate(num_blocks + 1)
    except (OSError, RuntimeError) as error:  # from a system that does not overcommit memory; from torch
        first_line, *_ = [*str(error).splitlines(), ""]
        reason = describe_shortage(error, LESS_MEMORY) or first_line
        raise UserError(f"the KV cache of {num_blocks:,} blocks cannot be reserved: {reason}") from error
    loaded.slots.rules.allocate((num_blocks + 1) * config.page_size)
    details.append(plan.arithmetic)
    if num_blocks < plan.num_blocks:
        details.append(f"limited to {num_blocks:,} blocks, the least of all ranks")
    return num_blocks


def record_graphs(
    config: ServerConfig, loaded: LoadedWorker, sizes: list[int], num_blocks: int, phases: Phases
) -> None:
    """Record decode steps of these sizes, and drop them if they do not compute what launched steps do. num_blocks:
    usable ones of the KV cache."""
    runner = loaded.runner
    bar = Progress(console=phases.console, transient=True, disable=not phases.console.is_terminal)

    def record_and_measure() -> Iterator[Measured]:
        runner.record_graphs(CudaRecorder(loaded.device), sizes, partial(bar.track, description="CUDA graphs"))
        details.append(f"{len(sizes)} sizes, up to {sizes[0]} sequences")
        yield from measure_graphs(runner, loaded.model, config.page_size, num_blocks, loaded.limits)

    with phases("CUDA graphs", has_progress_bar=True) as details, bar:
        if not _graphs_pass(config, loaded, record_and_measure):
            runner.drop_graphs()


def _graph_bytes(config: ServerConfig, loaded: LoadedWorker, sizes: list[int]) -> int:
    """Bytes that the graphs of these sizes will take. Removes all sizes if they cannot be recorded here."""
    found = 0

    def estimate() -> Iterator[Measured]:
        nonlocal found
        found = graph_bytes(loaded.runner, sizes, loaded.device)
        yield from ()

    if sizes and not _graphs_pass(config, loaded, estimate):
        loaded.runner.drop_graphs()
        sizes.clear()
        return 0
    return found


def _graphs_pass(config: ServerConfig, loaded: LoadedWorker, measure: Measure) -> bool:
    flag = "use_cudagraphs=T" if config.use_cudagraphs else None
    without = "decode steps are slower without"
    return loaded.checks.passes("use_cudagraphs", measure, "use_cudagraphs is", without, flag)
