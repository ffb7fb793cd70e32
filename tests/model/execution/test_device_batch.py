"""The row counts to which batches are padded, and block lists built on a device against the tables that a CPU gets."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from torch import Tensor

from tests.helpers.examples import examples
from tests.helpers.tiny_model import save_tiny_model
from tests.model.execution.helpers.launch_tape import LaunchTape
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, on_host, pretended
from tests.model.helpers.row_split_cases import NAMED_CASES, Case, CaseStep, cases
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.model.attention.backend import PagedLayout, PagedPart
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.buffer_sizes import padded_count
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.packed_layers import PackedLayers
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.staging.packed import PackedStaging
from tokasaurus.model.staging.staging import ON_HOST


def test_padding_adds_at_most_a_sixteenth_and_leaves_few_counts() -> None:
    padded = [padded_count(count) for count in range(8193)]
    assert padded[:17] == list(range(17))
    assert padded == sorted(padded)
    for count, result in enumerate(padded):
        assert count <= result <= count + count / 16
        assert padded_count(result) == result
    # 0, 16 exact counts, then 16 for each of the 9 doublings up to 8,192.
    assert len(set(padded)) == 161


@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_padding_to_a_multiple_adds_less_than_one_multiple(multiple: int) -> None:
    for count in range(1, 8193):
        result = padded_count(count, multiple)
        assert result % multiple == 0
        assert padded_count(count) <= result < padded_count(count) + multiple


def test_gemms_have_only_padded_row_counts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    counts: set[int] = set()
    for linear in (model.layers[0].mlp.gate_up, model.lm_head):
        linear.register_forward_hook(lambda _module, inputs, _output: counts.add(inputs[0].shape[0]))
    driver = StepDriver(make_runner(model, info, "torch", num_blocks=600), num_blocks=600)
    rng = random.Random(0)
    prompt_lengths: set[int] = set()
    for slot in range(1, 21):
        prompt = [1] * rng.randint(17, 400)
        driver.open(slot, prompt, num_prompt_top=1 if slot % 2 else None)
        prompt_lengths.add(len(prompt))
        driver.run([], [(slot, len(prompt))])
        driver.run(list(range(1, slot + 1)), [])
    assert counts <= {padded_count(count) for count in range(1, 401)}
    assert not prompt_lengths <= counts, "most prompt lengths are not padded counts"


@pytest.mark.parametrize("has_graphs", [False, True])
def test_keys_and_values_are_stored_in_the_rows_blocks_and_those_of_padding_in_the_padding_block(
    has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kv index is below 0: plain torch would count it from the cache's end. Prompts, decode rows, prefixes that are
    shared and in part computed again, and steps padded to a count or to a graph."""
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, "torch")
    if has_graphs:
        runner.record_graphs(LaunchTape(), [16, 8], chunk_sizes=[50, 30])
    driver, rng = StepDriver(runner), random.Random(0)
    planned: list[Tensor] = []
    plan = TorchBackend.plan

    def noted(backend: TorchBackend, layout: PagedLayout) -> None:
        planned.append(layout.kv_indices)
        plan(backend, layout)

    monkeypatch.setattr(TorchBackend, "plan", noted)
    num_padding = 0
    for slot in range(1, 12):
        prompt = [1] * rng.randint(33, 60)
        shares = None if slot % 3 else (slot - 1, 2)
        driver.open(slot, prompt, shares=shares, num_recomputed=0 if shares is None else 7)
        before = list(range(1, slot))
        for decode, prefill in ((before, [(slot, driver.remaining(slot))]), ([*before, slot], [])):
            planned.clear()
            with one_thread():
                driver.run(decode, prefill)
            (kv_indices,) = planned
            count = len(decode) + sum(count for _, count in prefill)
            own = {block for row in (*decode, slot) for block in driver._tables[row]}
            assert all(index // 16 in own | {0} for index in kv_indices[:count].tolist())
            assert (kv_indices[:count] < 16).sum() == (7 if prefill and shares else 0), "tokens that are cached already"
            assert ((kv_indices[count:] >= 0) & (kv_indices[count:] < 16)).all()
            num_padding += len(kv_indices) - count
    assert num_padding > 5


def test_forwards_of_the_kernels_are_not_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    model.pack(load_kernels())
    counts: list[int] = []
    run = PackedLayers.run

    def run_counted(layers: PackedLayers, hidden: Tensor, *others: Any) -> None:
        counts.append(len(hidden))
        run(layers, hidden, *others)

    monkeypatch.setattr(PackedLayers, "run", run_counted)
    driver = StepDriver(make_runner(model, info, "cpu", num_blocks=600), num_blocks=600)
    for slot, length in enumerate((17, 1, 35, 129), start=1):
        driver.open(slot, [1] * length)
        driver.run([], [(slot, length)])
    assert counts == [17, 1, 35, 129]


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
