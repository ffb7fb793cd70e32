"""A worker's start: the record that its phases fill, and how each phase is run, timed, measured and shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from tokasaurus.checkpoint import Checkpoint, ModelInfo
from tokasaurus.messages.status import DEFAULT_HYDRAGEN, HydragenCosts, PhaseDone, PhaseProgress, longest_context
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.decoder.weights import FilledModules
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks
from tokasaurus.model.worker.memory import MemoryTable, StatePlan
from tokasaurus.model.worker.self_check import Checks
from tokasaurus.model.worker.warmup import ForwardLimits, WarmUpTimes
from tokasaurus.model.worker.weight_update import WeightUpdates
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.monitoring.trace import Trace

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

PROCESS = "model worker"

PROGRESS_SECONDS = 0.1
"""Shortest time between two reports of how far a phase is, in seconds."""

Fill: TypeAlias = Callable[[Model, FilledModules], None]
"""Fills all weight shards of a model, and notes each."""


def ignore_progress(_: PhaseProgress) -> None: ...


class PhaseLog:
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
        self._report(PhaseDone(PROCESS, name, self._last_end - started, ", ".join(filter(None, details))))

    def show_amount(self, unit: str, num_done: int, num_total: int) -> None:
        """How far the phase is that runs."""
        now_s = time.perf_counter()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_SECONDS
            self._on_progress(PhaseProgress(PROCESS, self._name, num_done, num_total, unit))


@dataclass(slots=True)
class Start:
    """What one worker is started with, and what its phases have made so far: each fills some fields, which later ones
    read."""

    config: ServerConfig
    checkpoint: Checkpoint
    mesh: Mesh
    """The other ranks of its group run the same phases."""
    index: int
    """Among the workers of all replicas."""
    device: torch.device
    log: PhaseLog
    fill: Fill | None = None
    """Fills the weights; None: from the checkpoint's files."""
    checks: Checks = field(default_factory=Checks)
    place: Place | None = None
    """Where the replica runs, of several memory nodes."""

    # platform
    limits: ForwardLimits = field(init=False)
    kernels: Kernels | None = None
    """The CPU kernels, if the device is a CPU and has them."""
    compiler: Compiler | None = None
    dtype: torch.dtype = field(init=False)
    """Of the weights."""
    activation_dtype: torch.dtype = field(init=False)
    kv_cache_dtype: torch.dtype = field(init=False)
    memory: MemoryTable = field(init=False)
    # model
    gemm: GemmChoice = ALWAYS_KERNELS
    model: Model = field(init=False)
    # backend, slots, runner
    shape: KVShape = field(init=False)
    backend: AttentionBackend = field(init=False)
    slots: SlotTable = field(init=False)
    trace: Trace = field(init=False)
    links: StageLinks | None = None
    adapters: ModelAdapters | None = None
    """None if the server was started without, or the model takes none."""
    runner: ModelRunner = field(init=False)
    graph_sizes: list[int] = field(init=False)
    """Sequences of the decode steps to record, largest first; none if no graphs are wanted, or can be recorded."""
    chunk_sizes: list[int] = field(init=False)
    """Tokens of the larger steps to record, largest first."""
    group_sizes: list[int] = field(init=False)
    """Some of graph_sizes: decode steps to record with prefix groups too, largest first."""
    # states, KV cache and warm-up
    states: StatePlan | None = None
    """None if no layer has a state."""
    updates: WeightUpdates = field(init=False)
    num_blocks: int = field(init=False)
    """Usable ones, the same on all ranks."""
    times: WarmUpTimes = field(init=False)
    hydragen: HydragenCosts = DEFAULT_HYDRAGEN

    def __post_init__(self) -> None:
        config, info = self.config, self.info
        context_length = longest_context(info.context_length, config.max_num_tokens_per_request)
        self.limits = ForwardLimits(
            config.max_tokens_per_forward, config.max_seqs_per_forward, context_length, info.vocab_size
        )
        self.checks.all_agree = lambda works: bool(self.least(int(works)))

    @property
    def info(self) -> ModelInfo:
        return self.checkpoint.info

    @property
    def decoder(self) -> Decoder:
        """The model, of our own layers."""
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def first_device(self) -> int:
        """Index of the first rank's CUDA device; the others follow."""
        return self.index - self.mesh.tp_rank

    def least(self, value: int) -> int:
        """The least value of all ranks, which must call this together."""
        return least_of_ranks(value, self.mesh, self.device)


class Phase(NamedTuple):
    """One phase of a start."""

    name: str
    """Of its line in the log. "": it has none, and its time is part of the next one's."""
    run: Callable[[Start], str]
    """Returns the details of the line, or ""."""
    parts: tuple[str, ...] = ()
    """The memory table's parts that it allocates: measured in one row."""
    when: Callable[[Start], object] = lambda _start: True
    """Whether the start has this phase: any true value."""


def run_phases(start: Start, phases: Iterable[Phase]) -> None:
    """Run those that the start has, one after another. Raises UserError."""
    for phase in phases:
        if not phase.when(start):
            continue
        with ExitStack() as stack:
            details = stack.enter_context(start.log(phase.name)) if phase.name else []
            if phase.parts:
                stack.enter_context(start.memory.measure(*phase.parts))
            details.append(phase.run(start))
