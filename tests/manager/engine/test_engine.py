"""The whole manager against a worker that checks every message, and against token-by-token simulation."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.block_accounting import assert_each_block_has_one_place, block_table
from tests.manager.helpers.engine_driver import (
    NEVER_LEARNS,
    Bench,
    EndsNext,
    Shape,
    assert_equals_simulation,
    make_options,
    make_requests,
    sequence_keys,
)
from tests.manager.helpers.fake_worker import VOCAB_SIZE, decode_text, make_request, simulate
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.planning.length_predictor import Forecast
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions, LengthPredictorOptions
from tokasaurus.manager.state.sequence import Phase, Sequence
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.text.stop_strings import StopTokens

STOP_TOKENS = StopTokens([decode_text([token_id]) for token_id in range(VOCAB_SIZE)])
STOP_STRINGS = [(), (), ("ab",), ("éa", "cc"), ("abc", "bcab", "é"), ("abababab", "b")]

varied_fields = {
    "want_logprobs": st.booleans(),
    "cache_salt": st.sampled_from(["", "", "x"]),
    "stop_token_ids": st.sampled_from([(), (), (3,), (9, 2, 5)]),
    "min_tokens": st.sampled_from([0, 0, 1, 6, 30]),
    "prompt_top": st.sampled_from([None, None, None, 0, 2, 5]),
}

shapes_strategy = st.lists(
    st.builds(
        Shape,
        prefix=st.integers(-3, 2),
        num_shared=st.integers(0, 40),
        num_fresh=st.integers(0, 12),
        num_sequences=st.integers(1, 4),
        max_new_tokens=st.integers(1, 24),
        stop_strings=st.sampled_from(STOP_STRINGS),
        ignore_eos=st.booleans(),
        **varied_fields,
    ),
    min_size=1,
    max_size=10,
)

crowding_shapes_strategy = st.lists(
    st.builds(
        Shape,
        prefix=st.integers(-3, 1),
        num_shared=st.integers(0, 20),
        num_fresh=st.integers(0, 8),
        num_sequences=st.integers(2, 4),
        max_new_tokens=st.integers(8, 36),
        stop_strings=st.sampled_from([(), *STOP_STRINGS]),
        ignore_eos=st.just(False),
        **varied_fields,
    ),
    min_size=3,
    max_size=8,
)

varied_options = {
    "max_steps_ahead": st.sampled_from([1, 2, 3, 8]),
    "prefill_multiple": st.sampled_from([None, 1, 4]),
    "onboard_batch_size": st.sampled_from([None, 1, 2, 128]),
    "deferred_tasks": st.sampled_from([None, "always", "deferred"]),
    "stop_tokens": st.sampled_from([None, STOP_TOKENS]),
    "hydragen": st.sampled_from([None, HydragenOptions(2, 1), HydragenOptions(3, 2)]),
}

options_strategy = st.builds(
    make_options,
    num_blocks=st.integers(16, 60),
    page_size=st.sampled_from([4, 7]),
    max_tokens_per_forward=st.integers(1, 40),
    max_seqs_per_forward=st.integers(1, 12),
    early_stopping=st.sampled_from([None, NEVER_LEARNS, LengthPredictorOptions(initial_wait=2)]),
    target_utilization=st.sampled_from([1.0, 0.5]),
    **varied_options,
)

crowded_options_strategy = st.builds(
    make_options,
    num_blocks=st.integers(14, 24),
    page_size=st.sampled_from([4, 5]),
    max_tokens_per_forward=st.integers(8, 60),
    max_seqs_per_forward=st.integers(4, 16),
    early_stopping=st.just(NEVER_LEARNS),
    **varied_options,
)


def check_run(
    shapes: list[Shape],
    options: EngineOptions,
    seed: int,
    cancel_share: float,
    forecast: Forecast | None = None,
) -> Bench:
    """Drive random requests to their end, some of them cancelled, and compare all that comes out."""
    rng = random.Random(seed)
    bench = Bench(options, forecast=forecast, rng=rng)
    requests = make_requests(shapes, options.limits)
    cancelled = {request.request_id for request in requests if rng.random() < cancel_share}
    bench.run(requests, cancelled)

    assert_equals_simulation(bench.deltas, requests)
    finished = {(delta.request_id, delta.sequence_index) for delta in bench.deltas}
    for request in requests:
        for index in range(request.num_sequences):
            assert (request.request_id, index) in finished or request.request_id in cancelled
    for delta in bench.deltas:
        key = int(delta.request_id[1:]), delta.sequence_index
        assert delta.num_cached_tokens == bench.worker.first_positions[key]
    num_returned = sum(len(delta.token_ids) for delta in bench.deltas)
    stats = bench.state.stats()
    if cancelled:
        assert stats.total_generation_tokens >= num_returned
    else:
        assert stats.total_generation_tokens == num_returned
        assert stats.total_prompt_tokens == sum(len(request.prompt_ids) for request in requests)
        # Also tokens found when a sequence preempted during its prefill starts again, which its own count leaves out.
        num_asked = sum(len(request.prompt_ids) * request.num_sequences for request in requests)
        assert stats.total_prefix_cache_hit_tokens == num_asked - sum(d.num_computed_tokens for d in bench.deltas)
    for reader, writer in bench.worker.read_from:
        assert requests[reader].cache_salt == requests[writer].cache_salt
    first_openings = list(dict.fromkeys(bench.worker.opened))
    order = [key for key in sequence_keys(requests) if key in first_openings]
    assert first_openings == order, "first come first served"
    bench.assert_nothing_is_left()
    return bench


@settings(max_examples=250)
@given(
    shapes=shapes_strategy,
    options=options_strategy,
    seed=st.integers(0, 2**32),
    cancel_share=st.sampled_from([0.0, 0.3]),
)
def test_every_sequence_equals_its_simulation_and_nothing_is_left(shapes, options, seed, cancel_share):
    check_run(shapes, options, seed, cancel_share)


def test_every_sequence_equals_its_simulation_under_constant_preemption():
    num_preemptions = num_groups = 0

    @settings(max_examples=250)
    @given(
        shapes=crowding_shapes_strategy,
        options=crowded_options_strategy,
        seed=st.integers(0, 2**32),
        cancel_share=st.sampled_from([0.0, 0.3]),
    )
    def check(shapes, options, seed, cancel_share):
        nonlocal num_preemptions, num_groups
        bench = check_run(shapes, options, seed, cancel_share, EndsNext())
        num_preemptions += bench.state.totals.preemptions
        num_groups += sum(map(len, bench.worker.grouped))

    check()
    assert num_preemptions > 500
    assert num_groups > 500


def shares_with_one_to_come(bench: Bench, sequence: Sequence) -> bool:
    """Whether it is half-way through blocks that the prompt of another request will begin with."""
    others = [other for other in bench.running() if other.request is not sequence.request and not other.is_open]
    is_half_way = sequence.phase is Phase.PREFILL and sequence.is_open
    return is_half_way and any(other.node is sequence.node for other in others)


def is_in_situation(bench: Bench, sequence: Sequence, situation: str) -> bool:
    is_new = sequence.num_cached_tokens is None
    return {
        "waiting": sequence.phase is Phase.WAITING and is_new,
        "admitted and unknown to the worker": sequence.phase is Phase.PREFILL and is_new,
        "half-way through what others share": shares_with_one_to_come(bench, sequence),
        "decoding": sequence.phase is Phase.DECODE,
        "waiting for its last results": sequence.phase is Phase.DRAINING,
        "put back": sequence.phase is Phase.WAITING and not is_new,
    }[situation]


SITUATIONS = [
    "waiting",
    "admitted and unknown to the worker",
    "half-way through what others share",
    "decoding",
    "waiting for its last results",
    "put back",
]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_whoever_is_cancelled_in_any_situation_harms_nobody(situation):
    num_cancelled = 0
    for seed in range(60):
        rng = random.Random(seed)
        options = make_options(
            24, max_tokens_per_forward=9, max_seqs_per_forward=9, early_stopping=NEVER_LEARNS, onboard_batch_size=8
        )
        bench = Bench(options, forecast=EndsNext(), rng=rng)
        requests = make_requests(
            [Shape(0, rng.choice([12, 20, 24]), rng.choice([0, 0, 3]), 2, 16, (), False, True) for _ in range(6)],
            options.limits,
        )
        unsent, cancelled = list(requests), set()
        while unsent or bench.queue:
            bench.turn([unsent.pop(0) for _ in range(rng.randint(0, 3)) if unsent], rng.randint(0, 2))
            sequences = [sequence for siblings in bench.state.unfinished.values() for sequence in siblings]
            there = [sequence for sequence in sequences if is_in_situation(bench, sequence, situation)]
            if there and not cancelled and rng.random() < 0.5:
                request_id = rng.choice(there).request.request_id
                cancelled.add(request_id)
                bench.turn([CancelRequest(request_id), CancelRequest("never seen"), CancelRequest(request_id)])
                assert request_id not in bench.state.unfinished
                assert_each_block_has_one_place(bench.state)
        bench.turn([CancelRequest(request.request_id) for request in requests])
        assert_equals_simulation(bench.deltas, requests)
        others = [request for request in requests if request.request_id not in cancelled]
        finished = {(delta.request_id, delta.sequence_index) for delta in bench.deltas}
        assert finished >= {(request.request_id, index) for request in others for index in range(2)}
        bench.assert_nothing_is_left()
        num_cancelled += len(cancelled)
    assert num_cancelled >= 20


@pytest.mark.parametrize("step_seconds", [0.0001, 0.01])
def test_look_ahead_changes_no_token(step_seconds):
    requests = [make_request(n, 3 + 5 * n, 3, 20, ("abc",) if n % 2 else ()) for n in range(6)]
    results = []
    for max_steps_ahead in (1, 8):
        bench = Bench(make_options(max_steps_ahead=max_steps_ahead), (step_seconds,))
        bench.turn(requests)
        bench.run_until_idle()
        results.append({(delta.request_id, delta.sequence_index): delta.token_ids for delta in bench.deltas})
        assert (
            bench.most_in_flight
            == {(1, 0.0001): 1, (1, 0.01): 1, (8, 0.0001): 8, (8, 0.01): 4}[max_steps_ahead, step_seconds]
        )
    assert results[0] == results[1]
    assert len(results[0]) == 18


@pytest.mark.parametrize("turns_before", range(12))
def test_a_cancelled_request_frees_its_slots_and_blocks_in_the_same_turn(turns_before):
    kept = make_request(1, 30, 1, 16, ignore_eos=True)
    gone = make_request(2, 30, 2, 12, ignore_eos=True)
    bench = Bench(make_options(30))
    bench.turn([kept, gone])
    for _ in range(turns_before):
        bench.turn([], 1)
    bench.turn([CancelRequest("r2")])
    assert list(bench.state.unfinished) == ["r1"]
    (sequence,) = bench.running()
    assert sequence.request is kept
    assert bench.state.stats().num_kv_blocks_used == len(block_table(bench.state, sequence))
    bench.run_until_idle()
    assert_equals_simulation(bench.deltas, [kept])
    assert len(bench.deltas) == 1
    bench.assert_nothing_is_left()


def test_all_prompts_and_decodes_share_the_steps():
    """A long prompt does not stop the others from decoding, and takes no more steps than its tokens need."""
    bench = Bench(make_options(60, max_tokens_per_forward=10, max_steps_ahead=1))
    short = make_request(1, 4, 1, 30, ignore_eos=True)
    long = make_request(2, 90, 1, 1, ignore_eos=True)
    bench.turn([short])
    bench.turn([long], 1)
    while not all(sequence.is_open for sequence in bench.running()):
        bench.turn([], 1)
    first, second = (sequence for siblings in bench.state.unfinished.values() for sequence in siblings)
    num_before = len(sampled_tokens(bench.state, first))
    num_steps_deferred = 0
    while second.phase is not Phase.FINISHED:
        bench.turn([], 1)
        num_steps_deferred += 1
    assert num_steps_deferred == 10, "90 prompt tokens, 9 in each step beside the one that decodes"
    assert len(sampled_tokens(bench.state, first)) == num_before + num_steps_deferred


def test_a_stop_at_the_last_allowed_token_is_a_stop():
    for number in range(200):
        request = make_request(number, max_new_tokens=64)
        token_ids, _, finish_reason = simulate(request, 0)
        if finish_reason == "stop" and len(token_ids) > 1:
            break
    exact = make_request(number, max_new_tokens=len(token_ids))
    shorter = make_request(number, max_new_tokens=len(token_ids) - 1)
    for request, reason in ((exact, "stop"), (shorter, "length")):
        bench = Bench()
        bench.turn([request])
        bench.run_until_idle()
        assert [delta.finish_reason for delta in bench.deltas] == [reason]
