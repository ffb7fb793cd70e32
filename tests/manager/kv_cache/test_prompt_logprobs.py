"""Prompt logprobs are right, whatever happens to their sequence, and are not computed again where they are cached."""

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.manager.helpers.engine_driver import NEVER_LEARNS, EndsNext, EngineDriver, make_options
from tests.manager.helpers.fake_grammars import VOCAB_SIZE
from tests.manager.helpers.requests import Shape, make_request, make_requests, sequence_keys, streamed
from tests.manager.helpers.simulation import assert_equals_simulation, join
from tests.manager.helpers.strategies import random_shape
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobStore
from tokasaurus.manager.state.engine_state import HydragenOptions
from tokasaurus.manager.state.sequence import Phase
from tokasaurus.messages.generation import CancelRequest, GenerateRequest

PAGE_SIZE = 4


def with_prompt_logprobs(request: GenerateRequest, num_top: int = 0) -> GenerateRequest:
    return dataclasses.replace(request, want_prompt_logprobs=True, num_top_prompt_logprobs=num_top)


crowding_shapes_strategy = st.lists(
    st.tuples(
        random_shape(
            num_sequences=st.integers(2, 4),
            max_new_tokens=st.sampled_from([0, 16, 24, 36]),
            stop_strings=st.sampled_from([(), ("ab",)]),
            ignore_eos=st.just(False),
            want_logprobs=st.booleans(),
            prompt_top=st.sampled_from([None, 0, 2, 5]),
        ),
        st.booleans(),
    ),
    min_size=4,
    max_size=9,
)


def test_prompt_logprobs_are_right_under_preemption_cancelling_and_streaming():
    num_preempted = num_preempted_in_prefill = 0

    @examples(120, 30)
    @given(
        shapes=crowding_shapes_strategy,
        num_blocks=st.integers(14, 24),
        page_size=st.sampled_from([4, 5]),
        max_tokens=st.integers(3, 12),
        steps_ahead=st.sampled_from([1, 3, 8]),
        mode=st.sampled_from([None, "always", "deferred"]),
        cancel_share=st.sampled_from([0.0, 0.3]),
        num_microbatches=st.sampled_from([1, 1, 2, 5]),
        seed=st.integers(0, 1000),
    )
    def check(shapes, num_blocks, page_size, max_tokens, steps_ahead, mode, cancel_share, num_microbatches, seed):
        nonlocal num_preempted, num_preempted_in_prefill
        options = make_options(
            num_blocks,
            page_size,
            max_tokens_per_forward=max_tokens,
            max_seqs_per_forward=12,
            scheduling_steps_ahead=steps_ahead,
            deferred_tasks=mode,
            num_microbatches=num_microbatches,
            pp_size=max(1, num_microbatches - 1),
            **NEVER_LEARNS,
            hydragen=HydragenOptions(2, 1) if seed % 2 else None,
        )
        requests = make_requests([shape for shape, _ in shapes], options.limits)
        requests = [
            streamed(request) if is_streamed else request
            for request, (_, is_streamed) in zip(requests, shapes, strict=True)
        ]
        driver = EngineDriver(options, forecast=EndsNext(), rng=random.Random(seed))
        cancelled = {request.request_id for request in requests if driver.rng.random() < cancel_share}
        driver.run(requests, cancelled)
        joined = [delta for delta in join(driver.deltas) if delta.finish_reason is not None]
        assert_equals_simulation(joined, requests)
        assert {request.request_id for request in requests} - cancelled <= {delta.request_id for delta in joined}
        if not cancelled:
            num_tokens = sum(len(delta.token_ids) for delta in joined)
            assert len(joined) == len(sequence_keys(requests))
            assert driver.state.stats().total_generation_tokens == num_tokens
        driver.assert_nothing_is_left()
        for request in requests:
            if request.want_prompt_logprobs:
                ends_of_preempted_runs = [
                    end for _, end in driver.worker.computed_ranges.get((request.seed, 0), [])[:-1]
                ]
                num_preempted += len(ends_of_preempted_runs)
                num_preempted_in_prefill += sum(end <= len(request.prompt_ids) for end in ends_of_preempted_runs)

    check()
    assert num_preempted > (10 if IS_NIGHTLY else 2)
    assert num_preempted_in_prefill > 0


class Texts:
    """The texts with prompt logprobs, each with its number of top-k logprobs: an oracle."""

    def __init__(self) -> None:
        self.with_logprobs: list[tuple[list[int], int]] = []

    def add_prompt(self, request: GenerateRequest) -> None:
        if request.want_prompt_logprobs:
            self.with_logprobs.append((request.prompt_ids.tolist(), request.num_top_prompt_logprobs))

    def first_position(self, request: GenerateRequest) -> int:
        prompt, most = request.prompt_ids.tolist(), 0
        for text, num_top in self.with_logprobs:
            for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
                if num_top >= request.num_top_prompt_logprobs and text[:end] == prompt[:end]:
                    most = max(most, end)
        return max(0, most - 1)


@examples(150)
@given(
    shapes=st.lists(
        random_shape(
            prefix=st.integers(0, 1),
            num_sequences=st.integers(1, 2),
            max_new_tokens=st.integers(1, 6),
            prompt_top=st.sampled_from([None, 0, 0, 3, 5]),
        ),
        min_size=2,
        max_size=8,
    ),
    max_tokens=st.integers(16, 40),
    is_at_once=st.booleans(),
)
def test_prefill_starts_one_position_before_the_first_block_without_prompt_logprobs(shapes, max_tokens, is_at_once):
    """Requests come one after the other or all at once; nothing is ever evicted."""
    driver = EngineDriver(make_options(1000, PAGE_SIZE, max_tokens_per_forward=max_tokens, max_seqs_per_forward=16))
    requests = make_requests(shapes, make_options(20, PAGE_SIZE).limits)
    texts, expected = Texts(), {}
    for request in requests:
        if request.want_prompt_logprobs:
            expected[request.request_id, 0] = texts.first_position(request)
        texts.add_prompt(request)
    for together in [requests] if is_at_once else [[request] for request in requests]:
        driver.step(together)
        driver.run_until_idle()
    found = {(delta.request_id, delta.sequence_index): delta.num_cached_tokens for delta in driver.deltas}
    assert {key: found[key] for key in expected} == expected
    assert_equals_simulation(driver.deltas, requests)
    for delta in driver.deltas:
        assert (
            delta.num_computed_tokens == len(requests[int(delta.request_id[1:])].prompt_ids) - delta.num_cached_tokens
        )


def multiple_choice(num_contexts: int, num_context_tokens: int, num_options: int) -> list[GenerateRequest]:
    """Requests like lm-eval's: a context followed by one of its options, and at most one generated token."""
    requests = []
    for number in range(num_contexts * num_options):
        context = np.random.default_rng([number // num_options, 3]).integers(0, VOCAB_SIZE, num_context_tokens)
        option = np.random.default_rng([number, 4]).integers(0, VOCAB_SIZE, 3 + number % 9)
        request = with_prompt_logprobs(make_request(number, 1, 1, number % 2, want_logprobs=True), 1)
        requests.append(dataclasses.replace(request, prompt_ids=np.concatenate((context, option)).astype(np.int32)))
    return requests


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_multiple_choice_options_compute_their_shared_context_once(at_once):
    """Options after the first recompute the last position of the context's whole blocks, and its partial block."""
    num_contexts, num_context_tokens, page_size = 6, 250, 16
    requests = multiple_choice(num_contexts, num_context_tokens, 4)
    options = make_options(400, page_size, max_tokens_per_forward=100, max_seqs_per_forward=32)
    driver = EngineDriver(options)
    for start in range(0, len(requests), at_once):
        driver.step(requests[start : start + at_once])
        driver.run_until_idle()
    num_options = sum(len(request.prompt_ids) - num_context_tokens for request in requests)
    computed_again = 1 + num_context_tokens % page_size
    stats = driver.state.stats()
    assert stats.total_computed_prompt_tokens == (
        num_contexts * num_context_tokens + num_options + 3 * num_contexts * computed_again
    )
    assert stats.total_recomputed_tokens == 0
    assert_equals_simulation(driver.deltas, requests)


@pytest.mark.parametrize("num_steps", range(0, 21, 2))
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_preempted_prefill_resumes_where_its_prompt_logprobs_end(num_steps, is_streamed):
    """Preempted during prefill, in chunks of 10, it computes the missing prompt logprobs; during decode it has all."""
    request = with_prompt_logprobs(make_request(1, 45, 2, 30, ignore_eos=True, want_logprobs=True), 2)
    request = dataclasses.replace(request, is_streamed=is_streamed)
    driver = EngineDriver(
        make_options(60, max_tokens_per_forward=10, scheduling_steps_ahead=2, deferred_tasks="always"), (0.01,)
    )
    driver.step([request])
    for _ in range(num_steps):
        driver.step([], 1)
    state = driver.state
    sequence = next(iter(state.unfinished["r1"].sequences))
    num_kv_tokens = int(state.slots.num_kv_tokens[sequence.slot])
    num_known = int(state.slots.num_known_tokens[sequence.slot])
    had_logprobs = num_known > 45
    preempt(state, sequence)
    driver.run_until_idle()
    assert_equals_simulation(join(driver.deltas), [request])
    start = min(num_kv_tokens, num_known - 1) // 4 * 4
    if not had_logprobs:
        start = max(0, min(44, num_kv_tokens) // 4 * 4 - 1)
    assert [first for first, _ in driver.worker.computed_ranges[1, 0]] == [0, start]
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_prompt_that_waits_for_blocks_of_another_microbatch_is_not_overtaken(num_top):
    """The waiting prompt computes prompt logprobs of a block that is cached without any; the next prompt relies on
    them, or computes more of them itself."""
    options = make_options(200, PAGE_SIZE, max_seqs_per_forward=12, num_microbatches=2, pp_size=2)
    plain, first, long, waiting, last = make_requests(
        [
            Shape(0, PAGE_SIZE, 1, 1, 2),
            Shape(1, 0, 2, 1, 2),
            Shape(0, 2 * PAGE_SIZE, 80, 1, 2),
            Shape(0, 2 * PAGE_SIZE, 3, 1, 2),
            Shape(0, PAGE_SIZE, 5, 1, 2),
        ],
        options.limits,
    )
    waiting, last = with_prompt_logprobs(waiting), with_prompt_logprobs(last, num_top)
    driver = EngineDriver(options)
    driver.step([plain])
    driver.run_until_idle()
    driver.step([first, long, waiting, last])
    microbatches = [int(driver.state.slots.microbatches[sequence.slot]) for sequence in driver.running()]
    assert microbatches == [microbatches[0], 1 - microbatches[0], microbatches[0], microbatches[0]]
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, [plain, first, long, waiting, last])
    driver.assert_nothing_is_left()


def test_prompts_that_share_nothing_do_not_wait_for_each_other():
    """Each microbatch has two of them, and computes both in its first step."""
    options = make_options(200, PAGE_SIZE, max_seqs_per_forward=12, num_microbatches=2, pp_size=2)
    requests = [with_prompt_logprobs(make_request(number, 8, 1, 8, ignore_eos=True)) for number in range(4)]
    driver = EngineDriver(options)
    driver.step(requests)
    assert [len(message.slots) for message in driver.queue] == [2, 2]
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, requests)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_another_request_computes_the_prompt_logprobs_missing_after_a_cancel(num_steps):
    """All KV is cached by a request without prompt logprobs. The first of three with them is cancelled in prefill."""
    options = make_options(60, PAGE_SIZE, max_tokens_per_forward=6, max_seqs_per_forward=6, scheduling_steps_ahead=1)
    plain, *with_logprobs = make_requests([Shape(0, 40, 1 + number, 1, 3) for number in range(4)], options.limits)
    with_logprobs = [with_prompt_logprobs(request) for request in with_logprobs]
    driver = EngineDriver(options)
    driver.step([plain])
    driver.run_until_idle()
    driver.step(with_logprobs)
    for _ in range(num_steps - 1):
        driver.step([], 1)
    assert [sequence.phase for sequence in driver.running()] == [Phase.PREFILL] * 3
    driver.step([CancelRequest("r1")])
    driver.run_until_idle()
    starts = driver.worker.first_positions
    assert (starts[1, 0], starts[2, 0], starts[3, 0]) == (0, max(0, 6 * num_steps // PAGE_SIZE * PAGE_SIZE - 1), 39)
    assert_equals_simulation(driver.deltas, [plain, *with_logprobs])
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("stop_strings", [(), ("a",)])
def test_max_new_tokens_0_returns_no_tokens_and_records_no_length(is_streamed, stop_strings):
    driver = EngineDriver(make_options(40, deferred_tasks="always", use_spec_allocation=True))
    request = make_request(1, 21, 3, 0, stop_strings, want_logprobs=True)
    request = dataclasses.replace(
        with_prompt_logprobs(request, 2), is_streamed=is_streamed, num_top_logprobs=2, min_tokens=0
    )
    driver.step([request])
    driver.run_until_idle()
    assert len(driver.deltas) == 3
    assert all((delta.token_ids, delta.logprobs, delta.finish_reason) == ([], [], "length") for delta in driver.deltas)
    assert_equals_simulation(driver.deltas, [request])
    assert driver.state.stats().total_generation_tokens == 0
    assert driver.state.lengths.recorded is not None
    assert driver.state.lengths.recorded.num_recorded == 0, "a request for no tokens records no completion length"
    driver.assert_nothing_is_left()


def test_widening_the_top_logprobs_of_a_large_pool_touches_no_memory():
    """Zeroing or copying the pool's memory, 40 bytes an index at last, would take seconds."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    num_kv_indices = 9 << 20
    store = PromptLogprobStore(num_kv_indices // 16, page_size=16)
    before = resident_bytes()
    for num_top in (1, 2, 5):
        store.widen(num_top)
    assert resident_bytes() - before < 8 * num_kv_indices
