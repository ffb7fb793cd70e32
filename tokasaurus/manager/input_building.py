"""From the plan of a step to the message that the workers get."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.block_allocator import BlockAllocator
from tokasaurus.manager.scheduler import StepPlan
from tokasaurus.manager.sequence import Sequence
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.slots import SlotChanges, SlotOpens


@dataclass(frozen=True, slots=True)
class BlockAdditions:
    """Block `ids[i]` is appended to the block table of slot `slots[i]`."""

    slots: list[int]
    ids: list[int]


def add_blocks(plan: StepPlan, blocks: BlockAllocator, page_size: int) -> BlockAdditions:
    """Lengthen the block tables of the plan's sequences so that they cover the tokens of the step."""
    added = BlockAdditions([], [])
    for sequence in plan.decode:
        if sequence.num_kv_tokens == sequence.num_covered_tokens:
            _extend(sequence, 1, blocks, page_size, added)
    for chunk in plan.prefill:
        num_uncovered = chunk.sequence.num_kv_tokens + chunk.num_tokens - chunk.sequence.num_covered_tokens
        if num_uncovered > 0:
            _extend(chunk.sequence, -(-num_uncovered // page_size), blocks, page_size, added)
    return added


def _extend(sequence: Sequence, num: int, blocks: BlockAllocator, page_size: int, added: BlockAdditions) -> None:
    taken = blocks.take(num)
    sequence.block_table += taken
    sequence.num_covered_tokens += num * page_size
    added.slots.extend([sequence.slot] * num)
    added.ids.extend(taken)


def build_forward_input(step_id: int, plan: StepPlan, closed_slots: list[int], added: BlockAdditions) -> ForwardInput:
    """The message of a step, from sequences that have not been moved past it yet."""
    chunks = plan.prefill
    slots = [sequence.slot for sequence in plan.decode] + [chunk.sequence.slot for chunk in chunks]
    num_tokens = [1] * len(plan.decode) + [chunk.num_tokens for chunk in chunks]
    return ForwardInput(
        step_id=step_id,
        slots=_int32(slots),
        num_tokens=_int32(num_tokens),
        num_decode=len(plan.decode),
        prompt_ids=_prompt_ids(plan),
        changes=SlotChanges(
            closed=_int32(closed_slots),
            opened=_build_opens([chunk.sequence for chunk in chunks if not chunk.sequence.slot_is_open]),
            block_slots=_int32(added.slots),
            block_ids=_int32(added.ids),
        ),
    )


def _prompt_ids(plan: StepPlan) -> NDArray[np.int32]:
    if not plan.prefill:
        return _int32([])
    return np.concatenate(
        [
            chunk.sequence.request.prompt_ids[
                chunk.sequence.num_kv_tokens : chunk.sequence.num_kv_tokens + chunk.num_tokens
            ]
            for chunk in plan.prefill
        ]
    )


def _build_opens(sequences: list[Sequence]) -> SlotOpens | None:
    if not sequences:
        return None
    sampling = [sequence.request.sampling for sequence in sequences]
    return SlotOpens(
        slots=_int32([sequence.slot for sequence in sequences]),
        num_prompt_tokens=_int32([sequence.num_prompt_tokens for sequence in sequences]),
        first_positions=_int32([sequence.num_kv_tokens for sequence in sequences]),
        temperatures=np.array([params.temperature for params in sampling], np.float32),
        top_ps=np.array([params.top_p for params in sampling], np.float32),
        seeds=np.array([params.seed for params in sampling], np.uint64),
        sample_indices=np.array([sequence.index for sequence in sequences], np.uint32),
        want_logprobs=np.array([sequence.request.want_logprobs for sequence in sequences], np.bool_),
    )


def _int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
