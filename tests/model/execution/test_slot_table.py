"""The slots' block tables against a plain dictionary of lists."""

import random

import numpy as np
import pytest
import torch

from tests.helpers.examples import seeds
from tests.model.helpers.steps import int32
from tokasaurus.messages.forward import SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize


def opens(slots: list[int], positions: list[int]) -> SlotOpens | None:
    if not slots:
        return None
    count = len(slots)
    return SlotOpens(
        slots=np.array(slots, np.int32),
        num_prompt_tokens=np.full(count, 50, np.int32),
        first_positions=np.array(positions, np.int32),
        sampling=np.zeros(count, SAMPLING_DTYPE),
        seeds=np.arange(count, dtype=np.uint64),
        sample_indices=np.zeros(count, np.uint32),
        want_logprobs=np.zeros(count, np.bool_),
    )


@pytest.mark.parametrize("seed", seeds(20))
def test_block_tables_equal_lists_kept_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(SlotTableSize(num_slots=9, max_blocks=40), torch.device("cpu"))
    by_hand: dict[int, list[int]] = {}
    for _ in range(30):
        closed = rng.sample(sorted(by_hand), rng.randint(0, len(by_hand)))
        for slot in closed:
            del by_hand[slot]
        free = [slot for slot in range(1, 9) if slot not in by_hand]
        opened = rng.sample(free, rng.randint(0, len(free)))
        positions = [rng.randint(0, 30) for _ in opened]
        by_hand.update({slot: [] for slot in opened})
        # An opened slot gets the blocks of its whole prompt, a running one its new blocks.
        slots = [slot for slot in opened for _ in range(rng.randint(0, 30))]
        slots += [slot for slot in by_hand for _ in range(rng.randint(0, 3)) if len(by_hand[slot]) < 36]
        rng.shuffle(slots)
        # Slots share blocks, so an id may be in several tables, at different positions.
        blocks = [rng.randint(1, 50) for _ in slots]
        for slot, block in zip(slots, blocks, strict=True):
            by_hand[slot].append(block)
        table.apply(
            SlotChanges(
                np.array(closed, np.int32),
                opens(opened, positions),
                np.array(slots, np.int32),
                np.array(blocks, np.int32),
            )
        )
        for slot, expected in by_hand.items():
            assert table.num_blocks[slot] == len(expected)
            assert table.block_tables[slot, : len(expected)].tolist() == expected
        assert table.positions[opened].tolist() == positions
        assert not table.block_tables[0].any(), "the padding slot stays on the padding block"


def test_a_block_below_0_is_refused() -> None:
    """Plain torch would store its keys and values at the cache's end."""
    table = SlotTable(SlotTableSize(4, 8), torch.device("cpu"))
    with pytest.raises(AssertionError, match="from 0 on"):
        table.apply(SlotChanges(int32([]), None, int32([1, 1]), int32([3, -1])))
