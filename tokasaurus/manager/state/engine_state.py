"""All mutable state of a manager."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.kv_cache.block_allocator import BlockAllocator
from tokasaurus.manager.kv_cache.prompt_logprobs import ScoredChunk
from tokasaurus.manager.planning.length_predictor import CompletionLengths, Forecast, prior_forecast
from tokasaurus.manager.state.grammar_manager import Grammars
from tokasaurus.manager.state.sequence import Sequence, TokenCounts
from tokasaurus.manager.state.sequence_queues import SequenceQueues
from tokasaurus.manager.state.slot_arrays import SlotArrays
from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats
from tokasaurus.monitoring.step_stats import StepTotals
from tokasaurus.text.stop_strings import StopTokens


@dataclass(frozen=True, slots=True)
class LengthPredictorOptions:
    """How completion lengths are predicted; the flags `early_stopping_*` and `spec_allocation_*` of the same names.

    learns: from sequences that end; otherwise the prior stays.
    """

    learns: bool = True
    buffer_size: int = 2048
    num_prediction_buckets: int = 1024
    initial_wait: int = 16
    init_mean: float | None = None
    init_std: float | None = None
    std_buffer_scale: float = 0.25


@dataclass(frozen=True, slots=True)
class HydragenOptions:
    """Which shared prefixes are attended to in groups: those of so many sequences and blocks at least."""

    min_group_size: int
    min_blocks: int


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What stays fixed while the manager runs.

    max_steps_ahead: steps that may be with the worker at once.
    eos_ids: the model's.
    decode_text: token ids -> text without special tokens, for stop strings. special_ids: those tokens.
    min_lookback_tokens: fewest trailing tokens that are read for a stop string.
    stop_tokens: which tokens may end a stop string; None: all.
    prefill_multiple: what a step's prefill tokens are rounded up to where prefill is not greedy; None where it is.
    onboard_batch_size: most sequences admitted by one simulation; None admits by worst cases alone, without simulating.
    early_stopping: None where every sequence is expected to use all its tokens.
    target_utilization: share of the KV pool that the expected lengths may fill.
    hydragen: None where every sequence attends alone.
    deferred_tasks: "always", "deferred", or None: put off while the worker's queue runs low.
    """

    limits: EngineLimits
    max_tokens_per_forward: int
    max_seqs_per_forward: int
    max_steps_ahead: int
    eos_ids: frozenset[int]
    decode_text: Callable[[TokenIds[int]], str]
    special_ids: frozenset[int]
    min_lookback_tokens: int
    stop_tokens: StopTokens | None = None
    prefill_multiple: int | None = None
    onboard_batch_size: int | None = 128
    early_stopping: LengthPredictorOptions | None = LengthPredictorOptions()
    target_utilization: float = 1.0
    hydragen: HydragenOptions | None = None
    deferred_tasks: str | None = None

    @property
    def num_slots(self) -> int:
        """Sequences that run at once: each that decodes needs a row and a token in every step."""
        return min(self.max_seqs_per_forward, self.max_tokens_per_forward)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose results are not back. `sampled`: int64, the slots that sample in it, in the order of the rows.
    `scored`: the tokens of prompts that it scores, likewise."""

    step_id: int
    sampled: NDArray[np.int64]
    num_rows: int
    num_prefill_tokens: int
    scored: list[ScoredChunk]


@dataclass(slots=True)
class Totals:
    """Counts since start, as EngineStats explains them."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recompiles: int = 0
    phase_seconds: tuple[float, ...] = ()
    tokens: TokenCounts = field(default_factory=TokenCounts)


@dataclass(slots=True)
class EngineState:
    """sequences: by slot, None where no sequence runs.

    unfinished: the sequences of each request that still run or wait, for cancellation.
    deltas: what the server has not heard of: sequences that have ended, and new tokens of those that are streamed.
    slots_to_close: slots that have lost their sequence since the last step was sent. They are in `free_slots` already:
    the next step's message carries their closing, and the worker closes before it opens.
    step_seconds: moving average of what the worker needs for a step; None before the first result.
    last_result_id: the newest step whose results are back; -1 before the first.
    num_with_stops: running sequences that have stop strings. has_uncounted: results of theirs have not been looked at,
    so are not counted.
    num_with_stop_tokens: running sequences that have stop token ids.
    grammars: None where the tokenizer cannot be used with any. num_with_grammars: running sequences that have one.
    streaming: running sequences whose tokens are sent as they come.
    starts_are_stale: a prompt left that others may have relied on, and where they begin has to be found again.
    slot_of_node: the slot that last opened with a node of the prefix tree, by the node's index.
    prefill_rate: most prefill tokens of a step, as the last admission simulated it; None: as many as fit.
    groups_are_old: who decodes has changed since the sequences were grouped. groups_are_new: no step has had the groups
    yet. group_num_blocks: [groups + 1], blocks of the prefix that a group shares, by the numbers in SlotArrays.groups.
    onboard_batch: how many sequences the next simulation tries to admit first.
    lengths: completions that ended; None where nothing is predicted. ended: those that `lengths` does not have yet,
    with their lengths and whether they ended by themselves.
    forecast: of completion lengths; None while every sequence is expected to use all its tokens.
    num_ends_in_forecast: how many ends were known when it was made.
    block_logprobs: float32 [num_blocks + 1, page_size], where a token's log-probability is kept until its sequence
    ends; None until one is asked for. last_logprobs: the newest of each slot.
    """

    options: EngineOptions
    slots: SlotArrays
    queues: SequenceQueues
    blocks: BlockAllocator
    free_slots: list[int]
    sequences: list[Sequence | None]
    onboard_batch: int
    lengths: CompletionLengths | None
    forecast: Forecast | None
    last_logprobs: NDArray[np.float32]
    block_logprobs: NDArray[np.float32] | None = None
    unfinished: dict[str, dict[Sequence, None]] = field(default_factory=dict)
    deltas: list[SequenceDelta] = field(default_factory=list)
    slots_to_close: list[int] = field(default_factory=list)
    steps_in_flight: deque[StepInFlight] = field(default_factory=deque)
    next_step_id: int = 0
    last_result_id: int = -1
    step_seconds: float | None = None
    num_admissions: int = 0
    num_with_stops: int = 0
    has_uncounted: bool = False
    num_with_stop_tokens: int = 0
    grammars: Grammars | None = None
    num_with_grammars: int = 0
    streaming: dict[Sequence, None] = field(default_factory=dict)
    starts_are_stale: bool = False
    slot_of_node: dict[int, int] = field(default_factory=dict)
    prefill_rate: int | None = None
    groups_are_old: bool = False
    groups_are_new: bool = False
    group_num_blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    ended: list[tuple[int, bool]] = field(default_factory=list)
    num_ends_in_forecast: int = 0
    step_totals: StepTotals = field(default_factory=StepTotals)
    totals: Totals = field(default_factory=Totals)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self.options.num_slots - len(self.free_slots)

    def stats(self, manager_busy_fraction: float = 0.0, manager_cpu_seconds: float = 0.0) -> EngineStats:
        tokens = self.totals.tokens
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.queues.num_waiting,
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
            total_forward_seconds=self.step_totals.busy_seconds,
            phase_seconds=self.totals.phase_seconds,
            manager_cpu_seconds=manager_cpu_seconds,
            total_asked_prompt_tokens=tokens.asked,
            total_computed_prompt_tokens=tokens.computed,
            total_shared_prompt_tokens=tokens.shared,
        )


def make_state(options: EngineOptions, grammars: Grammars | None = None) -> EngineState:
    """An idle engine: every block and the slots 1..num_slots are free."""
    limits, num_slots, early = options.limits, options.num_slots, options.early_stopping
    slots = SlotArrays(num_slots, -(-limits.max_tokens_per_sequence // limits.page_size))
    forecast = None
    if early is not None and early.init_mean is not None:
        std = 0.0 if early.init_std is None else early.init_std
        forecast = prior_forecast(early.init_mean, std, early.std_buffer_scale)
    return EngineState(
        options=options,
        slots=slots,
        queues=SequenceQueues(slots),
        blocks=BlockAllocator(limits.num_kv_blocks, limits.page_size),
        free_slots=list(range(num_slots, 0, -1)),
        sequences=[None] * (num_slots + 1),
        onboard_batch=options.onboard_batch_size or 1,
        lengths=CompletionLengths(early.buffer_size) if early is not None and early.learns else None,
        forecast=forecast,
        last_logprobs=np.zeros(num_slots + 1, np.float32),
        grammars=grammars,
    )
