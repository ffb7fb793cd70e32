"""Tests which sequences decode in a prefix group, step by step."""

import random
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options, with_flags
from tests.manager.helpers.requests import make_request, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation
from tests.manager.helpers.strategies import crowded_options_strategy, crowded_runs, crowding_shapes_strategy
from tokasaurus.manager.engine import engine
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.manager.kv_cache.prefix_tree import PrefixNode
from tokasaurus.manager.planning import prefix_groups
from tokasaurus.manager.state.engine_state import EngineState, HydragenOptions
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.status import HydragenCosts

Members = set[tuple[int, int]]
"""{(slot, admission number)}: each identifies a sequence from one admission until its preemption or end."""


def most_saved(state: EngineState, microbatch: int) -> int:
    """The most blocks of KV that groups of the microbatch's decoding sequences need not read, by a recursive search."""
    slots = state.queues.decoding().tolist()
    decoding = [state.slots.sequences[slot] for slot in slots if state.slots.microbatches[slot] == microbatch]

    def best(node: PrefixNode, saved_above: int) -> int:
        """The most that sequences at and below the node save; each may also join a group above, and then saves
        saved_above."""
        num_here = sum(sequence is not None and sequence.node is node for sequence in decoding)
        children = node.children.values()
        without = num_here * saved_above + sum(best(child, saved_above) for child in children)
        own = num_here * node.end_block + sum(best(child, node.end_block) for child in children) - node.end_block
        return max(own, without)

    return best(state.blocks.tree.root, 0)


def identity(state: EngineState, slot: int) -> tuple[int, int]:
    return slot, int(state.slots.admitted_at[slot])


class GroupingDriver(EngineDriver):
    """Compares the groups of every step with those last found, and what these save with a recursive search.

    num_checked: groups compared so far. num_optima: searches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.found: list[tuple[Members, int]] = []
        self.num_checked = self.num_optima = 0
        (task,) = (task for task in self.engine.tasks if task.name == "grouping")
        self.regroup, task.run = task.run, self.find_groups

    def find_groups(self, state: EngineState) -> None:
        self.regroup(state)
        options = self.options.hydragen
        assert options is not None
        self.found = []
        decode = state.queues.decoding()
        for number, num_blocks in enumerate(state.groups.num_blocks.tolist()[1:], start=1):
            slots = decode[state.slots.groups[decode] == number].tolist()
            assert len(slots) >= options.min_group_size
            assert len(set(state.slots.microbatches[slots].tolist())) == 1
            assert num_blocks >= options.min_blocks
            first, *others = (state.slots.block_tables[slot, :num_blocks].tolist() for slot in slots)
            assert all(other == first for other in others)
            self.found.append(({identity(state, slot) for slot in slots}, num_blocks))
        if (options.min_group_size, options.min_blocks) == (2, 1):
            most = sum(most_saved(state, microbatch) for microbatch in range(self.options.num_microbatches))
            assert sum((len(members) - 1) * num_blocks for members, num_blocks in self.found) == most
            self.num_optima += 1

    def send(self, message: ForwardInput) -> None:
        super().send(message)
        decode = [identity(self.state, slot) for slot in message.slots[: message.num_decode].tolist()]
        expected = [(sorted(members & set(decode)), num_blocks) for members, num_blocks in self.found]
        groups, rows = [], iter(decode)
        if message.groups is not None:
            sizes, num_blocks = message.groups.sizes.tolist(), message.groups.num_blocks.tolist()
            pairs = zip(sizes, num_blocks, strict=True)
            groups = [(sorted(next(rows) for _ in range(size)), count) for size, count in pairs]
        assert sorted(groups) == sorted(group for group in expected if group[0])
        self.num_checked += len(groups)


def test_every_step_uses_the_last_groups_minus_the_sequences_that_left():
    num_checked = num_preemptions = num_optima = 0

    @examples(150, 12)
    @given(
        hydragen=st.builds(HydragenOptions, st.sampled_from([2, 2, 3, 4]), st.sampled_from([1, 1, 2, 3])),
        **crowded_runs,
    )
    def check(shapes, options, hydragen, seed, cancel_share):
        nonlocal num_checked, num_preemptions, num_optima
        rng = random.Random(seed)
        driver = GroupingDriver(replace(options, hydragen=hydragen), forecast=EndsNext(), rng=rng)
        requests = make_requests(shapes, options.limits)
        driver.run(requests, {request.request_id for request in requests if rng.random() < cancel_share})
        assert_equals_simulation(driver.deltas, requests)
        num_checked += driver.num_checked
        num_optima += driver.num_optima
        num_preemptions += driver.state.totals.preemptions

    check()
    assert num_checked > (100 if IS_NIGHTLY else 20)
    assert num_optima > (20 if IS_NIGHTLY else 3)
    assert num_preemptions > (20 if IS_NIGHTLY else 3)


FEW_SHOTS = list(range(8))
QUESTIONS = [list(range(3, 17)), [4] * 14]
"""Blocks have 4 tokens: all prompts share 2 blocks, and prompts with the same question share 5."""


def ask(number: int, question: int, num_tokens: int) -> GenerateRequest:
    request = make_request(number, max_new_tokens=num_tokens, ignore_eos=True)
    return replace(request, prompt_ids=np.array(FEW_SHOTS + QUESTIONS[question], np.int32))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the clock: no work seems to take time, so grouping runs before a step is sent unless the mode defers it."""
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: 0.0))


def make_driver(
    mode: str = "always", min_group_size: int = 2, min_blocks: int = 1, steps_ahead: int = 2
) -> EngineDriver:
    options = make_options(
        100,
        max_tokens_per_forward=100,
        max_seqs_per_forward=8,
        scheduling_steps_ahead=steps_ahead,
        deferred_tasks=mode,
        hydragen=HydragenOptions(min_group_size, min_blocks),
    )
    return EngineDriver(options, step_seconds=(0.01,))


def groups_of_steps(driver: EngineDriver) -> list[tuple[list[tuple[set[int], int]], int]]:
    """(groups, number of consecutive steps with these groups), in order. A group: (request numbers, shared blocks).

    Slots are allocated in order, so a request's number is its slot until a preemption."""
    runs: list[tuple[list[tuple[set[int], int]], int]] = []
    for groups in driver.worker.grouped:
        named = sorted(((set(slots), count) for slots, count in groups), key=lambda group: min(group[0]))
        if runs and runs[-1][0] == named:
            runs[-1] = named, runs[-1][1] + 1
        else:
            runs.append((named, 1))
    return runs


def run_all(driver: EngineDriver, requests: Iterable[GenerateRequest]) -> None:
    requests = list(requests)
    driver.step(requests)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == len(requests)
    driver.assert_nothing_is_left()


FOUR_REQUESTS = [ask(1, 0, 40), ask(2, 0, 20), ask(3, 1, 30), ask(4, 1, 12)]


def test_the_last_sequences_of_two_groups_form_one_group_over_their_common_prefix():
    """The prefill and the first decode step are sent together, without groups; groups have at least two sequences."""
    driver = make_driver()
    run_all(driver, FOUR_REQUESTS)
    assert groups_of_steps(driver) == [
        ([], 2),
        ([({1, 2}, 5), ({3, 4}, 5)], 10),
        ([({1, 2}, 5)], 8),
        ([({1, 3}, 2)], 10),
        ([], 10),
    ]


@pytest.mark.parametrize(
    ("min_group_size", "min_blocks", "expected"),
    [
        (2, 3, [([], 2), ([({1, 2}, 5), ({3, 4}, 5)], 10), ([({1, 2}, 5)], 8), ([], 20)]),
        (2, 6, [([], 40)]),
        (3, 2, [([], 2), ([({1, 2, 3, 4}, 2)], 10), ([({1, 2, 3}, 2)], 8), ([], 20)]),
        (4, 1, [([], 2), ([({1, 2, 3, 4}, 2)], 10), ([], 28)]),
        (5, 1, [([], 40)]),
    ],
)
def test_groups_have_at_least_min_group_size_sequences_and_min_blocks_blocks(min_group_size, min_blocks, expected):
    driver = make_driver(min_group_size=min_group_size, min_blocks=min_blocks)
    run_all(driver, FOUR_REQUESTS)
    assert groups_of_steps(driver) == expected


def test_a_later_request_joins_the_group_of_its_question():
    driver = make_driver()
    requests = [ask(number, number // 3, 60) for number in (1, 2, 3, 4)]
    for request in requests:
        driver.step([request], 1)
        for _ in range(5):
            driver.step([], 1)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, requests)
    assert [groups for groups, _ in groups_of_steps(driver)] == [
        [],
        [({1, 2}, 5)],
        [({1, 2}, 5), ({3, 4}, 5)],
        [({3, 4}, 5)],
        [],
    ]


def test_a_cancelled_request_leaves_its_group_in_the_next_step():
    driver = make_driver()
    driver.step(FOUR_REQUESTS)
    for _ in range(5):
        driver.step([], 1)
    driver.step([CancelRequest("r1")], 1)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, FOUR_REQUESTS)
    assert [groups for groups, _ in groups_of_steps(driver)] == [
        [],
        [({1, 2}, 5), ({3, 4}, 5)],
        [({3, 4}, 5)],
        [({2, 3}, 2)],
        [],
    ]


def test_a_preempted_sequence_leaves_its_group_and_rejoins_it():
    """Of the tokens that it recomputes, the other sequences share only the prompt, so the group has the same prefix."""
    driver = make_driver()
    driver.step(FOUR_REQUESTS)
    for _ in range(5):
        driver.step([], 1)
    (sequence,) = driver.state.unfinished["r2"].sequences
    preempt(driver.state, sequence)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, FOUR_REQUESTS)
    assert [groups for groups, _ in groups_of_steps(driver)] == [
        [],
        [({1, 2}, 5), ({3, 4}, 5)],
        [({3, 4}, 5)],
        [({1, 2}, 5), ({3, 4}, 5)],
        [({1, 2}, 5)],
        [({1, 3}, 2)],
        [],
    ]


def test_while_grouping_is_deferred_new_sequences_decode_alone_and_groups_shrink():
    """Grouping is deferred for eight steps."""
    driver = make_driver("deferred")
    run_all(driver, FOUR_REQUESTS)
    assert groups_of_steps(driver) == [
        ([], 2 + 8),
        ([({1, 2}, 5), ({3, 4}, 5)], 2),
        ([({1, 2}, 5), ({3}, 5)], 8),
        ([({1, 3}, 2)], 10),
        ([({1}, 2)], 8),
        ([], 2),
    ]


def test_without_hydragen_options_no_sequence_is_in_a_group():
    driver = EngineDriver(make_options(100, max_seqs_per_forward=8))
    run_all(driver, FOUR_REQUESTS)
    assert groups_of_steps(driver) == [([], len(driver.worker.grouped))]


def test_many_questions_with_few_samples_form_one_group() -> None:
    """A group of two with the same question shares 3 blocks and saves 3; six sequences over 2 blocks save 10."""
    prompts = [FEW_SHOTS + [question] * 6 for question in (1, 1, 2, 2, 3, 3)]
    requests = [
        replace(ask(number, 0, 10), prompt_ids=np.array(prompt, np.int32))
        for number, prompt in enumerate(prompts, start=1)
    ]
    driver = make_driver()
    run_all(driver, requests)
    assert groups_of_steps(driver) == [([], 2), ([({1, 2, 3, 4, 5, 6}, 2)], 8)]


def test_costs_count_in_tokens() -> None:
    """Groups by question save 20 tokens each, one group 24; with 19 for each group the latter is better."""
    driver = make_driver()
    costs = HydragenCosts(per_group=19.0)
    driver = EngineDriver(replace(driver.options, hydragen=HydragenOptions(2, 1, costs)), step_seconds=(0.01,))
    run_all(driver, FOUR_REQUESTS)
    assert groups_of_steps(driver)[1] == ([({1, 2, 3, 4}, 2)], 10)


@examples(60)
@given(shapes=crowding_shapes_strategy, options=crowded_options_strategy, seed=st.integers(0, 2**32))
def test_trials_with_and_without_groups_change_no_token(shapes, options, seed):
    """The costs forbid groups where they save half of the reads, so both kinds of trials are made."""
    costs = HydragenCosts(per_group_token=1.0, per_row_token=0.5)
    hydragen = HydragenOptions(2, 1, costs, is_tried=True)
    driver = EngineDriver(replace(options, hydragen=hydragen, num_microbatches=1), rng=random.Random(seed))
    assert driver.state.groups.trials is not None
    driver.state.groups.trials.is_due = lambda: driver.rng.random() < 0.3
    requests = make_requests(shapes, options.limits)
    driver.run(requests)
    assert_equals_simulation(driver.deltas, requests)
    driver.assert_nothing_is_left()


class DriverWithTimes(EngineDriver):
    """Steps with prefix groups take grouped_s, others 10 ms."""

    grouped_s: float

    def step(self, messages=(), num_results=0):
        if num_results and self.queue:
            self.step_seconds = (0.01 if self.queue[0].groups is None else self.grouped_s,)
        return super().step(messages, min(1, num_results))


def grouped_in_service(monkeypatch: pytest.MonkeyPatch, costs: HydragenCosts, grouped_s: float) -> list[bool]:
    """Whether each step of four samples has groups, where such a step takes so long and another 0.01 s. costs: as
    measured at the start."""
    monkeypatch.setattr(prefix_groups, "FIRST_INTERVAL", 20)
    monkeypatch.setattr(prefix_groups, "MAX_INTERVAL", 100)
    options = replace(make_driver().options, hydragen=HydragenOptions(2, 1, costs, is_tried=True))
    options = replace(options, limits=replace(options.limits, num_kv_blocks=1000, max_tokens_per_sequence=1000))
    driver = DriverWithTimes(options)
    driver.grouped_s = grouped_s
    requests = [ask(number, 0, 900) for number in range(1, 5)]
    driver.step(requests)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, requests)
    return [bool(groups) for groups in driver.worker.grouped]


@pytest.mark.parametrize(
    ("costs", "grouped_s", "are_grouped"),
    [
        (HydragenCosts(), 0.013, False),  # groups seem to save, and take longer
        (HydragenCosts(per_row_token=1.2), 0.007, True),  # they seem never to save, and do
        (HydragenCosts(), 0.007, True),
        (HydragenCosts(per_row_token=1.2), 0.013, False),
    ],
)
def test_steps_in_service_decide_about_groups_whatever_was_measured(
    monkeypatch: pytest.MonkeyPatch, costs: HydragenCosts, grouped_s: float, are_grouped: bool
) -> None:
    with_groups = grouped_in_service(monkeypatch, costs, grouped_s)
    starts_grouped = costs == HydragenCosts()
    assert with_groups[10:20] == [starts_grouped] * 10
    assert sum(with_groups[20:150]) not in (0, 130), "some steps tried the other way"
    late = with_groups[400:890]
    assert late.count(not are_grouped) <= 490 // 100 + 1, "rare trials apart, the faster way"


class PricedDevice(EngineDriver):
    """Takes a second for each token that a decode row reads alone, and the costs for groups. Prompts take nothing."""

    device: HydragenCosts

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total_s = 0.0
        self.steps: list[tuple[int, bool, bool]] = []
        """(decode rows, whether there are prompts too, whether there are groups) of each step."""

    def send(self, message: ForwardInput) -> None:
        super().send(message)
        has_prefill = message.num_decode < len(message.slots)
        self.steps.append((message.num_decode, has_prefill, message.groups is not None))
        self.total_s += int(self.state.slots.num_kv_tokens[message.slots[: message.num_decode]].sum())
        if message.groups is not None:
            sizes, num_blocks = message.groups.sizes.tolist(), message.groups.num_blocks.tolist()
            self.total_s -= sum(
                self.device.saved(*pair) for pair in zip(sizes, [4 * n for n in num_blocks], strict=True)
            )
            self.total_s += 0.0 if has_prefill else self.device.per_step


def serve_priced(hydragen: HydragenOptions | None, device: HydragenCosts) -> PricedDevice:
    """Twelve requests with one prompt that end one after another; another prompt is computed while few are left."""
    limits = replace(make_driver().options.limits, num_kv_blocks=1000, max_tokens_per_sequence=1000)
    options = replace(make_driver().options, limits=limits, hydragen=hydragen)
    options = with_flags(options, max_seqs_per_forward=20)
    driver = PricedDevice(options, step_seconds=(0.01,))
    driver.device = device
    requests = [ask(number, 0, 10 * number) for number in range(1, 13)]
    driver.step(requests)
    while len(driver.running()) > 3:
        driver.step([], 1)
    late = replace(ask(13, 0, 1), prompt_ids=np.array([9] * 70, np.int32))
    driver.step([late], 1)
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, [*requests, late])
    driver.assert_nothing_is_left()
    return driver


def test_only_steps_whose_groups_save_more_than_a_step_with_groups_takes_have_some() -> None:
    """The prompt has 22 tokens, 20 of them in whole blocks: a group saves 20 for each row but one, and a step takes 90
    more. So six rows are few."""
    device = HydragenCosts(per_step=90.0)
    driver = serve_priced(HydragenOptions(2, 1, device), device)
    assert all(
        has_groups == (num_rows >= 6) for num_rows, has_prefill, has_groups in driver.steps[2:] if not has_prefill
    )
    assert {num_rows for num_rows, *_ in driver.steps} == set(range(13))
    assert (3, True, True) in driver.steps, "a step with a prompt has no graph, and so no price"
    unpriced = serve_priced(HydragenOptions(2, 1, replace(device, per_step=0.0)), device)
    assert all(has_groups for num_rows, _, has_groups in unpriced.steps[2:] if num_rows >= 2)
    assert driver.total_s < min(unpriced.total_s, serve_priced(None, device).total_s)


@pytest.mark.parametrize("per_step", [0.0, 30.0, 90.0, 150.0, 400.0])
def test_groups_never_make_the_steps_of_a_priced_device_longer(per_step: float) -> None:
    device = HydragenCosts(per_group=5.0, per_row=1.0, per_row_token=0.1, per_step=per_step)
    driver, never = serve_priced(HydragenOptions(2, 1, device), device), serve_priced(None, device)
    assert driver.total_s <= never.total_s
    decode_steps = [has_groups for _, has_prefill, has_groups in driver.steps if not has_prefill]
    assert any(decode_steps) is (per_step < 400.0)


def test_prompt_tokens_count_as_shared_only_in_steps_that_have_groups() -> None:
    device = HydragenCosts(per_step=1e6)
    limits = replace(make_driver().options.limits, num_kv_blocks=1000)
    options = replace(make_driver().options, limits=limits, hydragen=HydragenOptions(2, 1, device))
    driver = EngineDriver(options, step_seconds=(0.01,))
    run_all(driver, FOUR_REQUESTS)
    assert not any(driver.worker.grouped)
    assert driver.state.stats().total_shared_prompt_tokens == 0


@pytest.mark.parametrize(("grouped_s", "are_grouped"), [(0.007, True), (0.013, False)])
def test_steps_in_service_correct_the_price_of_a_step_too(
    monkeypatch: pytest.MonkeyPatch, grouped_s: float, are_grouped: bool
) -> None:
    """Four rows that save 60 tokens seem not to repay 100."""
    with_groups = grouped_in_service(monkeypatch, HydragenCosts(per_step=100.0), grouped_s)
    assert not any(with_groups[:20])
    assert any(with_groups[20:150]), "trials"
    assert with_groups[400:890].count(not are_grouped) <= 490 // 100 + 1
