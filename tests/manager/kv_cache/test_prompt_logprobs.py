"""Prompt log-probabilities: true, whatever becomes of their sequence, and never computed where they are cached."""

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.engine.test_streaming import join, streamed
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
from tests.manager.helpers.fake_worker import VOCAB_SIZE, make_request, simulate
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.manager.kv_cache.prompt_logprobs import PromptLogprobStore
from tokasaurus.manager.state.engine_state import HydragenOptions, LengthPredictorOptions
from tokasaurus.manager.state.sequence import Phase
from tokasaurus.messages.generation import CancelRequest, GenerateRequest

PAGE_SIZE = 4


def with_prompt_logprobs(request: GenerateRequest, num_top: int = 0) -> GenerateRequest:
    return dataclasses.replace(request, want_prompt_logprobs=True, num_top_prompt_logprobs=num_top)


crowding_shapes_strategy = st.lists(
    st.tuples(
        st.builds(
            Shape,
            prefix=st.integers(-2, 1),
            num_shared=st.integers(0, 24),
            num_fresh=st.integers(0, 8),
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


def test_scores_are_true_whatever_is_preempted_cancelled_or_streamed():
    num_returns = num_early_returns = 0

    @settings(max_examples=120, deadline=None)
    @given(
        shapes=crowding_shapes_strategy,
        num_blocks=st.integers(14, 24),
        page_size=st.sampled_from([4, 5]),
        max_tokens=st.integers(3, 40),
        steps_ahead=st.sampled_from([1, 3, 8]),
        mode=st.sampled_from([None, "always", "deferred"]),
        cancel_share=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 1000),
    )
    def check(shapes, num_blocks, page_size, max_tokens, steps_ahead, mode, cancel_share, seed):
        nonlocal num_returns, num_early_returns
        options = make_options(
            num_blocks,
            page_size,
            max_tokens_per_forward=max_tokens,
            max_seqs_per_forward=12,
            max_steps_ahead=steps_ahead,
            deferred_tasks=mode,
            early_stopping=NEVER_LEARNS,
            hydragen=HydragenOptions(2, 1) if seed % 2 else None,
        )
        requests = make_requests([shape for shape, _ in shapes], options.limits)
        requests = [
            streamed(request) if is_streamed else request
            for request, (_, is_streamed) in zip(requests, shapes, strict=True)
        ]
        bench = Bench(options, forecast=EndsNext(), rng=random.Random(seed))
        cancelled = {request.request_id for request in requests if bench.rng.random() < cancel_share}
        bench.run(requests, cancelled)
        joined = [delta for delta in join(bench.deltas) if delta.finish_reason is not None]
        assert_equals_simulation(joined, requests)
        assert {request.request_id for request in requests} - cancelled <= {delta.request_id for delta in joined}
        if not cancelled:
            num_tokens = sum(len(delta.token_ids) for delta in joined)
            assert len(joined) == len(sequence_keys(requests))
            assert bench.state.stats().total_generation_tokens == num_tokens
        bench.assert_nothing_is_left()
        for request in requests:
            if request.want_prompt_logprobs:
                last_places = [end for _, end in bench.worker.stays.get((request.sampling.seed, 0), [])[:-1]]
                num_returns += len(last_places)
                num_early_returns += sum(end <= len(request.prompt_ids) for end in last_places)

    check()
    assert num_returns > 20
    assert num_early_returns > 3


class Texts:
    """All texts that are cached, and of those that are scored what is, with how many likeliest tokens."""

    def __init__(self) -> None:
        self.cached: list[list[int]] = []
        self.with_logprobs: list[tuple[list[int], int]] = []

    def add_prompt(self, request: GenerateRequest) -> None:
        prompt = request.prompt_ids.tolist()
        if request.want_prompt_logprobs:
            # The block of the last token is the prompt's own: where another has it already, it is not kept.
            is_kept = not any(text[: len(prompt)] == prompt for text in self.cached)
            self.with_logprobs.append((prompt if is_kept else prompt[:-1], request.num_top_prompt_logprobs))
        self.cached.append(prompt)

    def first_position(self, request: GenerateRequest) -> int:
        prompt, most = request.prompt_ids.tolist(), 0
        for text, num_top in self.with_logprobs:
            for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE):
                if num_top >= request.num_top_prompt_logprobs and text[:end] == prompt[:end]:
                    most = max(most, end)
        return max(0, most - 1)


@settings(max_examples=150)
@given(
    shapes=st.lists(
        st.builds(
            Shape,
            prefix=st.integers(0, 1),
            num_shared=st.integers(0, 30),
            num_fresh=st.integers(0, 6),
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
def test_a_scored_prompt_begins_with_the_last_position_before_its_first_block_without_scores(
    shapes, max_tokens, is_at_once
):
    """One request after the other, or all at once, in a pool where nothing is ever evicted."""
    bench = Bench(make_options(1000, PAGE_SIZE, max_tokens_per_forward=max_tokens, max_seqs_per_forward=16))
    requests = make_requests(shapes, make_options(20, PAGE_SIZE).limits)
    texts, expected = Texts(), {}
    for request in requests:
        if request.want_prompt_logprobs:
            expected[request.request_id, 0] = texts.first_position(request)
        texts.add_prompt(request)
        if not is_at_once:
            completions = (simulate(request, index)[0][:-1] for index in range(request.num_sequences))
            texts.cached += [[*request.prompt_ids.tolist(), *completion] for completion in completions]
    for together in [requests] if is_at_once else [[request] for request in requests]:
        bench.turn(together)
        bench.run_until_idle()
    found = {(delta.request_id, delta.sequence_index): delta.num_cached_tokens for delta in bench.deltas}
    assert {key: found[key] for key in expected} == expected
    assert_equals_simulation(bench.deltas, requests)
    for delta in bench.deltas:
        assert (
            delta.num_computed_tokens == len(requests[int(delta.request_id[1:])].prompt_ids) - delta.num_cached_tokens
        )


def multiple_choice(num_contexts: int, num_context_tokens: int, num_options: int) -> list[GenerateRequest]:
    """As lm-eval asks: each option behind its context, one token is generated."""
    requests = []
    for number in range(num_contexts * num_options):
        context = np.random.default_rng([number // num_options, 3]).integers(0, VOCAB_SIZE, num_context_tokens)
        option = np.random.default_rng([number, 4]).integers(0, VOCAB_SIZE, 3 + number % 9)
        request = with_prompt_logprobs(make_request(number, 1, 1, number % 2, want_logprobs=True), 1)
        requests.append(dataclasses.replace(request, prompt_ids=np.concatenate((context, option)).astype(np.int32)))
    return requests


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_the_options_of_one_context_compute_it_once(at_once):
    """All but the first compute the context's last position again, and what of it is not in a whole block."""
    num_contexts, num_context_tokens, page_size = 6, 250, 16
    requests = multiple_choice(num_contexts, num_context_tokens, 4)
    options = make_options(400, page_size, max_tokens_per_forward=100, max_seqs_per_forward=32)
    bench = Bench(options)
    for start in range(0, len(requests), at_once):
        bench.turn(requests[start : start + at_once])
        bench.run_until_idle()
    num_options = sum(len(request.prompt_ids) - num_context_tokens for request in requests)
    computed_again = 1 + num_context_tokens % page_size
    stats = bench.state.stats()
    assert stats.total_computed_prompt_tokens == (
        num_contexts * num_context_tokens + num_options + 3 * num_contexts * computed_again
    )
    assert stats.total_recomputed_tokens == 0
    assert_equals_simulation(bench.deltas, requests)


@pytest.mark.parametrize("num_steps_deferred", range(0, 21, 2))
@pytest.mark.parametrize("is_streamed", [False, True])
def test_whoever_is_preempted_goes_on_where_scores_end(num_steps_deferred, is_streamed):
    """Put back while it prefills, in chunks of 10: it is scored on; while it decodes: its scores are known."""
    request = with_prompt_logprobs(make_request(1, 45, 2, 30, ignore_eos=True, want_logprobs=True), 2)
    request = dataclasses.replace(request, is_streamed=is_streamed)
    bench = Bench(make_options(60, max_tokens_per_forward=10, max_steps_ahead=2, deferred_tasks="always"), (0.01,))
    bench.turn([request])
    for _ in range(num_steps_deferred):
        bench.turn([], 1)
    state = bench.state
    sequence = next(iter(state.unfinished["r1"]))
    num_kv_tokens = int(state.slots.num_kv_tokens[sequence.slot])
    num_known = int(state.slots.num_known_tokens[sequence.slot])
    had_logprobs = num_known > 45
    preempt(state, sequence)
    bench.run_until_idle()
    assert_equals_simulation(join(bench.deltas), [request])
    start = min(num_kv_tokens, num_known - 1) // 4 * 4
    if not had_logprobs:
        start = max(0, min(44, num_kv_tokens) // 4 * 4 - 1)
    assert [first for first, _ in bench.worker.stays[1, 0]] == [0, start]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_whoever_relied_on_scores_that_were_cancelled_computes_them(num_steps):
    """A plain prompt has all the KV; of three scored ones in steps of 6, the first is cancelled amid its steps."""
    options = make_options(60, PAGE_SIZE, max_tokens_per_forward=6, max_seqs_per_forward=6, max_steps_ahead=1)
    plain, *with_logprobs = make_requests([Shape(0, 40, 1 + number, 1, 3) for number in range(4)], options.limits)
    with_logprobs = [with_prompt_logprobs(request) for request in with_logprobs]
    bench = Bench(options)
    bench.turn([plain])
    bench.run_until_idle()
    bench.turn(with_logprobs)
    for _ in range(num_steps - 1):
        bench.turn([], 1)
    assert [sequence.phase for sequence in bench.running()] == [Phase.PREFILL] * 3
    bench.turn([CancelRequest("r1")])
    bench.run_until_idle()
    starts = bench.worker.first_positions
    assert (starts[1, 0], starts[2, 0], starts[3, 0]) == (0, max(0, 6 * num_steps // PAGE_SIZE * PAGE_SIZE - 1), 39)
    assert_equals_simulation(bench.deltas, [plain, *with_logprobs])
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("stop_strings", [(), ("a",)])
def test_where_no_token_is_wanted_none_comes(is_streamed, stop_strings):
    bench = Bench(make_options(40, deferred_tasks="always", early_stopping=LengthPredictorOptions()))
    request = make_request(1, 21, 3, 0, stop_strings, want_logprobs=True)
    request = dataclasses.replace(
        with_prompt_logprobs(request, 2), is_streamed=is_streamed, num_top_logprobs=2, min_tokens=0
    )
    bench.turn([request])
    bench.run_until_idle()
    assert len(bench.deltas) == 3
    assert all((delta.token_ids, delta.logprobs, delta.finish_reason) == ([], [], "length") for delta in bench.deltas)
    assert_equals_simulation(bench.deltas, [request])
    assert bench.state.stats().total_generation_tokens == 0
    assert bench.state.lengths is not None
    assert bench.state.lengths.num_recorded == 0, "it says nothing of completions"
    bench.assert_nothing_is_left()


def test_more_likeliest_tokens_in_a_large_pool_hold_nobody_up():
    """No memory is touched for them, as zeroing or copying would: it would take seconds."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    num_kv_indices = 9 << 20
    store = PromptLogprobStore(num_kv_indices // 16, page_size=16)
    before = resident_bytes()
    for num_top in (1, 2, 5):
        store.widen(num_top)
    assert resident_bytes() - before < num_kv_indices
