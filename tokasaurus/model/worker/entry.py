"""Process entry of a model worker: its start, which is one list of phases over one record, and then its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokasaurus.checkpoint import Checkpoint, check_weight_sizes, weight_files
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.commands import (
    CommandDone,
    LoadAdapter,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    Wake,
    WorkerCommand,
)
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import (
    NO_ADAPTERS,
    EngineLimits,
    Failed,
    FlagRefused,
    PhaseDone,
    PhaseProgress,
    Ready,
    UserError,
    WeightsChanged,
    first_line,
    longest_sequence,
)
from tokasaurus.model.buffer_sizes import padded_count, sizes_for
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.parameters import num_in_adapter
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.collectives import is_about_another_rank, joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks
from tokasaurus.model.triton_choice import groups_in_use
from tokasaurus.model.worker.adapter_loads import AdapterLoads
from tokasaurus.model.worker.all_reduce_start import choose_sums, is_tried
from tokasaurus.model.worker.attention_choice import choose_attention
from tokasaurus.model.worker.device import choose_device, choose_platform, leave_threads_to
from tokasaurus.model.worker.hydragen_costs import asks_for_prefix_costs, measure_prefix_groups
from tokasaurus.model.worker.kernel_checks import check_triton, compile_layers
from tokasaurus.model.worker.load_model import choose_gemms, has_gemm_choice, load_model, make_model
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.memory import (
    dtype_name,
    free_cpu_bytes,
    graph_bytes,
    group_graph_bytes,
    groups_of,
    largest_forward,
    reserve,
    size_kv_cache,
    size_states,
)
from tokasaurus.model.worker.memory_plan import (
    ADAPTERS,
    INPUTS,
    ROTARY,
    SLOTS,
    STAGES,
    SUMS,
    WEIGHTS,
    WORKSPACES,
    show_size,
    sizes_of_chunks,
    sizes_of_graphs,
    sizes_of_groups,
)
from tokasaurus.model.worker.self_check import Checks, Measure, Measured, measure_graphs, measure_group_graphs
from tokasaurus.model.worker.sleep import Sleeper
from tokasaurus.model.worker.start import PROCESS, Fill, Phase, PhaseLog, Start, run_phases
from tokasaurus.model.worker.warmup import WarmUpTimes, warm_up, warm_up_small
from tokasaurus.model.worker.weight_update import WeightUpdates
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage
from tokasaurus.monitoring.trace import Trace
from tokasaurus.workers import max_adapter_rank, num_adapters, num_workers

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

CAUSE_SECONDS = 1.0
"""Seconds that the launcher has to learn the cause of another rank's failure."""


def run_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    index: int,
    place: Place | None,
    rendezvous: Path | None,
    inputs: Receiver[ForwardInput | WorkerCommand],
    outputs: Sender[ForwardOutput | Ready | CommandDone],
    stages: StageBoard | None,
    status: Sender[PhaseDone | PhaseProgress | Ready | Failed | WeightsChanged],
) -> None:
    """Run the steps of one rank of one replica until `inputs` is closed.

    index: among the workers of all replicas, as in Mesh.of_worker. place: as in Start. rendezvous: see
    parallel/collectives. stages: None if there is only one.
    """
    mesh = Mesh.of_worker(index, config.pp_size, config.tp_size, config.ep)
    try:
        mesh.check(checkpoint.info)
    except ValueError as error:
        raise FlagRefused(str(error)) from error
    try:
        log = PhaseLog(status.send, status.send)
        device = choose_device(config.device, index)
        with _joined(mesh, rendezvous, device, log) as own_mesh:
            start = Start(config, checkpoint, own_mesh, index, device, log, place=place)
            run_phases(start, phases())
            worker = _ready(start)
            if stages is not None and own_mesh.tp_rank == 0:
                worker.runner.count_for_stage(stages)
            outputs.send(Ready(PROCESS, worker.limits))
            status.send(Ready(PROCESS))
            # A CUDA device runs asynchronously; a CPU step is complete when the call returns.
            steps_behind = 0 if worker.device.type == "cpu" else 1
            threads = nullcontext() if worker.kernels is None else leave_threads_to(worker.kernels)

            def carry_out(command: WorkerCommand) -> str:
                match command:
                    case UpdateWeights():
                        error = worker.sleeper.update(command)
                        if not error and own_mesh.world_rank == 0:  # for later starts, if this process dies
                            status.send(WeightsChanged(command))
                    case Sleep():
                        error = worker.sleeper.sleep(command.with_weights)
                    case Wake():
                        error = worker.sleeper.wake(command.may_lack_weights)
                    case LoadAdapter():
                        error = worker.no_adapters if worker.adapters is None else worker.adapters.load(command)
                    case UnloadAdapter():
                        error = "" if worker.adapters is None else worker.adapters.unload(command)
                return error

            with threads:
                run_steps(worker.runner, inputs, outputs if mesh.replies else None, steps_behind, carry_out)
            worker.runner.drop_graphs()  # NCCL's end waits for recorded collectives, which only their graphs' end frees
        if mesh.num_ranks > 1 and not checkpoint.info.is_native:
            # Modules of a class are in cycles, and have the group. Gloo's threads abort a process if they free a tensor
            # while the interpreter ends.
            del own_mesh, start, worker, carry_out
            gc.collect()
    except RuntimeError as error:
        if mesh.num_ranks == 1 or not is_about_another_rank(error):
            raise
        inputs.drain()
        if not inputs.is_closed:  # otherwise another rank has ended in order, without steps that were never sent to it
            # The launcher ends this worker because of the other one. A report of this one would hide the cause.
            time.sleep(CAUSE_SECONDS)
            raise


def loading() -> list[Phase]:
    """From the device to a model with all that runs its steps, first to last."""
    return [
        Phase("", check_files),
        Phase("", check_expert_counts, when=lambda start: start.config.expert_counts),
        Phase("device", choose_platform),
        Phase(
            *("all-reduce", choose_sums, (SUMS,)),
            when=lambda start: is_tried(start.config.symmetric_all_reduce, start.mesh, start.device),
        ),
        Phase("gemm", choose_gemms, when=has_gemm_choice),
        Phase("", make_model),
        Phase("weights", load_model, (WEIGHTS, ROTARY)),
        Phase("attention", choose_attention, (WORKSPACES,), when=lambda start: start.on_cuda),
        Phase("", choose_attention, when=lambda start: not start.on_cuda),
        Phase("Triton kernels", check_triton, when=lambda start: groups_in_use(start.device, "sampling", "layers")),
        Phase("states", plan_states, when=lambda start: start.info.spec.has_states),
        Phase("", make_slots, (SLOTS,)),
        Phase("adapters", take_adapters, (ADAPTERS,), when=lambda start: num_adapters(start.config)),
        Phase("", link_stages, (STAGES,), when=lambda start: start.mesh.pp_size > 1),
        Phase("", make_runner, (INPUTS,)),
        Phase("compiled layers", compile_layers, when=lambda start: start.compiler),
        Phase("transformers' class", check_class, when=lambda start: not start.info.is_native),
    ]


def check_class(start: Start) -> str:
    """Refuse a class that our attention does not fit. Raises UserError."""
    from tokasaurus.model.worker.class_check import check_class  # whose import takes seconds

    return check_class(start)


def phases() -> list[Phase]:
    """A whole start, first to last."""
    return [
        *loading(),
        Phase("", apply_updates),
        Phase("KV cache", allocate_kv_cache),
        Phase("warm-up", warm_up_all),
        Phase("CUDA graphs", record_graphs, when=lambda start: start.graph_sizes),
        Phase("shared prefixes", measure_prefix_groups, when=asks_for_prefix_costs),
        Phase("checks", lambda start: start.checks.describe(), when=lambda start: start.checks.results),
        Phase("memory", lambda start: ", ".join(start.memory.lines())),
    ]


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that is ready to run steps."""

    runner: ModelRunner
    limits: EngineLimits
    device: torch.device
    kernels: Kernels | None
    """The CPU kernels, if they run all layers of every forward; else None."""
    sleeper: Sleeper
    adapters: AdapterLoads | None
    """None if the model takes no adapters."""

    @property
    def no_adapters(self) -> str:
        return self.limits.no_adapters


@contextmanager
def _joined(mesh: Mesh, rendezvous: Path | None, device: torch.device, log: PhaseLog) -> Iterator[Mesh]:
    """Yields the mesh with its process groups; shows joining as a phase if the replica has several ranks."""
    with ExitStack() as stack:
        if mesh.num_ranks > 1:
            with log("join ranks"):
                mesh = stack.enter_context(joined(mesh, rendezvous, device))
        yield mesh


def start_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    mesh: Mesh,
    index: int,
    report: Callable[[PhaseDone], None],
) -> StartedWorker:
    """Run all phases of a start. Raises UserError.

    mesh: the other ranks of its group must call this too.
    index: among the workers of all replicas; it chooses the CUDA device.
    With the CPU attention backend, the KV cache's memory is reserved on return and touched in the background.
    """
    start = Start(config, checkpoint, mesh, index, choose_device(config.device, index), PhaseLog(report))
    run_phases(start, phases())
    return _ready(start)


def load_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    mesh: Mesh,
    index: int,
    log: PhaseLog,
    fill: Fill | None = None,
    checks: Checks | None = None,
) -> Start:
    """Run the phases up to the KV cache, which has no size yet. Arguments as in Start and start_worker; checks: of a
    single rank. Raises UserError."""
    start = Start(config, checkpoint, mesh, index, choose_device(config.device, index), log, fill)
    if checks is not None:
        start.checks = checks
    run_phases(start, loading())
    return start


def _ready(start: Start) -> StartedWorker:
    """What runs steps from now on."""
    config, times, runner = start.config, start.times, start.runner
    if start.kernels is not None:
        start.kernels.reset_phases()
    if config.expert_counts:
        runner.count_experts()
    windows = groups_of(start.info, start.mesh, start.device)
    num_pages = start.num_blocks if windows is None else windows.max_pages(start.num_blocks, config.page_size)
    max_tokens, limited_by = longest_sequence(
        start.info.context_length, config.max_num_tokens_per_request, num_pages * config.page_size
    )
    limits = EngineLimits(
        *(start.num_blocks, config.page_size, max_tokens, start.hydragen if start.limits.has_groups else None),
        *(times.per_token, times.single_token, limited_by, times.per_pair),
        switched_off=tuple(start.checks.switched_off),
        dtype=dtype_name(start.model.weight_dtype),
        device=start.device.type,
        num_routed_experts=0 if (refusal := _no_routed_experts(start)) else _num_routed_experts(start),
        no_routed_experts=refusal,
        no_adapters=_no_adapters(start),
        windows=windows,
        num_snapshots=0 if start.states is None else start.states.num_snapshots,
        max_seqs=None if start.states is None else start.states.max_seqs,
    )
    # Not earlier: it touches the cache, and the measurements of the start need an idle machine.
    sleeper = Sleeper(
        *(start.model, start.backend, start.updates, start.device, start.mesh, runner),
        record_graphs=partial(_record_again, start),
    )
    adapters = None
    if runner.adapters is not None:
        adapters = AdapterLoads(runner.adapters, max_adapter_rank(config), start.mesh, start.device)
    kernels = start.kernels if runner.always_on_kernels else None
    return StartedWorker(runner, limits, start.device, kernels, sleeper, adapters)


def _num_routed_experts(start: Start) -> int:
    spec = start.info.spec
    return len(spec.layers) * spec.num_chosen_experts


def _no_routed_experts(start: Start) -> str:
    """Why requests may not ask for the experts of their tokens; "" if they may."""
    if not start.info.is_native:
        return "layers that transformers computes do not tell which experts they choose"
    if not start.info.spec.num_chosen_experts:
        return "the model has no experts"
    return "" if start.mesh.pp_size == 1 else "pipeline stages do not tell each other which experts they choose"


def _no_adapters(start: Start) -> str:
    """Why adapters cannot be loaded; "" if they can."""
    if not num_adapters(start.config):
        return NO_ADAPTERS
    if start.config.async_tp_threshold is not None:
        return "async_tp_threshold= computes no adapters"
    if start.info.spec.has_states:
        return "layers with states take no adapters"
    return "" if isinstance(start.model, Decoder) else "layers that transformers computes take no adapters"


def take_adapters(start: Start) -> str:
    """The model's layers may have adapters. Raises FlagRefused if flags name some, and they cannot."""
    config, limits = start.config, start.limits
    if refusal := _no_adapters(start):
        if config.lora:
            raise FlagRefused(f"lora: {refusal}")
        start.memory.replan(ADAPTERS, -start.memory.planned(ADAPTERS))
        return refusal
    sizes = num_adapters(config), max_adapter_rank(config), padded_count(limits.max_tokens, start.mesh.tp_size)
    start.adapters = ModelAdapters(start.decoder, *sizes)
    start.limits = replace(limits, has_adapters=start.adapters.in_graphs)
    if start.kernels is not None:
        start.kernels.reserve_adapters(limits.max_tokens, sizes[1], start.activation_dtype)
    size = show_size(num_in_adapter(start.info, start.mesh, sizes[1]) * start.dtype.itemsize)
    return f"at most {sizes[0]} in use, of ranks up to {sizes[1]}, which take {size} each"


def check_files(start: Start) -> str:
    """Refuse files whose tensors have other sizes than the model. Raises CheckpointError."""
    if start.fill is None:
        check_weight_sizes(weight_files(start.checkpoint.directory), start.info)
    return ""


def check_expert_counts(start: Start) -> str:
    """Raises FlagRefused if the experts of tokens are not known."""
    if refusal := _no_routed_experts(start):
        raise FlagRefused(f"expert_counts=T: {refusal}")
    return ""


def graph_sizes_of(config: ServerConfig, device: torch.device) -> list[int]:
    """Sizes of the graphs in sequences, largest first; none if no graphs are wanted."""
    return _recordable(config, sizes_of_graphs(config) if device.type == "cuda" else [])


def _recordable(config: ServerConfig, sizes: list[int]) -> list[int]:
    # From the threshold on, forwards need a multiple of tp_size tokens, and collectives that were never recorded.
    return [size for size in sizes if config.async_tp_threshold is None or size < config.async_tp_threshold]


def make_slots(start: Start) -> str:
    """The table of slots, and the trace of their steps."""
    config, mesh = start.config, start.mesh
    max_blocks = -(-start.limits.context_length // config.page_size)
    start.slots = SlotTable(SlotTableSize(start.limits.max_seqs + 1, max_blocks), start.device)
    start.trace = Trace.of(config, mesh.name(PROCESS), start.index // mesh.num_ranks, row=1 + mesh.world_rank)
    return ""


def plan_states(start: Start) -> str:
    """Memory for states bounds how many sequences may run. Raises UserError."""
    config, mesh = start.config, start.mesh
    available, _ = free_cpu_bytes(num_workers(config), None)
    plan = size_states(config, start.info, mesh, start.least(available >> 20) << 20)
    start.states = plan
    start.limits = replace(start.limits, max_seqs=plan.max_seqs)
    return plan.arithmetic


def link_stages(start: Start) -> str:
    """Links to the stages before and after."""
    num_tokens = padded_count(start.limits.max_tokens, start.mesh.tp_size)
    buffers = [start.model.new_hidden(num_tokens, start.device) for _ in range(start.mesh.num_hidden_buffers)]
    start.links = StageLinks(start.mesh, buffers, start.limits.max_seqs + 1, start.trace)
    return ""


def make_runner(start: Start) -> str:
    """What runs steps, and the bound of its largest forward where that is known."""
    config, limits, model = start.config, start.limits, start.model
    start.graph_sizes = graph_sizes_of(config, start.device)
    start.chunk_sizes = _recordable(config, sizes_of_chunks(config, start.graph_sizes))
    start.runner = ModelRunner(
        *(model, start.backend, start.slots, config.page_size, start.device, start.kernels, start.compiler),
        mesh=start.mesh,
        buffer_sizes=sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, config.max_topk_logprobs),
        async_tp_threshold=config.async_tp_threshold,
        trace=start.trace,
        links=start.links,
        adapters=start.adapters,
    )
    records_groups = start.runner.records_attention and limits.has_groups
    start.group_sizes = sizes_of_groups(config, start.graph_sizes) if records_groups else []
    if start.runner.always_on_kernels:
        start.memory.forward_bound = largest_forward(
            *(start.info, limits, config.page_size, model.activation_dtype.itemsize),
            *(torch.get_num_threads(), config.max_topk_logprobs, model.is_int8, bool(model.block_types)),
            max_tiled_rows=0 if start.kernels is None else start.kernels.max_tiled_rows,
        )
    return ""


def apply_updates(start: Start) -> str:
    """Load the weight updates that came before this replica was restarted, its own or another replica's, each with a
    line. Raises UserError if one cannot be applied."""
    checkpoint = start.checkpoint
    start.updates = WeightUpdates(
        *(start.model, start.info, checkpoint.directory, start.mesh, start.device, checkpoint.files)
    )
    for update in checkpoint.weight_updates:
        with start.log("new weights") as details:
            details.append(f"version {update.version}")
            if error := start.updates.apply(update):
                raise UserError(f"the weights of version {update.version} cannot be loaded again: {error}")
    return ""


def allocate_kv_cache(start: Start) -> str:
    """As many blocks as fit on every rank. Leaves no graph sizes if their memory cannot be measured."""
    config, backend, memory = start.config, start.backend, start.memory
    if memory.forward_bound is None:  # which counts what experts keep
        start.model.reserve_experts(start.limits.max_tokens)
    if start.states is not None:
        start.runner.allocate_states(start.states.num_snapshots)
    start.slots.rules.allocate(config.page_size)  # the padding block: the first forwards write to no other
    plan = size_kv_cache(
        *(config, len(start.info.spec.attentions), start.shape, backend, memory),
        run_largest=partial(_run_largest, start),
        measure_graphs=partial(_graph_bytes, start),
        place=start.place,
        states=start.states,
    )
    # No rank takes memory for blocks that another one lacks.
    num_blocks = start.num_blocks = start.least(plan.num_blocks)
    try:
        with memory.measure_kv_cache(num_blocks):
            backend.allocate(num_blocks + 1)
    except (OSError, RuntimeError) as error:  # from a system that does not overcommit memory; from torch
        reason = describe_shortage(error, LESS_MEMORY) or first_line(error)
        raise UserError(f"the KV cache of {num_blocks:,} blocks cannot be reserved: {reason}") from error
    start.slots.rules.allocate((num_blocks + 1) * config.page_size)
    limited = f", limited to {num_blocks:,} blocks, the least of all ranks" if num_blocks < plan.num_blocks else ""
    return plan.arithmetic + limited


def _run_largest(start: Start) -> WarmUpTimes:
    # Long contexts only on CUDA: the CPU kernels take the same memory at any context length. Plain torch on a CPU
    # bounds its attention memory, but would take too long here.
    show = partial(start.log.show_amount, "forwards")
    return warm_up(start.runner, start.limits, start.config.page_size, start.on_cuda, show)


def warm_up_all(start: Start) -> str:
    """Small forwards where the largest one's memory is reserved; else the largest ones. All ranks run the same."""
    forward = start.memory.forward_bound
    if forward is not None:
        reserve(forward, start.model, start.limits)
    if start.least(int(forward is not None)):
        show = partial(start.log.show_amount, "forwards")
        start.times = warm_up_small(start.runner, start.limits, start.config.page_size, show)
    else:
        start.times = _run_largest(start)
    if start.compiler is None:
        return ""
    start.compiler.end_warm_up()
    return start.compiler.describe()


def record_graphs(start: Start) -> str:
    """Record steps of the start's sizes, and drop them if they do not compute what launched steps do."""
    sizes, chunk_sizes, described = start.graph_sizes, start.chunk_sizes, ""
    num_sizes = len(sizes) + len(chunk_sizes)

    def count(sizes_in_turn: Iterable[int]) -> Iterator[int]:
        for number, size in enumerate(sizes_in_turn):
            yield size
            start.log.show_amount("graphs", number + 1, num_sizes)

    def record_and_measure() -> Iterator[Measured]:
        nonlocal described
        _record(start, count)
        most_tokens = (*chunk_sizes, *sizes)[0]
        described = f"{num_sizes} sizes, up to {sizes[0]:,} sequences and {most_tokens:,} tokens"
        yield from measure_graphs(start.runner, start.model, start.config.page_size, start.num_blocks, start.limits)

    def record_and_measure_groups() -> Iterator[Measured]:
        start.runner.record_groups(start.group_sizes)
        yield from measure_group_graphs(
            start.runner, start.model, start.config.page_size, start.num_blocks, start.limits
        )

    if not _graphs_pass(start, record_and_measure):
        start.runner.drop_graphs()
        start.group_sizes = []
    elif start.group_sizes:
        if _groups_pass(start, record_and_measure_groups):
            described += f", {len(start.group_sizes)} with prefix groups"
        else:
            start.runner.drop_groups()
            start.group_sizes = []
    return described


def _record(start: Start, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
    start.runner.record_graphs(CudaRecorder(start.device), start.graph_sizes, progress, start.chunk_sizes)


def _record_again(start: Start) -> None:
    """What the start has recorded and found right."""
    _record(start)
    if start.group_sizes:
        start.runner.record_groups(start.group_sizes)


def _graph_bytes(start: Start) -> int:
    """Bytes that the graphs will take. Leaves no sizes if they cannot be recorded here."""
    if not start.graph_sizes:
        return 0
    runner, device, found = start.runner, start.device, [0, 0]

    def estimate() -> Iterator[Measured]:
        found[0] = graph_bytes(runner, start.graph_sizes, start.chunk_sizes, device)
        yield from ()

    def estimate_groups() -> Iterator[Measured]:
        found[1] = group_graph_bytes(runner, start.group_sizes, device)
        yield from ()

    if not _graphs_pass(start, estimate):
        start.graph_sizes = start.group_sizes = []
        found = [0, 0]
    elif start.group_sizes and not _groups_pass(start, estimate_groups):
        start.group_sizes = []
        found[1] = 0
    runner.drop_graphs()
    torch.cuda.empty_cache()
    return sum(found)


def _groups_pass(start: Start, measure: Measure) -> bool:
    """As _graphs_pass, of the recordings with prefix groups alone. A lack of memory costs no more than these."""

    def measured() -> Iterator[Measured]:
        try:
            yield from measure()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(first_line(error)) from error

    what, without = "one graph for a decode step with prefix groups is", "such steps replay pieces, which take longer"
    return start.checks.passes("group_graphs", measured, what, without)


def _graphs_pass(start: Start, measure: Measure) -> bool:
    flag = "use_cudagraphs=T" if start.config.use_cudagraphs else None
    groups = groups_in_use(start.device, "steps")
    what, without = "use_cudagraphs is", "steps are slower without"
    return start.checks.passes("use_cudagraphs", measure, what, without, flag, groups)
