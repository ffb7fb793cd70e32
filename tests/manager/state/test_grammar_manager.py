"""Compiled grammars, the states that matchers share, and the threads in which they run."""

import threading
from functools import partial

import pytest
from llguidance import LLMatcher, LLParserLimits

import tokasaurus.text.grammars as grammars_of_text
from tests.manager.helpers.fake_grammars import BY_GRAMMAR
from tests.manager.helpers.grammar_requests import MANY_STATES, Ignored, grammar_request, make_driver
from tests.manager.helpers.simulation import assert_equals_simulation
from tokasaurus.manager.state import grammar_manager, grammar_matcher
from tokasaurus.text.grammars import make_matcher


def note_made_matchers(monkeypatch):
    """A list that grows with each matcher that is made anew, copies not among them."""
    made = []

    def make_and_note(*arguments):
        made.append(make_matcher(*arguments))
        return made[-1]

    monkeypatch.setattr(grammar_matcher, "make_matcher", make_and_note)
    return made


def test_matchers_stop_sharing_their_states_when_these_are_too_many(monkeypatch):
    """Matchers that are copied from one fill one table: when it is full, each goes on with one of its own."""
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_lexer_states=60, verbose_errors=False))
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    made = note_made_matchers(monkeypatch)
    driver = make_driver()
    requests = [grammar_request(number, MANY_STATES.grammar, 2, 16) for number in range(12)]
    driver.run(requests)
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 24
    assert 1 < len(made) < 24 + 12
    num_before = len(made)
    for number in range(12, 16):
        driver.step([grammar_request(number, MANY_STATES.grammar, 1, 1)])
        driver.run_until_idle()
    assert len(made) == num_before + 1, "who comes later does not begin with a full table"
    driver.assert_nothing_is_left()


def test_a_sequence_whose_own_states_are_too_many_gets_one_new_matcher(monkeypatch):
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_lexer_states=50, verbose_errors=False))
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    made = note_made_matchers(monkeypatch)
    driver = make_driver()
    request = grammar_request(1, MANY_STATES.grammar, 8, 60)
    driver.run([request])
    failed = [delta for delta in driver.deltas if delta.error]
    assert 2 < len(failed) < 8
    assert all("too many states" in delta.error for delta in failed)
    assert_equals_simulation([delta for delta in driver.deltas if not delta.error], [request])
    assert len(made) <= 1 + 8
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("limit", ["MOST_COMPILED_GRAMMARS", "MOST_GRAMMAR_CHARS"])
def test_a_grammar_is_compiled_once_and_few_are_kept(limit, monkeypatch):
    made = []

    def note_and_make(vocabulary, grammar):
        made.append(grammar)
        return make_matcher(vocabulary, grammar)

    monkeypatch.setattr(grammar_matcher, "make_matcher", note_and_make)
    texts = [LLMatcher.grammar_from_regex(f"a{{{count}}}") for count in range(1, 6)]
    assert len({len(text) for text in texts}) == 1
    monkeypatch.setattr(grammar_manager, limit, 3 if limit == "MOST_COMPILED_GRAMMARS" else 3 * len(texts[0]))
    driver = make_driver()
    driver.worker.requests = Ignored()
    for number, which in enumerate([0, 1, 2, 0, 3, 0, 2, 1, 4, 3]):
        driver.step([grammar_request(2 * number, texts[which]), grammar_request(2 * number + 1, texts[which])])
        driver.run_until_idle()
    assert made == [texts[which] for which in [0, 1, 2, 3, 1, 4, 3]], "the least recently used has gone each time"
    assert [len(delta.token_ids) for delta in driver.deltas[::2]] == [1, 2, 3, 1, 4, 1, 3, 2, 5, 4]
    assert len(driver.deltas) == 20


def test_a_job_thread_runs_jobs_in_order_and_closes_after_the_running_one():
    thread, done, has_begun, may_end = grammar_manager.JobThread("test"), [], threading.Event(), threading.Event()

    def take_long():
        has_begun.set()
        assert may_end.wait(20)
        done.append(2)

    for job in (partial(done.append, 1), take_long, partial(done.append, 3)):
        thread(job)
    assert has_begun.wait(20)
    closing = threading.Thread(target=thread.close, args=(20.0,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the job at hand"
    may_end.set()
    closing.join(20)
    assert done == [1, 2]
