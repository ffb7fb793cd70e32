"""Process entry of a model worker: load and check the model, size the KV cache, warm up, record graphs, run steps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from tokasaurus.checkpoint import Checkpoint, ModelInfo, check_weight_sizes, file_states, weight_files
from tokasaurus.checkpoint.block_types import why_dequantised
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.commands import CommandDone, Sleep, UpdateWeights, Wake, WorkerCommand
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import (
    DEFAULT_HYDRAGEN,
    EngineLimits,
    Failed,
    FlagRefused,
    HydragenCosts,
    PhaseDone,
    PhaseProgress,
    Ready,
    UserError,
    WeightsChanged,
    first_line,
    longest_context,
    longest_sequence,
)
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.choose import Candidate, install_advice, make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend, has_fa3
from tokasaurus.model.buffer_sizes import buffer_bytes, padded_count, sizes_for
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels, load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, choose_gemm
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.decoder.quantize import CannotQuantize, Packing
from tokasaurus.model.decoder.tensor_files import has_quantized
from tokasaurus.model.decoder.uploads import uploads_to
from tokasaurus.model.decoder.weights import FilledModules, load_weights, return_freed_memory
from tokasaurus.model.execution.executors import CompiledExecutor, FusedExecutor
from tokasaurus.model.execution.graphs import CudaRecorder
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.collectives import is_about_another_rank, joined, least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks
from tokasaurus.model.triton_choice import KernelGroup, groups_in_use
from tokasaurus.model.worker.all_reduce_start import choose_all_reduce, is_tried
from tokasaurus.model.worker.device import (
    choose_activation_dtype,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    is_compiled,
    leave_threads_to,
    set_worker_threads,
)
from tokasaurus.model.worker.hydragen_costs import describe_savings, find_costs, with_step_price
from tokasaurus.model.worker.kernel_checks import compare_sampler
from tokasaurus.model.worker.layer_choice import describe_choice, takes_own_kernels, time_layers
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.memory import (
    MemoryTable,
    dtype_name,
    graph_bytes,
    kv_shape,
    largest_forward,
    reserve,
    size_kv_cache,
)
from tokasaurus.model.worker.memory_plan import (
    INPUTS,
    ROTARY,
    SLOTS,
    STAGES,
    SUMS,
    WEIGHTS,
    WORKSPACES,
    sizes_of_chunks,
    sizes_of_graphs,
)
from tokasaurus.model.worker.prefill_choice import choose_prefill
from tokasaurus.model.worker.self_check import (
    Checks,
    Measure,
    Measured,
    measure_attention,
    measure_graphs,
    measure_layers,
)
from tokasaurus.model.worker.sleep import Sleeper
from tokasaurus.model.worker.warmup import ForwardLimits, WarmUpTimes, warm_up, warm_up_small
from tokasaurus.model.worker.weight_update import WeightUpdates
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage
from tokasaurus.monitoring.trace import Trace

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

PROCESS = "model worker"

PROGRESS_SECONDS = 0.1
"""Shortest time between two reports of how far a phase is, in seconds."""

CAUSE_SECONDS = 1.0
"""Seconds that the launcher has to learn the cause of another rank's failure."""

Fill: TypeAlias = Callable[[Decoder, FilledModules], None]
"""Fills all weight shards of a model, and notes each."""


def run_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    index: int,
    rendezvous: Path | None,
    inputs: Receiver[ForwardInput | WorkerCommand],
    outputs: Sender[ForwardOutput | Ready | CommandDone],
    stages: StageBoard | None,
    status: Sender[PhaseDone | PhaseProgress | Ready | Failed | WeightsChanged],
) -> None:
    """Run the steps of one rank of one replica until `inputs` is closed.

    index: among the workers of all replicas, as in Mesh.of_worker. rendezvous: see parallel/collectives. stages: None
    if there is only one.
    """
    mesh = Mesh.of_worker(index, config.pp_size, config.tp_size)
    try:
        mesh.check(checkpoint.info)
    except ValueError as error:
        raise FlagRefused(str(error)) from error
    try:
        with _joined(config, mesh, index, rendezvous, status.send) as own_mesh:
            worker = start_worker(config, checkpoint, own_mesh, index, status.send, status.send)
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
                return error

            with threads:
                run_steps(worker.runner, inputs, outputs if mesh.replies else None, steps_behind, carry_out)
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
    sleeper: Sleeper


@contextmanager
def _joined(
    config: ServerConfig, mesh: Mesh, index: int, rendezvous: Path | None, report: Callable[[PhaseDone], None]
) -> Iterator[Mesh]:
    """Yields the mesh with its process groups; shows joining as a phase if the replica has several ranks."""
    if mesh.num_ranks == 1:
        yield mesh
        return
    began_s = time.perf_counter()
    with joined(mesh, rendezvous, choose_device(config.device, index)) as own_mesh:
        report(PhaseDone(PROCESS, "join ranks", time.perf_counter() - began_s))
        yield own_mesh


def ignore_progress(_: PhaseProgress) -> None: ...


def start_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    mesh: Mesh,
    index: int,
    report: Callable[[PhaseDone], None],
    on_progress: Callable[[PhaseProgress], None] = ignore_progress,
) -> StartedWorker:
    """Load the model, size the KV cache, warm up, and compile if the config asks for it. Raises UserError.

    mesh: the other ranks of its group must call this too.
    index: among the workers of all replicas; it chooses the CUDA device.
    With the CPU attention backend, the KV cache's memory is reserved on return and touched in the background.
    """
    phases = Phases(report, on_progress)
    loaded = load_worker(config, checkpoint, mesh, index, phases)
    updates = WeightUpdates(
        loaded.model, checkpoint.info, checkpoint.directory, loaded.mesh, loaded.device, checkpoint.files
    )
    _apply_earlier_updates(checkpoint, updates, phases)
    graphs = graph_sizes_of(config, loaded.device)
    num_blocks = _allocate_kv_cache(config, checkpoint.info, loaded, graphs, phases)
    times = _warm_up(config, loaded, phases)
    if graphs:
        record_graphs(config, loaded, graphs, chunk_sizes_of(config, graphs), num_blocks, phases)
    hydragen = _measure_prefix_groups(config, checkpoint.info, loaded, num_blocks, phases)
    if loaded.checks.results:
        with phases("checks") as details:
            details.append(f"{len(loaded.checks.results)} comparisons in {loaded.checks.seconds:.1f} s")
    with phases("memory") as details:
        details += loaded.memory.lines()
    if loaded.kernels is not None:
        loaded.kernels.reset_phases()
    max_tokens, limited_by = longest_sequence(
        checkpoint.info.context_length, config.max_num_tokens_per_request, num_blocks * config.page_size
    )
    limits = EngineLimits(
        *(num_blocks, config.page_size, max_tokens, hydragen),
        *(times.per_token, times.single_token, limited_by, times.per_pair),
        switched_off=tuple(loaded.checks.switched_off),
        dtype=dtype_name(loaded.model.weight_dtype),
        device=loaded.device.type,
    )
    kernels = loaded.kernels if loaded.runner.always_on_kernels else None
    # Not earlier: it touches the cache, and the measurements above need an idle machine.
    sleeper = Sleeper(
        *(loaded.model, loaded.backend, updates, loaded.device, loaded.mesh, loaded.runner),
        record_graphs=partial(_record, loaded, graphs, chunk_sizes_of(config, graphs)),
    )
    return StartedWorker(loaded.runner, limits, loaded.device, kernels, sleeper)


def _apply_earlier_updates(checkpoint: Checkpoint, updates: WeightUpdates, phases: Phases) -> None:
    """Load the weight updates that came before this replica was restarted, its own or another replica's.

    Raises UserError if one cannot be applied."""
    for update in checkpoint.weight_updates:
        with phases("new weights") as details:
            details.append(f"version {update.version}")
            if error := updates.apply(update):
                raise UserError(f"the weights of version {update.version} cannot be loaded again: {error}")


def graph_sizes_of(config: ServerConfig, device: torch.device) -> list[int]:
    """Sizes of the graphs in sequences, largest first; none if no graphs are wanted."""
    return _recordable(config, sizes_of_graphs(config) if device.type == "cuda" else [])


def chunk_sizes_of(config: ServerConfig, sizes: list[int]) -> list[int]:
    """Tokens of the graphs beyond the decode steps of `sizes`, largest first; none if these are none."""
    return _recordable(config, sizes_of_chunks(config, sizes))


def _recordable(config: ServerConfig, sizes: list[int]) -> list[int]:
    # From the threshold on, forwards need a multiple of tp_size tokens, and collectives that were never recorded.
    return [size for size in sizes if config.async_tp_threshold is None or size < config.async_tp_threshold]


def _allocate_kv_cache(
    config: ServerConfig, info: ModelInfo, loaded: LoadedWorker, graphs: list[int], phases: Phases
) -> int:
    """Usable blocks, the same on all ranks. graphs: sizes that will be recorded; emptied if none can be."""
    backend, memory = loaded.backend, loaded.memory
    with phases("KV cache") as details:
        plan = size_kv_cache(
            *(config, info.num_layers, loaded.shape, backend, memory),
            run_largest=partial(_run_largest, loaded, config.page_size, phases),
            measure_graphs=partial(_graph_bytes, config, loaded, graphs),
        )
        # No rank takes memory for blocks that another one lacks.
        num_blocks = loaded.least(plan.num_blocks)
        try:
            with memory.measure_kv_cache(num_blocks):
                backend.allocate(num_blocks + 1)
        except (OSError, RuntimeError) as error:  # from a system that does not overcommit memory; from torch
            reason = describe_shortage(error, LESS_MEMORY) or first_line(error)
            raise UserError(f"the KV cache of {num_blocks:,} blocks cannot be reserved: {reason}") from error
        loaded.slots.rules.allocate((num_blocks + 1) * config.page_size)
        details.append(plan.arithmetic)
        if num_blocks < plan.num_blocks:
            details.append(f"limited to {num_blocks:,} blocks, the least of all ranks")
    return num_blocks


def _warm_up(config: ServerConfig, loaded: LoadedWorker, phases: Phases) -> WarmUpTimes:
    """Small forwards where the largest one's memory is reserved; else the largest ones. All ranks run the same."""
    forward = loaded.memory.forward_bound
    with phases("warm-up") as details:
        if forward is not None:
            reserve(forward, loaded.model, loaded.limits)
        if loaded.least(int(forward is not None)):
            on_forward = partial(phases.show_amount, "forwards")
            times = warm_up_small(loaded.runner, loaded.limits, config.page_size, on_forward)
        else:
            times = _run_largest(loaded, config.page_size, phases)
        if loaded.compiler is not None:
            loaded.compiler.end_warm_up()
            details.append(loaded.compiler.describe())
    return times


def _run_largest(loaded: LoadedWorker, page_size: int, phases: Phases) -> WarmUpTimes:
    # Long contexts only on CUDA: the CPU kernels take the same memory at any context length. Plain torch on a CPU
    # bounds its attention memory, but would take too long here.
    is_costly = loaded.device.type == "cuda"
    return warm_up(loaded.runner, loaded.limits, page_size, is_costly, partial(phases.show_amount, "forwards"))


def _measure_prefix_groups(
    config: ServerConfig, info: ModelInfo, loaded: LoadedWorker, num_blocks: int, phases: Phases
) -> HydragenCosts:
    """What prefix groups cost here; the defaults where no flag leaves it to a measurement."""
    if config.use_hydragen is False or None not in (config.hydragen_min_group_size, config.hydragen_min_prefix_len):
        return DEFAULT_HYDRAGEN
    with phases("shared prefixes") as details, torch.inference_mode():
        costs = find_costs(loaded.backend, loaded.shape, num_blocks, config.max_seqs_per_forward, loaded.kernels)
        details.append(describe_savings(costs))
        trial = loaded.runner, loaded.backend, loaded.shape, num_blocks, loaded.limits, info.num_layers
        return with_step_price(costs, *trial, details)


def record_graphs(
    config: ServerConfig,
    loaded: LoadedWorker,
    sizes: list[int],
    chunk_sizes: list[int],
    num_blocks: int,
    phases: Phases,
) -> None:
    """Record steps of these sizes, and drop them if they do not compute what launched steps do. sizes, chunk_sizes: as
    in ModelRunner.record_graphs, largest first. num_blocks: usable ones of the KV cache."""
    runner, num_sizes = loaded.runner, len(sizes) + len(chunk_sizes)

    def count(sizes_in_turn: Iterable[int]) -> Iterator[int]:
        for number, size in enumerate(sizes_in_turn):
            yield size
            phases.show_amount("graphs", number + 1, num_sizes)

    def record_and_measure() -> Iterator[Measured]:
        _record(loaded, sizes, chunk_sizes, count)
        most_tokens = (*chunk_sizes, *sizes)[0]
        details.append(f"{num_sizes} sizes, up to {sizes[0]:,} sequences and {most_tokens:,} tokens")
        yield from measure_graphs(runner, loaded.model, config.page_size, num_blocks, loaded.limits)

    with phases("CUDA graphs") as details:
        if not _graphs_pass(config, loaded, record_and_measure):
            runner.drop_graphs()


def _record(
    loaded: LoadedWorker,
    sizes: list[int],
    chunk_sizes: list[int],
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> None:
    loaded.runner.record_graphs(CudaRecorder(loaded.device), sizes, progress, chunk_sizes)


def _graph_bytes(config: ServerConfig, loaded: LoadedWorker, sizes: list[int]) -> int:
    """Bytes that the graphs of these sizes will take. Removes all sizes if they cannot be recorded here."""
    found = 0

    def estimate() -> Iterator[Measured]:
        nonlocal found
        found = graph_bytes(loaded.runner, sizes, chunk_sizes_of(config, sizes), loaded.device)
        yield from ()

    if sizes and not _graphs_pass(config, loaded, estimate):
        loaded.runner.drop_graphs()
        sizes.clear()
        return 0
    return found


def _graphs_pass(config: ServerConfig, loaded: LoadedWorker, measure: Measure) -> bool:
    flag = "use_cudagraphs=T" if config.use_cudagraphs else None
    without = "steps are slower without"
    groups = groups_in_use(loaded.device, "steps")
    return loaded.checks.passes("use_cudagraphs", measure, "use_cudagraphs is", without, flag, groups)


class Phases:
    """Times the phases of a start and reports each to the user. on_progress: told how far they are."""

    def __init__(
        self, report: Callable[[PhaseDone], None], on_progress: Callable[[PhaseProgress], None] = ignore_progress
    ) -> None:
        self._report = report
        self._on_progress = on_progress
        self._name = ""
        self._next_progress_s = 0.0
        self._last_end = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        """Time the body, including the code between the previous phase and this one.

        Strings that the body appends to the list are shown to the user.
        """
        details: list[str] = []
        self._name = name
        self._on_progress(PhaseProgress(PROCESS, name))
        yield details
        started, self._last_end = self._last_end, time.perf_counter()
        self._report(PhaseDone(PROCESS, name, self._last_end - started, ", ".join(details)))

    def show_amount(self, unit: str, num_done: int, num_total: int) -> None:
        """How far the phase is that runs."""
        now_s = time.perf_counter()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_SECONDS
            self._on_progress(PhaseProgress(PROCESS, self._name, num_done, num_total, unit))


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
    memory: MemoryTable
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
    context_length = longest_context(info.context_length, config.max_num_tokens_per_request)
    platform = _choose_platform(config, mesh, index, phases)
    device, kernels = platform.device, platform.kernels
    compiler = Compiler(is_required=config.torch_compile is True) if platform.compiles else None
    memory = MemoryTable(config, info, mesh, device, platform.dtype, platform.kv_cache_dtype)
    if checks is None:
        checks = Checks(lambda works: bool(least_of_ranks(int(works), mesh, device)))
    if is_tried(config.symmetric_all_reduce, mesh, device):
        with phases("all-reduce") as details, memory.measure(SUMS):
            num_bytes = buffer_bytes(
                config.max_tokens_per_forward, info.hidden_size, dtype_name(platform.activation_dtype)
            )
            first_device = index - mesh.tp_rank
            mesh, described = choose_all_reduce(
                *(config.symmetric_all_reduce, mesh, device, platform.activation_dtype, num_bytes, first_device),
                on_left_out=partial(checks.leave_out, "symmetric_all_reduce"),
            )
            details.append(described)
    model = _load_model(checkpoint, mesh, platform, compiler, context_length, fill, memory, phases, config)
    shape = kv_shape(info, mesh, config.page_size, platform.kv_cache_dtype, platform.activation_dtype, device)
    if device.type == "cuda":
        with phases("attention") as details, memory.measure(WORKSPACES):  # FlashInfer may compile for minutes
            backend = _choose_backend(config, shape, None, max(sizes_of_graphs(config), default=0), checks)
            if isinstance(backend, FlashInferBackend) and has_fa3(device):
                details.append(choose_prefill(backend, shape, mesh, checks))
    else:
        backend = _choose_backend(config, shape, kernels, 0, checks)
    if groups_in_use(device, "sampling", "layers"):
        with phases("Triton kernels"):
            _check_triton(shape, model, mesh, backend, context_length, checks)
    limits = ForwardLimits(config.max_tokens_per_forward, config.max_seqs_per_forward, context_length, info.vocab_size)
    with memory.measure(SLOTS):
        max_blocks = -(-context_length // config.page_size)
        slots = SlotTable(SlotTableSize(config.max_seqs_per_forward + 1, max_blocks), device)
    slots.rules.allocate(config.page_size)  # the padding block: the first forwards write to no other
    trace = Trace.of(config, mesh.name(PROCESS), index // mesh.num_ranks, row=1 + mesh.world_rank)
    links = None
    if mesh.pp_size > 1:
        with memory.measure(STAGES):
            links = _link_stages(mesh, model, limits, device, trace)
    with memory.measure(INPUTS):
        runner = ModelRunner(
            *(model, backend, slots, config.page_size, device, kernels, compiler),
            mesh=mesh,
            buffer_sizes=sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, config.max_topk_logprobs),
            async_tp_threshold=config.async_tp_threshold,
            trace=trace,
            links=links,
        )
    if runner.always_on_kernels:
        memory.forward_bound = largest_forward(
            *(info, limits, config.page_size, model.activation_dtype.itemsize),
            *(torch.get_num_threads(), config.max_topk_logprobs, model.is_int8),
        )
    loaded = LoadedWorker(mesh, device, kernels, compiler, model, shape, backend, slots, runner, limits, memory, checks)
    if compiler is not None:
        with phases("compiled layers") as details:
            _check_compiled(loaded, compiler, config, details)
    return loaded


@dataclass(frozen=True, slots=True)
class _Platform:
    """Where a worker computes, and in which formats."""

    device: torch.device
    kernels: Kernels | None
    compiles: bool
    """Whether torch compiles the layers."""
    dtype: torch.dtype
    """dtype of the weights."""
    activation_dtype: torch.dtype
    kv_cache_dtype: torch.dtype


def _choose_platform(config: ServerConfig, mesh: Mesh, index: int, phases: Phases) -> _Platform:
    """index: as in load_worker. Raises FlagRefused."""
    with phases("device") as details:
        device = choose_device(config.device, index)
        for name in ("cpu_isa", "quantization", "quantized_compute"):
            value = getattr(config, name)
            if device.type != "cpu" and value is not None:
                raise FlagRefused(f"{name}={value}: only device=cpu allows it, not device={device.type}")
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
    memory: MemoryTable,
    phases: Phases,
    config: ServerConfig,
) -> Decoder:
    """This rank's part of the model, with weights in the layouts of its gemms. Raises FlagRefused.

    fill: as in load_worker."""
    choice, stored = ALWAYS_KERNELS, checkpoint.info.quantization
    is_int8 = config.quantized_compute == "int8" or (
        config.quantized_compute is None and _asks_int8(config, checkpoint)
    )
    if platform.kernels is not None and platform.dtype in ACTIVATION_DTYPES and not is_int8:
        with phases("gemm") as details:
            choice = choose_gemm(platform.kernels, checkpoint.info, platform.dtype)
            if config.quantization is not None and choice.always_torch:
                choice = ALWAYS_KERNELS
            details.append(choice.describe())
        return_freed_memory()  # of the timed gemms: the weights would be measured as so much smaller
    with phases("weights") as details, memory.measure(WEIGHTS, ROTARY):
        model = _build_model(checkpoint, mesh, platform.dtype)
        model.materialize(platform.device, context_length)
        model.begin_packing(platform.kernels, choice, compiler, Packing(config.quantization, is_int8))
        if config.quantization is not None:
            files = weight_files(checkpoint.directory) if fill is None else []
            _check_quantizable(model, checkpoint.info, files, config.quantization, compiler)
        filled = FilledModules(model, model.pack_module)
        dequantised, may_keep_blocks = Counter[str](), model.takes_blocks and not config.rl
        try:
            if fill is None:
                on_bytes = _count_bytes(checkpoint, mesh, phases)
                dequantised = _load_weights(model, checkpoint, filled, on_bytes, may_keep_blocks)
            else:
                fill(model, filled)
        except CannotQuantize as error:
            raise FlagRefused(f"quantization={config.quantization}: {error}") from None
        model.end_packing()
        return_freed_memory()
        if model.block_types:
            how = "multiplied in integers" if is_int8 else f"widened to {str(platform.dtype)[6:]}"
            details.append(f"quantised as {', '.join(model.block_types)}, {how}")
            memory.replan(WEIGHTS, -model.saved_bytes)
        dequantised += model.dequantised
        for block_type in sorted(dequantised):
            why = why_dequantised(block_type) if may_keep_blocks else _why_all_plain(config, compiler)
            details.append(f"{dequantised[block_type]} weights of {block_type} dequantised ({why})")
        if dequantised and stored is not None and stored.quantizes_activations:
            details.append("whose activations are not quantised")
        if config.quantized_compute == "int8" and not model.block_types:
            raise FlagRefused(f"quantized_compute=int8: {_why_no_blocks(config, dequantised, compiler)}")
    return model


def _asks_int8(config: ServerConfig, checkpoint: Checkpoint) -> bool:
    """Whether weights will be quantised that are made for activations of 8 bits."""
    stored = checkpoint.info.quantization
    return config.quantization == "int8" or (stored is not None and stored.quantizes_activations and not config.rl)


def _check_quantizable(
    model: Decoder, info: ModelInfo, files: Sequence[Path], quantization: str, compiler: Compiler | None
) -> None:
    """files: empty for random weights. Raises FlagRefused."""
    reason = None
    if compiler is not None:
        reason = "compiled layers have plain weights: torch_compile=F"
    elif not model.takes_blocks or model.weight_dtype not in ACTIVATION_DTYPES:
        reason = "only the CPU kernels multiply by such weights, of bfloat16 or float32"
    elif files and has_quantized(files, info.quantization):
        reason = "the checkpoint's weights are quantised already"
    if reason is not None:
        raise FlagRefused(f"quantization={quantization}: {reason}")


def _why_all_plain(config: ServerConfig, compiler: Compiler | None) -> str:
    """Why no weights may stay quantised."""
    if compiler is not None:
        return "compiled layers have plain weights: torch_compile=F"
    return "with rl=T, all weights are plain numbers" if config.rl else "only the CPU kernels multiply by blocks"


def _why_no_blocks(config: ServerConfig, dequantised: Counter[str], compiler: Compiler | None) -> str:
    if compiler is not None or config.rl:
        return _why_all_plain(config, compiler)
    if dequantised:
        return f"the weights, {', '.join(sorted(dequantised))}, are dequantised here"
    return "the checkpoint's weights are not quantised; quantization=int8 quantises them"


def _choose_backend(
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


def _check_triton(
    shape: KVShape, model: Decoder, mesh: Mesh, backend: AttentionBackend, num_positions: int, checks: Checks
) -> None:
    """Check the Triton kernels of sampling and of layers. num_positions: as in measure_layers."""
    measures: dict[KernelGroup, Measure] = {
        "sampling": partial(compare_sampler, model.vocab_size, model.activation_dtype, shape.device),
        "layers": lambda: measure_layers(FusedExecutor(model), model, backend, shape, mesh, None, 1, num_positions),
    }
    for group in groups_in_use(shape.device, *measures):
        checks.check_kernels(group, measures[group])


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


def _check_compiled(loaded: LoadedWorker, compiler: Compiler, config: ServerConfig, details: list[str]) -> None:
    """Compile the layers; switch the compiler off if it fails, which it logs itself, or if they compute wrongly. Unless
    they are asked for, our kernels compute the layers where they are faster."""
    if not check_layers(loaded, "torch_compile=T" if config.torch_compile else None):
        compiler.switch_off()
    elif compiler.has_failed:
        loaded.checks.leave_out("torch_compile", "it does not compile here")
    elif config.torch_compile is None:
        _choose_layers(loaded, details)


def _choose_layers(loaded: LoadedWorker, details: list[str]) -> None:
    """Let our kernels compute the layers if they are faster than the compiled ones; both have been checked."""
    executor = loaded.runner.executor
    if not isinstance(executor, CompiledExecutor) or not isinstance(executor.plain, FusedExecutor):
        return
    times = time_layers(executor, executor.plain, loaded.model, loaded.mesh, loaded.limits.max_tokens)
    executor.is_slower = takes_own_kernels(times)
    details.append(describe_choice(times))


def _link_stages(mesh: Mesh, model: Decoder, limits: ForwardLimits, device: torch.device, trace: Trace) -> StageLinks:
    num_tokens = padded_count(limits.max_tokens, mesh.tp_size)
    buffers = [model.new_hidden(num_tokens, device) for _ in range(mesh.num_hidden_buffers)]
    return StageLinks(mesh, buffers, limits.max_seqs + 1, trace)


def _describe_dtypes(*dtypes: torch.dtype) -> str:
    """dtypes: of weights, activations and KV cache -> text for the user."""
    weights, activations, kv_cache = map(dtype_name, dtypes)
    if weights == activations == kv_cache:
        return weights
    return f"{weights} weights, {activations} activations, {kv_cache} KV cache"


def _build_model(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    try:
        return build_decoder(checkpoint.info, mesh, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error


def _load_weights(
    model: Decoder,
    checkpoint: Checkpoint,
    filled: FilledModules,
    on_bytes: Callable[[int], None],
    may_keep_blocks: bool,
) -> Counter[str]:
    """Returns as load_weights."""
    files = weight_files(checkpoint.directory)
    is_replaced = any(not update.is_partial for update in checkpoint.weight_updates)
    if checkpoint.files and not is_replaced and file_states(files) != checkpoint.files:
        raise UserError(f"the weights in {checkpoint.directory} have changed since the server was started")
    shards = iter(model.weight_shards())  # a list would keep packed weights in memory
    quantization = checkpoint.info.quantization
    with uploads_to(model.device) as uploads:
        return load_weights(files, shards, model.ignores, on_bytes, filled.note, may_keep_blocks, quantization, uploads)


def _count_bytes(checkpoint: Checkpoint, mesh: Mesh, phases: Phases) -> Callable[[int], None]:
    """Called with the size of each shard that is read; of several ranks, each reads about the same."""
    num_total = max(1, sum(file.stat().st_size for file in weight_files(checkpoint.directory)) // mesh.num_ranks)
    num_done = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal num_done
        num_done = min(num_done + num_bytes, num_total)
        phases.show_amount("bytes", num_done, num_total)

    return on_bytes
