"""Tests sequences with grammars among others: their tokens, how they end, and which of them wait."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.fake_grammars import BY_GRAMMAR, TOKEN_BYTES
from tests.manager.helpers.grammar_requests import ANYTHING, MANY_STATES, VOCABULARY, grammar_request, make_driver
from tests.manager.helpers.requests import make_request, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation, join
from tests.manager.helpers.strategies import STOP_STRINGS, crowded_options_strategy, random_shape, varied_fields
from tests.manager.helpers.token_counting import CountingDriver, check_counts
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.state import grammar_matcher
from tokasaurus.manager.state.engine_state import HydragenOptions

shapes_strategy = st.lists(
    random_shape(
        max_new_tokens=st.integers(1, 36),
        stop_strings=st.sampled_from([(), (), *STOP_STRINGS]),
        ignore_eos=st.booleans(),
        grammar=st.sampled_from(["", *BY_GRAMMAR]),
        **varied_fields,
    ),
    min_size=2,
    max_size=8,
)


def test_every_sequence_equals_its_simulation_and_follows_its_grammar(monkeypatch):
    """Half of the grammars are treated as slow."""
    num_preemptions = num_texts = 0
    duration_rng = random.Random(0)
    monkeypatch.setattr(
        grammar_matcher.MatcherThreads, "_try", lambda *_: duration_rng.random() * 2 * grammar_matcher.SLOW_SECONDS
    )

    @examples(100, 25)
    @given(
        shapes=shapes_strategy,
        options=crowded_options_strategy,
        seed=st.integers(0, 2**32),
        cancel_share=st.sampled_from([0.0, 0.3]),
        is_crowded=st.booleans(),
        has_streams=st.booleans(),
    )
    def check(shapes, options, seed, cancel_share, is_crowded, has_streams):
        nonlocal num_preemptions, num_texts
        rng = random.Random(seed)
        driver = CountingDriver(options, forecast=EndsNext() if is_crowded else None, rng=rng, vocabulary=VOCABULARY)
        requests = [
            replace(request, is_streamed=has_streams and rng.random() < 0.5)
            for request in make_requests(shapes, options.limits)
        ]
        cancelled = {request.request_id for request in requests if rng.random() < cancel_share}
        driver.run(requests, cancelled)
        by_id = {request.request_id: request for request in requests}
        deltas = [delta for delta in join(driver.deltas) if delta.finish_reason is not None]
        assert_equals_simulation(deltas, requests)
        ended = {(delta.request_id, delta.sequence_index) for delta in deltas}
        for request in requests:
            if request.request_id not in cancelled:
                assert all((request.request_id, index) in ended for index in range(request.num_sequences))
        for delta in deltas:
            request = by_id[delta.request_id]
            text = b"".join(TOKEN_BYTES[token_id] for token_id in delta.token_ids)
            is_cut = request.stop_strings or request.stop_token_ids or delta.finish_reason == "length"
            if request.grammar:
                language = BY_GRAMMAR[request.grammar]
                assert language.may_begin(text) if is_cut else language.is_text(text)
                num_texts += not is_cut
        num_returned = sum(len(delta.token_ids) for delta in deltas)
        assert driver.state.stats().total_generation_tokens == num_returned or cancelled
        if not has_streams:
            check_counts(driver)
        driver.assert_nothing_is_left()
        num_preemptions += driver.state.totals.preemptions

    check()
    assert num_preemptions > 0
    assert num_texts > 5


def test_sequences_without_grammars_run_more_steps_ahead_than_those_with_grammars():
    driver = make_driver()
    driver.assume_step_seconds(0.01)
    plain, other = make_request(1, 6, 3, 60, ignore_eos=True), grammar_request(2, ANYTHING, 3, 60)
    driver.step([plain, other])
    rows = []
    for _ in range(40):
        driver.step([], 1)
        rows.append([len(message.slots) for message in driver.queue])
    assert all(len(in_queue) == 4 for in_queue in rows), "as many steps ahead as without grammars"
    sizes = [in_queue[-1] for in_queue in rows[8:]]
    assert {sum(sizes[first : first + 4]) for first in range(28)} == {4 * 3 + 3}
    num_plain, num_other = (
        [len(sampled_tokens(driver.state, one)) for one in driver.running() if one.request.request_id == request_id]
        for request_id in ("r1", "r2")
    )
    assert min(num_plain) >= 36
    assert 9 <= min(num_other) <= max(num_other) <= 11, "one token in four steps, the number in the queue"


def test_a_batch_of_only_grammars_decodes_together_once_all_tokens_are_known():
    """Requests arrive in different steps; still each step has all sequences and is sent once all tokens are known."""
    driver = make_driver()
    driver.step([grammar_request(1, ANYTHING, 3, 60)])
    driver.step([], 1)
    driver.step([grammar_request(2, ANYTHING, 4, 60)], 1)
    for _ in range(4):
        driver.step([], 1)
    for _ in range(20):
        assert [len(message.slots) for message in driver.queue] == [7]
        driver.step([], 0)
        assert len(driver.queue) == 1, "no step is sent without the tokens of the last one"
        driver.step([], 1)


class StallingDriver(EngineDriver):
    """A driver whose thread for slow jobs can be stalled."""

    is_stalled = False

    def _run_jobs(self, jobs):
        if jobs is not self.jobs[0] or not self.is_stalled:
            super()._run_jobs(jobs)


def test_a_slow_grammar_delays_only_its_own_sequences(monkeypatch):
    original_compile = grammar_matcher.MatcherThreads.compile

    def compile_grammar(threads, grammar):
        compiled_grammar = original_compile(threads, grammar)
        compiled_grammar.is_slow = grammar == MANY_STATES.grammar
        return compiled_grammar

    monkeypatch.setattr(grammar_matcher.MatcherThreads, "compile", compile_grammar)
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    driver = StallingDriver(make_options(200, max_seqs_per_forward=16), (0.01,), vocabulary=VOCABULARY)
    driver.job_rate = 1.0
    requests = [grammar_request(1, ANYTHING, 2, 40), grammar_request(2, MANY_STATES.grammar, 3, 40)]
    driver.step(requests)
    for _ in range(6):
        driver.step([], 1)
    driver.is_stalled = True
    driver.step([], 4)
    num_before = [len(sampled_tokens(driver.state, one)) for one in driver.running()]
    for _ in range(10):
        assert [len(message.slots) for message in driver.queue] == [2]
        driver.step([], 1)
    num_after = [len(sampled_tokens(driver.state, one)) for one in driver.running()]
    assert [after - before for before, after in zip(num_before, num_after, strict=True)] in (
        [10, 10, 0, 0, 0],
        [0, 0, 0, 10, 10],
    )
    driver.is_stalled = False
    driver.run_until_idle()
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 5


def test_shared_tokens_count_for_all_members_of_a_group_that_decodes_alternately():
    requests = [make_request(1, 40, 2, 30, ignore_eos=True), replace(grammar_request(1, ANYTHING, 4), request_id="r2")]
    requests[1] = replace(requests[1], prompt_ids=requests[0].prompt_ids)
    driver = CountingDriver(
        make_options(200, max_seqs_per_forward=16, max_tokens_per_forward=64, hydragen=HydragenOptions(2, 1)),
        (0.01,),
        vocabulary=VOCABULARY,
    )
    requests[1] = replace(requests[1], seed=2)
    driver.step(requests)
    driver.run_until_idle(1)
    check_counts(driver)
    assert [delta.num_shared_tokens for delta in driver.deltas] == [40] * 6
