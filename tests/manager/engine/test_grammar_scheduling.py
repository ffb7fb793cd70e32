"""Sequences with grammars among others: what they come to, how they end, and who waits for whom."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.manager.engine.test_engine import STOP_STRINGS, crowded_options_strategy, varied_fields
from tests.manager.engine.test_streaming import join
from tests.manager.engine.test_token_counters import CountingBench, check_counts
from tests.manager.helpers.engine_driver import (
    Bench,
    EndsNext,
    Shape,
    assert_equals_simulation,
    make_options,
    make_requests,
)
from tests.manager.helpers.fake_grammars import BY_GRAMMAR, TOKEN_BYTES, Language, fake_vocabulary
from tests.manager.helpers.fake_worker import make_request
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.state import grammar_matcher
from tokasaurus.manager.state.engine_state import HydragenOptions
from tokasaurus.messages.generation import GenerateRequest

ANYTHING = LLMatcher.grammar_from_regex("[abcdfg]*")
MANY_STATES = Language(LLMatcher.grammar_from_regex("[abcdfg]*a[abcdfg]{6}"), b"[abcdfg]*", b"[abcdfg]*a[abcdfg]{6}")
VOCABULARY = fake_vocabulary()

shapes_strategy = st.lists(
    st.builds(
        Shape,
        prefix=st.integers(-3, 1),
        num_shared=st.integers(0, 20),
        num_fresh=st.integers(0, 8),
        num_sequences=st.integers(1, 4),
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
    """Half of the grammars are taken for slow."""
    num_preemptions = num_texts = 0
    chance = random.Random(0)
    monkeypatch.setattr(
        grammar_matcher.MatcherThreads, "_try", lambda *_: chance.random() * 2 * grammar_matcher.SLOW_SECONDS
    )

    @settings(max_examples=100)
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
        bench = CountingBench(options, forecast=EndsNext() if is_crowded else None, rng=rng, vocabulary=VOCABULARY)
        requests = [
            replace(request, is_streamed=has_streams and rng.random() < 0.5)
            for request in make_requests(shapes, options.limits)
        ]
        cancelled = {request.request_id for request in requests if rng.random() < cancel_share}
        bench.run(requests, cancelled)
        by_id = {request.request_id: request for request in requests}
        deltas = [delta for delta in join(bench.deltas) if delta.finish_reason is not None]
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
        assert bench.state.stats().total_generation_tokens == num_returned or cancelled
        if not has_streams:
            check_counts(bench)
        bench.assert_nothing_is_left()
        num_preemptions += bench.state.totals.preemptions

    check()
    assert num_preemptions > 20
    assert num_texts > 50


def grammar_request(number: int, grammar: str, num_sequences: int = 1, max_new_tokens: int = 30) -> GenerateRequest:
    request = make_request(number, 6, num_sequences, max_new_tokens, ignore_eos=True)
    return replace(request, grammar=grammar)


def make_bench(**changed) -> Bench:
    bench = Bench(make_options(200, max_seqs_per_forward=16, **changed), (0.01,), vocabulary=VOCABULARY)
    bench.job_rate = 1.0
    return bench


def test_others_run_ahead_while_those_with_grammars_take_turns():
    bench = make_bench()
    plain, other = make_request(1, 6, 3, 60, ignore_eos=True), grammar_request(2, ANYTHING, 3, 60)
    bench.turn([plain, other])
    rows = []
    for _ in range(40):
        bench.turn([], 1)
        rows.append([len(message.slots) for message in bench.queue])
    assert all(len(in_queue) == 4 for in_queue in rows), "always as many steps ahead as without grammars"
    sizes = [in_queue[-1] for in_queue in rows[8:]]
    assert {sum(sizes[first : first + 4]) for first in range(28)} == {4 * 3 + 3}
    num_plain, num_other = (
        [len(sampled_tokens(bench.state, one)) for one in bench.running() if one.request.request_id == request_id]
        for request_id in ("r1", "r2")
    )
    assert min(num_plain) >= 36
    assert 9 <= min(num_other) <= max(num_other) <= 11, "one token for each four steps that are in the queue"


def test_those_with_grammars_alone_run_together_and_nothing_spins():
    """However they come in: each step has all of them, and there is none until the last one's tokens are back."""
    bench = make_bench()
    bench.turn([grammar_request(1, ANYTHING, 3, 60)])
    bench.turn([], 1)
    bench.turn([grammar_request(2, ANYTHING, 4, 60)], 1)
    for _ in range(4):
        bench.turn([], 1)
    for _ in range(20):
        assert [len(message.slots) for message in bench.queue] == [7]
        bench.turn([], 0)
        assert len(bench.queue) == 1, "nothing is sent without the tokens"
        bench.turn([], 1)


class StallingBench(Bench):
    """The lane for what is slow may stand still."""

    is_stalled = False

    def _run_jobs(self, lane):
        if lane is not self.jobs[0] or not self.is_stalled:
            super()._run_jobs(lane)


def test_nobody_waits_for_a_slow_grammar(monkeypatch):
    compile_quickly = grammar_matcher.MatcherThreads.compile

    def compile_grammar(threads, grammar):
        compiled_grammar = compile_quickly(threads, grammar)
        compiled_grammar.is_slow = grammar == MANY_STATES.grammar
        return compiled_grammar

    monkeypatch.setattr(grammar_matcher.MatcherThreads, "compile", compile_grammar)
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    bench = StallingBench(make_options(200, max_seqs_per_forward=16), (0.01,), vocabulary=VOCABULARY)
    bench.job_rate = 1.0
    requests = [grammar_request(1, ANYTHING, 2, 40), grammar_request(2, MANY_STATES.grammar, 3, 40)]
    bench.turn(requests)
    for _ in range(6):
        bench.turn([], 1)
    bench.is_stalled = True
    bench.turn([], 4)
    num_before = [len(sampled_tokens(bench.state, one)) for one in bench.running()]
    for _ in range(10):
        assert [len(message.slots) for message in bench.queue] == [2]
        bench.turn([], 1)
    num_after = [len(sampled_tokens(bench.state, one)) for one in bench.running()]
    assert [after - before for before, after in zip(num_before, num_after, strict=True)] in (
        [10, 10, 0, 0, 0],
        [0, 0, 0, 10, 10],
    )
    bench.is_stalled = False
    bench.run_until_idle()
    assert_equals_simulation(bench.deltas, requests)
    assert len(bench.deltas) == 5


def test_a_group_that_decodes_in_turns_is_counted_for_all_of_its_members():
    requests = [make_request(1, 40, 2, 30, ignore_eos=True), replace(grammar_request(1, ANYTHING, 4), request_id="r2")]
    requests[1] = replace(requests[1], prompt_ids=requests[0].prompt_ids)
    bench = CountingBench(
        make_options(200, max_seqs_per_forward=16, max_tokens_per_forward=64, hydragen=HydragenOptions(2, 1)),
        (0.01,),
        vocabulary=VOCABULARY,
    )
    requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, seed=2))
    bench.turn(requests)
    bench.run_until_idle(1)
    check_counts(bench)
    assert [delta.num_shared_tokens for delta in bench.deltas] == [36] * 6
