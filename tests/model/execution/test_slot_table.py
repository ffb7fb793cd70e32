"""The slots' block tables against a plain dictionary of lists, and their copies on a device against the host's."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.helpers.examples import seeds
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, on_host, pretended
from tests.model.helpers.steps import CPU, NOTHING, int32
from tokasaurus.messages.forward import SlotChanges, SlotOpens, TableCopies
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.model.execution.slot_table import DeviceSlots, SlotTable, SlotTableSize, copy_rounds
from tokasaurus.model.staging.packed import PackedStaging
from tokasaurus.model.staging.staging import DirectStaging


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


NUM_SLOTS, MAX_BLOCKS = 12, 40


def random_opens(slots: list[int], rng: random.Random) -> SlotOpens | None:
    if not slots:
        return None
    count = len(slots)
    sampling = np.frombuffer(rng.randbytes(count * SAMPLING_DTYPE.itemsize), SAMPLING_DTYPE)
    zeros = np.zeros(count, np.int32)
    return SlotOpens(
        *(int32(slots), zeros, zeros, sampling),
        *(zeros.astype(np.uint64), zeros.astype(np.uint32), zeros.astype(bool)),
    )


def random_changes(open_blocks: dict[int, int], rng: random.Random) -> SlotChanges:
    """Closes and opens slots; some opened ones start with blocks of another's table, or of a table copied before.

    open_blocks: number of blocks of each open slot; updated.
    """
    closed = rng.sample(sorted(open_blocks), rng.randint(0, len(open_blocks) // 2))
    for slot in closed:
        del open_blocks[slot]
    free = [slot for slot in range(1, NUM_SLOTS) if slot not in open_blocks]
    opened = rng.sample(free, rng.randint(0, len(free)))
    appended: list[int] = []
    copies = []
    for slot in opened:
        sources = [other for other, count in open_blocks.items() if count and rng.random() < 0.7]
        num_copied = 0
        if sources:
            source = rng.choice(sources)
            num_copied = rng.randint(1, open_blocks[source])
            copies.append((slot, source, num_copied))
        num_own = rng.randint(0, 6)
        appended += [slot] * num_own
        open_blocks[slot] = num_copied + num_own
    for slot in open_blocks:
        num_new = rng.randint(0, min(3, MAX_BLOCKS - open_blocks[slot]))
        if slot not in opened:
            appended += [slot] * num_new
            open_blocks[slot] += num_new
    ids = int32([rng.randrange(1, 1000) for _ in appended])
    table_copies = TableCopies(*map(int32, zip(*copies, strict=True))) if copies else None
    return SlotChanges(int32(closed), random_opens(opened, rng), int32(appended), ids, table_copies)


@pytest.mark.parametrize("seed", seeds(15))
def test_tables_and_parameters_equal_those_on_the_host(seed: int) -> None:
    rng = random.Random(seed)
    open_blocks: dict[int, int] = {}
    num_copies = 0
    with pretended():
        staging = PackedStaging(PretendTransfers())
        slots = SlotTable(SlotTableSize(NUM_SLOTS, MAX_BLOCKS), DEVICE)
        assert slots.on_device is not None
        for _ in range(20):
            staging.begin()
            changes = random_changes(open_blocks, rng)
            num_copies += 0 if changes.copies is None else len(changes.copies.slots)
            slots.apply(changes, staging)
            chosen = np.array(rng.sample(range(1, NUM_SLOTS), 5), np.int32)
            num_blocks = rng.randint(1, MAX_BLOCKS)
            first_blocks = slots.first_blocks(chosen, num_blocks, staging)
            params = slots.device_params(slots.sampling[chosen], staging.to_device(chosen.astype(np.int64)), staging)
            staging.send()
            tables = on_host(slots.on_device.block_tables)
            for slot, count in open_blocks.items():
                assert slots.num_blocks[slot] == count
                assert tables[slot, :count].tolist() == slots.block_tables[slot, :count].tolist()
            assert torch.equal(on_host(first_blocks), tables[chosen, :num_blocks])
            is_open = np.isin(chosen, list(open_blocks))
            assert on_host(params).numpy()[is_open].tobytes() == slots.sampling[chosen][is_open].tobytes()
            staging.finish()
    assert num_copies > 20


def test_the_samples_of_a_request_are_copied_at_once() -> None:
    """Each sample copies from the one opened before it, as the manager sends them."""
    count = 100
    chain = TableCopies(np.arange(2, count + 2), np.arange(1, count + 1), np.full(count, 7))
    ((targets, sources, counts),) = copy_rounds(chain)
    assert targets.tolist() == list(range(2, count + 2))
    assert set(sources.tolist()) == {1}
    assert set(counts.tolist()) == {7}


def test_blocks_that_the_source_has_itself_are_copied_a_round_later() -> None:
    copies = TableCopies(int32([2, 3, 4]), int32([1, 2, 2]), int32([5, 4, 6]))
    first, second = copy_rounds(copies)
    assert [array.tolist() for array in first] == [[2, 3], [1, 1], [5, 4]]
    assert [array.tolist() for array in second] == [[4], [2], [6]]


@pytest.mark.parametrize(
    ("slots", "ids", "copies", "expected"),
    [
        ([3, 1], [7, 8], None, [8, -1, 7, -1]),
        ([3, 4], [7, 8], None, [-1, -1, -1, -1]),  # slot 4 is no row
        ([3, 3], [7, 8], None, [-1, -1, -1, -1]),  # the first is not the last block
        ([3], [7], TableCopies(int32([2]), int32([3]), int32([2])), [-1, -1, -1, -1]),
        ([], [], None, [-1, -1, -1, -1]),
    ],
)
def test_new_last_blocks_of_rows_are_stored_by_who_takes_them(
    slots: list[int], ids: list[int], copies: TableCopies | None, expected: list[int]
) -> None:
    """Rows of slots 1, 2, 3 and of padding, whose last blocks are their second ones."""
    table = SlotTable(SlotTableSize(6, 4), CPU)
    table.on_device = on_device = DeviceSlots(6, 4, CPU)
    first = np.arange(1, 6, dtype=np.int32)
    table.apply(SlotChanges(NOTHING, None, first, first + 20))
    staging = LateStaging()
    table.apply(SlotChanges(NOTHING, None, int32(slots), int32(ids), copies), staging)
    taken = on_device.take_appended(int32([1, 2, 3, 0]), int32([1, 1, 1, 0]))
    assert taken.tolist() == expected
    staging.launch()
    stored = {(slot, block) for slot, row in enumerate(on_device.block_tables.tolist()) for block in row if block < 20}
    stored -= {(slot, 0) for slot in range(6)}
    if (taken >= 0).any():
        assert stored == set()
    else:
        host = table.block_tables
        assert stored == {(slot, int(block)) for slot in range(6) for block in host[slot] if 0 < block < 20}
    assert (on_device.take_appended(int32([4]), int32([1])) == -1).all()


class LateStaging(DirectStaging):
    """Launches all work when it is asked to."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._work: list[Callable[[], object]] = []

    def then(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def launch(self) -> None:
        for work in self._work:
            work()
