"""All mutable state of a manager, and the few changes that more than one part of it makes."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from tokasaurus.manager.block_allocator import BlockAllocator
from tokasaurus.manager.sequence import Phase, Sequence
from tokasaurus.manager.sequence_queues import SequenceQueues
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats
from tokasaurus.monitoring.step_stats import StepTotals


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What stays fixed while the manager runs.

    max_steps_ahead: steps that may be with the worker at once.
    eos_ids: the model's.
    decode_text: token ids -> text without special tokens, for stop strings. special_ids: those tokens.
    min_lookback_tokens: fewest trailing tokens that are read for a stop string.
    """

    limits: EngineLimits
    max_tokens_per_forward: int
    max_seqs_per_forward: int
    max_steps_ahead: int
    eos_ids: frozenset[int]
    decode_text: Callable[[TokenIds[int]], str]
    special_ids: frozenset[int]
    min_lookback_tokens: int


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose results are not back. `sampled`: the sequences that sample in it, in the order of the rows."""

    step_id: int
    sampled: list[Sequence]
    num_rows: int
    num_prefill_tokens: int


@dataclass(slots=True)
class EngineState:
    """unfinished: the sequences of each request that still run or wait, for cancellation.

    num_blocks_reserved: the sum of the admitted sequences' worst cases; never more than the pool, so that a block is
    always there when a step needs one.
    slots_to_close: slots that have lost their sequence since the last step was sent. They are in `free_slots` already:
    the next step's message carries their closing, and the worker closes before it opens.
    step_seconds: moving average of what the worker needs for a step; None before the first result.
    """

    options: EngineOptions
    queues: SequenceQueues
    blocks: BlockAllocator
    free_slots: list[int]
    num_blocks_reserved: int = 0
    slots_to_close: list[int] = field(default_factory=list)
    unfinished: dict[str, dict[Sequence, None]] = field(default_factory=dict)
    steps_in_flight: deque[StepInFlight] = field(default_factory=deque)
    next_step_id: int = 0
    step_seconds: float | None = None
    step_totals: StepTotals = field(default_factory=StepTotals)
    total_prompt_tokens: int = 0
    total_generation_tokens: int = 0

    def admit(self, sequence: Sequence) -> None:
        """Waiting -> prefill, with a slot and with its worst case reserved. A prompt counts once for its request."""
        self.num_blocks_reserved += sequence.max_blocks
        assert self.num_blocks_reserved <= self.blocks.num_blocks, "more blocks promised than there are"
        sequence.slot = self.free_slots.pop()
        self.queues.move(sequence, Phase.PREFILL)
        if sequence.index == 0:
            self.total_prompt_tokens += sequence.num_prompt_tokens

    def release(self, sequence: Sequence) -> None:
        """End a sequence in whatever phase it is: its blocks, its slot and every trace of it are free at once."""
        if sequence.slot:
            self.num_blocks_reserved -= sequence.max_blocks
            self.blocks.give_back(sequence.block_table)
            self.free_slots.append(sequence.slot)
            if sequence.slot_is_open:
                self.slots_to_close.append(sequence.slot)
        self.queues.move(sequence, Phase.FINISHED)
        siblings = self.unfinished[sequence.request.request_id]
        del siblings[sequence]
        if not siblings:
            del self.unfinished[sequence.request.request_id]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.queues.num_running,
            num_waiting=len(self.queues.waiting),
            num_kv_blocks_used=self.blocks.num_used,
            num_kv_blocks_total=self.blocks.num_blocks,
            total_prompt_tokens=self.total_prompt_tokens,
            total_generation_tokens=self.total_generation_tokens,
            worker_queue_depth=len(self.steps_in_flight),
        )


def make_state(options: EngineOptions) -> EngineState:
    """An idle engine: every block and the slots 1..max_seqs_per_forward are free."""
    return EngineState(
        options=options,
        queues=SequenceQueues(),
        blocks=BlockAllocator(options.limits.num_kv_blocks),
        free_slots=list(range(options.max_seqs_per_forward, 0, -1)),
    )
