"""All mutable state of a manager."""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokasaurus.config import ServerConfig
from tokasaurus.manager.kv_cache.block_allocator import BlockAllocator
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobChunk
from tokasaurus.manager.planning.length_predictor import CompletionLengths, Forecast, ShareForecast
from tokasaurus.manager.planning.prefix_groups import GroupTrial, GroupTrials
from tokasaurus.manager.planning.step_budget import StepLimit
from tokasaurus.manager.planning.step_times import StepTimeModel, StepTimes
from tokasaurus.manager.state.adapter_table import AdapterTable
from tokasaurus.manager.state.grammar_manager import Grammars
from tokasaurus.manager.state.sequence import Samples, Sequence, TokenCounts
from tokasaurus.manager.state.sequence_queues import SequenceQueues
from tokasaurus.manager.state.slot_arrays import SlotArrays
from tokasaurus.messages.commands import (
    FIRST_VERSIONS,
    CommandDone,
    EngineCommand,
    UpdateWeights,
    WeightVersions,
    WorkerCommand,
)
from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.messages.live import MAX_SAMPLE_LENGTHS, TakeSample
from tokasaurus.messages.status import KV_READS, EngineLimits, EngineStats, HydragenCosts, TimeLeft
from tokasaurus.monitoring.step_stats import StepTotals
from tokasaurus.monitoring.time_left import Pace
from tokasaurus.text.special_stops import SpecialStops
from tokasaurus.text.stop_strings import StopTokens
from tokasaurus.text.token_decoder import PromptTail
from tokasaurus.workers import num_adapters

DeferredTasks = Literal["always", "deferred"]
"""When deferred tasks run: at once, or as late as allowed."""


@dataclass(frozen=True, slots=True)
class HydragenOptions:
    """Which shared prefixes are attended to in prefix groups."""

    min_group_size: int
    """Fewest sequences in a group."""
    min_blocks: int
    """Fewest blocks in the shared prefix."""
    costs: HydragenCosts = KV_READS
    """A group is formed only if it saves time by these."""
    is_tried: bool = False
    """Whether steps in service correct the costs."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What stays fixed while the manager runs: the flags, what the workers can do, how tokens become text, and what
    follows from these."""

    config: ServerConfig
    """The flags; nobody writes them after the start."""
    limits: EngineLimits
    eos_ids: frozenset[int]
    """The model's eos token ids."""
    decode_text: Callable[[TokenIds[int]], str]
    """Token ids -> text without special tokens; used to find stop strings."""
    prompt_tail: Callable[[TokenIds[int]], PromptTail]
    """The last token ids of a prompt -> what the text of its completions depends on."""
    special_ids: frozenset[int]
    """The special tokens that `decode_text` leaves out."""
    special_stops: Callable[[TokenIds[str]], SpecialStops | None] = lambda _: None
    """What finds stop strings in the text of special tokens, if there are such stop strings."""
    stop_tokens: StopTokens | None = None
    """Which tokens may end a stop string; None: any token may."""
    decode_special: Callable[[TokenIds[int]], str] | None = None
    """Decodes token ids with their special tokens, which `decode_text` leaves out; None: there are none."""
    special_tail: Callable[[TokenIds[int]], PromptTail] | None = None
    """The last token ids of a prompt -> what `decode_special` of its completions depends on."""
    step_limit: StepLimit = StepLimit()  # noqa: RUF009  (it is frozen)
    """How long the steps of a round, one of each microbatch, may take together if they have prompts."""
    hydragen: HydragenOptions | None = None
    """None: no prefix groups, every sequence attends alone."""
    deferred_tasks: DeferredTasks | None = None
    """When deferred tasks run; None: not while the worker's queue is short. Only tests and measurements force one."""
    num_microbatches: int = 1
    """Parts of the running sequences whose steps take turns, so that pipeline stages work at the same time."""

    @property
    def num_slots(self) -> int:
        """Most sequences running at once: each decoding sequence needs a row and a token in every step."""
        most = min(self.config.max_seqs_per_forward, self.config.max_tokens_per_forward)
        return most if self.limits.max_seqs is None else min(most, self.limits.max_seqs)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose results have not arrived."""

    step_id: int
    sampled: NDArray[np.int64]
    """Slots that sample in this step, in row order."""
    microbatch: int
    num_rows: int
    num_prefill_tokens: int
    logprob_chunks: list[PromptLogprobChunk]
    """Prompt tokens whose logprobs this step computes, in row order."""
    cost: float
    """By `step_cost`."""
    features: NDArray[np.float64]
    """By `step_features`."""
    follows_work: bool
    """When the step before it ended, sequences were left to compute: until this one began, the device was idle."""
    trial: GroupTrial | None
    """None for a step with its usual prefix groups."""
    expert_tokens: NDArray[np.int64] | None
    """kv indices of the tokens whose experts this step returns, in order; None if there are none."""
    begins: list[Sequence]
    """Sequences whose first token this step samples, unless they leave their slots before."""


@dataclass(slots=True)
class Totals:
    """Counts since start; EngineStats explains each."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished_sequences: int = 0
    """Sequences that ended with all their tokens."""
    preemptions: int = 0
    recompiles: int = 0
    graph_misses: int = 0
    nonfinite_rows: int = 0
    phase_seconds: tuple[float, ...] = ()
    expert_tokens: NDArray[np.int64] | None = None
    tokens: TokenCounts = field(default_factory=TokenCounts)


@dataclass(slots=True)
class AdmissionState:
    """What engine/admission remembers between two admissions; only it writes this, but for `blocked_at`."""

    batch: int
    """Sequences that the next KV simulation tries to admit first."""
    num_releases_seen: int = 0
    """`SlotArrays.num_releases` at the last admission."""
    usual_releases: float = 0.0
    """Moving average of the sequences that leave between two admissions."""
    blocked_at: tuple[int, int] | None = None
    """`next_step_id` and `num_releases` when the next waiting sequence did not fit; None if it has not been tried, and
    after a pause, when engine/commands sets it."""
    prefill_rate: int | None = None
    """Most prefill tokens of a step of each microbatch together, as assumed by the last admission; None: as many as
    fit."""


@dataclass(slots=True)
class LengthState:
    """Lengths of completions: recorded by engine/outputs, forecast by engine/kv_forecast."""

    recorded: CompletionLengths | None
    """None: lengths are not learned."""
    forecast: Forecast | None
    """None while every sequence is expected to use all its tokens."""
    new_ends: list[tuple[int, bool]] = field(default_factory=list)
    """Finished sequences not in `recorded` yet: number of tokens, and whether it stopped before its limit."""
    num_in_forecast: int = 0
    """Recorded ends when `forecast` was fitted."""
    newest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLE_LENGTHS))
    """Finished sequences that no LiveSample had yet, which takes them: (tokens predicted at admission, tokens)."""


@dataclass(slots=True)
class GroupState:
    """Prefix groups: found by engine/engine, used by engine/input_building."""

    trials: GroupTrials | None
    """None if the costs of prefix groups are not corrected."""
    num_blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """[groups + 1], blocks in each group's shared prefix, indexed by the numbers in SlotArrays.groups."""
    are_old: bool = False
    """The set of decoding sequences, or the costs of groups, have changed since they were grouped. Set by
    engine/input_building, engine/lifecycle and engine/outputs."""
    are_new: bool = False
    """No step has used the current prefix groups yet."""


@dataclass(slots=True)
class EngineState:
    """All mutable state of one engine, grouped by the module that writes it; others that write a field are named under
    it.

    Steps are numbered from 0 in the order in which they are sent; results arrive in the same order. This number is the
    clock of all that is scheduled. Only what is told to clients goes by time.monotonic: when deltas of streams are due
    and were made, when a request came, and when a sequence was admitted and had its first token.
    """

    options: EngineOptions
    slots: SlotArrays
    """The running sequences."""
    queues: SequenceQueues
    """The waiting sequences, and the order of the running ones."""
    blocks: BlockAllocator
    grammars: Grammars | None
    """None if grammars do not support the tokenizer."""
    adapters: AdapterTable
    admission: AdmissionState
    lengths: LengthState
    groups: GroupState
    totals: Totals = field(default_factory=Totals)
    step_totals: StepTotals = field(default_factory=StepTotals)
    """Sums over the steps whose results have arrived."""

    # engine/requests
    unfinished: dict[str, Samples] = field(default_factory=dict)
    """Requests with running or waiting sequences, for cancellation. Removed by engine/lifecycle with the last one."""
    cancelled: deque[Sequence] = field(default_factory=deque)
    """Sequences of cancelled requests that ran at the cancellation and may still do so. Also emptied by
    engine/commands when all sequences stop."""

    # engine/commands
    commands: deque[EngineCommand] = field(default_factory=deque)
    """Not carried out yet, in the order in which they arrived. Added by engine/engine."""
    is_paused: bool = False
    """No steps are sent, and nothing is admitted."""
    is_asleep: bool = False
    """The workers have no memory for KV."""
    sent_command: WorkerCommand | None = None
    """The first of `commands`, which the workers are carrying out."""
    done: list[CommandDone] = field(default_factory=list)
    """Not yet sent to the server; manager/loop takes them."""
    weight_versions: WeightVersions = FIRST_VERSIONS
    """Weight versions of a completion that is wholly of the present weights. Set by manager/loop at the start."""
    weight_updates: list[UpdateWeights] = field(default_factory=list)
    """What leads from the checkpoint's weights to the present ones. Set by manager/loop at the start."""

    # engine/engine
    asked_sample: TakeSample | None = None
    """Not answered yet; engine/live_sample answers it."""
    jobs_left: TimeLeft | None = None
    """See JobsLeft."""
    pace: Pace = field(default_factory=Pace)
    """What was done lately; engine/work_left notes it."""
    next_microbatch: int = 0
    """The microbatch whose turn is next."""

    # engine/lifecycle
    starts_are_stale: bool = False
    """A sequence left during prefill: others may have relied on its blocks, so their first positions must be found
    again."""

    # engine/input_building
    steps_in_flight: deque[StepInFlight] = field(default_factory=deque)
    """engine/outputs removes a step when it applies its results."""
    next_step_id: int = 0
    """Number of the next step to be sent."""
    slot_of_node: dict[int, int] = field(default_factory=dict)
    """By index of a prefix tree node: the slot that opened last with this node on its path."""

    # engine/outputs
    last_result_id: int = -1
    """The newest step whose results have arrived; -1 before the first."""
    has_had_work: bool = False
    """Sequences have run or waited ever since the last result. Cleared by engine/engine when none does, and by
    engine/commands when all stop."""
    step_seconds: float | None = None
    """Expected time of a step without prefill; None before the first result."""
    step_time_model: StepTimeModel = field(default_factory=StepTimeModel)
    step_times: StepTimes = field(default_factory=lambda: StepTimes(1.0))
    """Longest plausible times, for WorkerWatch."""
    ending: deque[tuple[Sequence, bool]] = field(default_factory=deque)
    """Sequences whose last token is known, and that still have their slots unless they were cancelled since; and
    whether a stop ends them rather than their length."""
    has_uncounted: bool = False
    """Some tokens of sequences with stop strings are not checked for them yet, and so not counted as generated."""
    stream_due_s: float = math.inf
    """When the next delta of a stream with unsent tokens is due, by time.monotonic. engine/lifecycle sets inf once the
    last stream has left."""
    deltas: list[SequenceDelta] = field(default_factory=list)
    """Not yet sent to the server: finished sequences, and new tokens of streamed ones. manager/loop takes them, and
    engine/requests drops those for a server that has died."""

    def stats(self, manager_busy_fraction: float = 0.0, manager_cpu_seconds: float = 0.0) -> EngineStats:
        tokens = self.totals.tokens
        experts = self.totals.expert_tokens
        return EngineStats(
            num_running=self.slots.num_running,
            num_waiting=self.queues.num_waiting + self.adapters.num_held,
            num_kv_blocks_used=self.blocks.num_used,
            num_kv_blocks_total=self.blocks.num_blocks,
            total_prompt_tokens=self.totals.prompt_tokens,
            total_generation_tokens=self.totals.generation_tokens,
            worker_queue_depth=len(self.steps_in_flight),
            total_prefix_cache_hit_tokens=tokens.cached,
            total_preemptions=self.totals.preemptions,
            total_recomputed_tokens=tokens.recomputed,
            manager_busy_fraction=manager_busy_fraction,
            total_recompiles=self.totals.recompiles,
            total_graph_misses=self.totals.graph_misses,
            total_nonfinite_rows=self.totals.nonfinite_rows,
            total_forward_seconds=self.step_totals.busy_seconds,
            total_device_idle_seconds=self.step_totals.idle_seconds,
            phase_seconds=self.totals.phase_seconds,
            expert_tokens=() if experts is None else tuple(tuple(own) if any(own) else () for own in experts.tolist()),
            adapters=self.adapters.loads(self.slots),
            num_running_background=self.slots.num_background,
            num_kv_blocks_cached=self.blocks.num_available - self.blocks.num_free,
            num_kv_blocks_of_windows=self.blocks.num_held_by_windows,
            num_snapshots_used=0 if self.blocks.snapshots is None else self.blocks.snapshots.num_used,
            total_kv_blocks_evicted=self.blocks.tree.num_evicted_blocks,
            manager_cpu_seconds=manager_cpu_seconds,
            total_asked_prompt_tokens=tokens.asked,
            total_computed_prompt_tokens=tokens.computed,
            total_shared_prompt_tokens=tokens.shared,
        )


def make_state(options: EngineOptions, grammars: Grammars | None = None) -> EngineState:
    """An idle engine: every block and the slots 1..num_slots are free."""
    config, limits, num_slots = options.config, options.limits, options.num_slots
    slots = SlotArrays(num_slots, -(-limits.max_tokens_per_sequence // limits.page_size))
    forecast = None
    if config.use_spec_allocation and config.early_stopping_init_mean is not None:
        forecast = ShareForecast(config.early_stopping_init_mean)
    learns = config.use_spec_allocation and config.track_early_stopping
    has_trials = options.hydragen is not None and options.hydragen.is_tried
    return EngineState(
        options=options,
        slots=slots,
        queues=SequenceQueues(slots),
        blocks=BlockAllocator(limits.num_kv_blocks, limits.page_size, limits.windows, limits.num_snapshots),
        grammars=grammars,
        adapters=AdapterTable(num_adapters(config)),
        admission=AdmissionState(config.precise_onboard_batch_size if config.enable_precise_onboard else 1),
        lengths=LengthState(CompletionLengths(config.early_stopping_buffer_size) if learns else None, forecast),
        groups=GroupState(GroupTrials() if has_trials else None),
        step_time_model=StepTimeModel(limits.seconds_per_pair),
        step_times=StepTimes(limits.seconds_per_token, limits.seconds_per_pair),
    )
