"""What is counted of each sequence and in total, against what the worker was really sent."""

import random
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.engine.test_engine import (
    crowded_options_strategy,
    crowding_shapes_strategy,
    options_strategy,
    shapes_strategy,
)
from tests.manager.helpers.engine_driver import Bench, EndsNext, assert_equals_simulation, make_options, make_requests
from tests.manager.helpers.fake_worker import FakeWorker, make_request, simulate
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions
from tokasaurus.manager.state.sequence import Sequence, TokenCounts
from tokasaurus.messages.generation import CancelRequest


def key_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.sampling.seed, sequence.index


def counts_by_hand(worker: FakeWorker, sequence: Sequence) -> TokenCounts:
    """Position by position, through all stays of the sequence at the worker."""
    counts = TokenCounts()
    num_prompt_tokens = len(sequence.request.prompt_ids)
    had: set[int] = set()
    for start, end in worker.stays.get(key_of(sequence), []):
        counts.asked = num_prompt_tokens
        for position in range(end):
            if position >= start and position in had:
                counts.recomputed += 1
            elif position not in had and position < num_prompt_tokens:
                counts.cached += position < start
                counts.computed += position >= start
            had.add(position)
    longest = worker.longest_prefixes.get(key_of(sequence), 0) * worker.limits.page_size
    counts.shared = min(longest, num_prompt_tokens)
    return counts


def total(counts: list[TokenCounts]) -> TokenCounts:
    return TokenCounts(*(sum(column) for column in zip(*(asdict(one).values() for one in counts), strict=True)))


@dataclass
class CountingBench(Bench):
    """sequences: all that ever came and were not cancelled in the turn in which they did."""

    sequences: dict[Sequence, None] = field(default_factory=dict)

    def turn(self, messages=(), num_results=0):
        deltas = super().turn(messages, num_results)
        for siblings in self.state.unfinished.values():
            self.sequences.update(siblings)
        totals, summed = asdict(self.state.totals.tokens), asdict(total([one.counts for one in self.sequences]))
        running = [one for one in self.running() if one.is_open]
        slots = [one.slot for one in running]
        summed["shared"] += int(self.state.slots.num_shared_tokens[slots].sum()) - sum(
            one.counts.shared for one in running
        )
        assert not self.sequences or totals == summed, "in the midst of all"
        return deltas


def check_counts(bench: CountingBench) -> TokenCounts:
    """When all is done. Gives the totals."""
    expected = {sequence: counts_by_hand(bench.worker, sequence) for sequence in bench.sequences}
    assert {sequence: sequence.counts for sequence in bench.sequences} == expected
    totals = bench.state.totals.tokens
    assert totals == total(list(expected.values()))
    stats = bench.state.stats()
    assert totals == TokenCounts(
        stats.total_asked_prompt_tokens,
        stats.total_prefix_cache_hit_tokens,
        stats.total_computed_prompt_tokens,
        stats.total_recomputed_tokens,
        stats.total_shared_prompt_tokens,
    )
    by_key = {(sequence.request.request_id, sequence.index): counts for sequence, counts in expected.items()}
    for delta in bench.deltas:
        counts = by_key[delta.request_id, delta.sequence_index]
        assert counts.asked == counts.cached + counts.computed
        assert (delta.num_computed_tokens, delta.num_recomputed_tokens, delta.num_shared_tokens) == (
            counts.computed,
            counts.recomputed,
            counts.shared,
        )
    return totals


def run_and_check(shapes, options: EngineOptions, seed: int, cancel_share: float, forecast=None) -> CountingBench:
    rng = random.Random(seed)
    bench = CountingBench(options, forecast=forecast, rng=rng)
    requests = make_requests(shapes, options.limits)
    bench.run(requests, {request.request_id for request in requests if rng.random() < cancel_share}, check_share=0)
    bench.turn()
    assert_equals_simulation(bench.deltas, requests)
    check_counts(bench)
    return bench


@settings(max_examples=120)
@given(
    shapes=shapes_strategy,
    options=options_strategy,
    seed=st.integers(0, 2**32),
    cancel_share=st.sampled_from([0.0, 0.3]),
)
def test_counts_are_what_the_worker_was_sent(shapes, options, seed, cancel_share):
    run_and_check(shapes, options, seed, cancel_share)


def test_counts_are_what_the_worker_was_sent_under_constant_preemption():
    seen = TokenCounts()

    @settings(max_examples=200)
    @given(
        shapes=crowding_shapes_strategy,
        options=crowded_options_strategy,
        seed=st.integers(0, 2**32),
        cancel_share=st.sampled_from([0.0, 0.3]),
    )
    def check(shapes, options, seed, cancel_share):
        nonlocal seen
        bench = run_and_check(shapes, options, seed, cancel_share, EndsNext())
        seen = total([seen, bench.state.totals.tokens])

    check()
    assert min(asdict(seen).values()) > 1000


def test_samples_of_one_prompt_read_and_share_what_the_first_computed():
    """23 prompt tokens in blocks of 4: the first sample computes all, the others read 5 blocks of them. All decode in
    one group, whose prefix is these 5 blocks."""
    options = make_options(60, max_seqs_per_forward=8, max_tokens_per_forward=100, hydragen=HydragenOptions(2, 1))
    bench = CountingBench(options)
    bench.turn([make_request(1, 23, 3, 12, ignore_eos=True)])
    bench.run_until_idle()
    assert check_counts(bench) == TokenCounts(asked=69, cached=40, computed=23 + 3 + 3, recomputed=0, shared=60)
    assert bench.state.stats().total_prompt_tokens == 23


@pytest.mark.parametrize(
    ("num_steps_deferred", "counts"),
    [
        (0, TokenCounts(asked=0)),
        (1, TokenCounts(asked=30, computed=10)),
        (2, TokenCounts(asked=30, computed=20)),
        (9, TokenCounts(asked=30, computed=30)),
    ],
)
def test_of_a_cancelled_request_what_was_done_counts(num_steps_deferred, counts):
    """Prompts of 30 tokens in steps of 10, one in flight at a time."""
    bench = CountingBench(make_options(60, max_tokens_per_forward=10, max_steps_ahead=1), (0.01,))
    request = make_request(1, 30, 1, 20, ignore_eos=True)
    if num_steps_deferred == 0:
        bench.turn([request, CancelRequest("r1")])
    else:
        bench.turn([request])
        for _ in range(num_steps_deferred - 1):
            bench.turn([], 1)
        bench.turn([CancelRequest("r1")])
    bench.run_until_idle()
    assert check_counts(bench) == counts if num_steps_deferred else bench.state.totals.tokens == counts


def test_what_a_decode_step_in_flight_had_computed_is_computed_again():
    """Of a prompt of 7 tokens and one decode step, whose results are lost, one block of 4 is kept."""
    bench = CountingBench(make_options(60, max_tokens_per_forward=10, max_steps_ahead=2))
    bench.turn([make_request(1, 7, 1, 20, ignore_eos=True)])
    (sequence,) = bench.running()
    assert bench.state.slots.num_kv_tokens[sequence.slot] == 8
    preempt(bench.state, sequence)
    bench.run_until_idle()
    assert check_counts(bench) == TokenCounts(asked=7, computed=7, recomputed=4)


def test_who_is_preempted_again_before_its_prompt_is_through_counts_what_it_did():
    """A prompt of 7 tokens in steps of 2: it loses the result of the first decode step, comes back for one step, and
    again. Each time it keeps one block of 4."""
    bench = CountingBench(make_options(60, max_tokens_per_forward=2, max_steps_ahead=2))
    bench.turn([make_request(1, 7, 1, 20, ignore_eos=True)])
    (sequence,) = bench.running()
    for num_kv_tokens in (8, 6):
        while not sequence.is_open or bench.state.slots.num_kv_tokens[sequence.slot] < num_kv_tokens:
            bench.turn([], 1)
        preempt(bench.state, sequence)
    bench.run_until_idle()
    assert bench.worker.stays[1, 0] == [[0, 8], [4, 6], [4, 26]]
    assert check_counts(bench) == TokenCounts(asked=7, computed=7, recomputed=2 + 4)


def test_what_is_found_cached_on_return_to_a_prompt_half_way_is_read():
    """A prompt of 26 tokens begins with the 6 and the answer of one that still decodes: it reads one block of 4,
    computes a chunk of 9, and is preempted. When it comes back the other has left 6 blocks."""
    bench = CountingBench(make_options(60, max_tokens_per_forward=10, max_steps_ahead=1), (0.01,))
    before = make_request(1, 6, 1, 40, ignore_eos=True)
    prompt_ids = np.array([*before.prompt_ids.tolist(), *simulate(before, 0)[0][:20]], np.int32)
    bench.turn([before])
    for _ in range(25):
        bench.turn([], 1)
    bench.turn([replace(make_request(2, 1, 1, 5, ignore_eos=True), prompt_ids=prompt_ids)])
    (sequence,) = bench.state.unfinished["r2"]
    while not sequence.is_open:
        bench.turn([], 1)
    preempt(bench.state, sequence)
    bench.turn([CancelRequest("r1")])
    bench.run_until_idle()
    check_counts(bench)
    assert bench.worker.stays[2, 0] == [[4, 13], [24, 30]]
    assert sequence.counts == TokenCounts(asked=26, cached=4 + 11, computed=9 + 2)
    assert [delta.num_cached_tokens for delta in bench.deltas] == [4], "as it was when it first started"
