"""Block lists built on a device, against the tables that a CPU gets."""

import pytest
from hypothesis import given

from tests.helpers.examples import examples
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, on_host, pretended
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, CaseStep, cases
from tokasaurus.model.attention.backend import PagedLayout, PagedPart
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.staging.packed import PackedStaging
from tokasaurus.model.staging.staging import ON_HOST


def parts_of(layout: PagedLayout) -> list[PagedPart]:
    return [*layout.parts, *([] if layout.prefix is None else [layout.prefix])]


def check_lists(on_device: PagedPart, expected: PagedPart, page_size: int) -> None:
    lists, table = on_device.lists, expected.block_table
    assert lists is not None
    assert table is not None
    assert on_device.block_table is None
    for tensor, host_tensor in (
        (lists.query_starts, expected.query_starts),
        (lists.kv_lengths, expected.kv_lengths),
        (lists.starts, lists.host_starts),
    ):
        assert on_host(tensor).tolist() == host_tensor.tolist()
    starts, last_lengths, blocks = (on_host(x).tolist() for x in (lists.starts, lists.last_lengths, lists.blocks))
    assert starts[0] == 0
    assert starts[-1] == len(blocks)
    for segment, kv_length in enumerate(expected.kv_lengths.tolist()):
        own = blocks[starts[segment] : starts[segment + 1]]
        assert own == table[segment, : len(own)].tolist()
        assert (len(own) - 1) * page_size + last_lengths[segment] == kv_length
        assert 1 <= last_lengths[segment] <= page_size


def check_case(case: Case) -> None:
    made = CaseStep(case)
    expected = build_batch(made.step, made.slots, case.page_size, ON_HOST)
    with pretended():
        staging = PackedStaging(PretendTransfers())
        num_slots, max_blocks = made.slots.block_tables.shape
        slots = SlotTable(SlotTableSize(num_slots, max_blocks), DEVICE)
        slots.rules.allocate(made.num_blocks * case.page_size)
        staging.begin()
        slots.apply(made.step.changes, staging)
        batch = build_batch(made.step, slots, case.page_size, staging)
        staging.send()
        assert on_host(batch.layout.kv_indices).tolist() == expected.layout.kv_indices.tolist()
        for part, host_part in zip(parts_of(batch.layout), parts_of(expected.layout), strict=True):
            same = ("first_row", "num_rows", "causal", "is_partial")
            assert [getattr(part, name) for name in same] == [getattr(host_part, name) for name in same]
            check_lists(part, host_part, case.page_size)


@pytest.mark.parametrize("case", NAMED_CASES)
def test_block_lists_of_named_cases(case: Case) -> None:
    check_case(case)


@examples(60)
@given(case=cases([16, 1, 5, 32]))
def test_block_lists_have_the_blocks_of_each_segment(case: Case) -> None:
    check_case(case)
