"""Tests compiled grammars, the lexer states that matchers share, and the job threads."""

import threading
from functools import partial

import pytest
from llguidance import LLMatcher, LLParserLimits

import tokasaurus.text.grammars as grammars_of_text
from tests.manager.helpers.fake_grammars import BY_GRAMMAR
from tests.manager.helpers.grammar_requests import MANY_STATES, UncheckedRequests, grammar_request, make_driver
from tests.manager.helpers.simulation import assert_equals_simulation
from tokasaurus.manager.state import grammar_manager, grammar_matcher
from tokasaurus.text.grammars import make_matcher


def record_made_matchers(monkeypatch):
    """Returns a list to which every newly made matcher is appended; copies of matchers are not."""
    made = []

    def make_and_record(*arguments):
        made.append(make_matcher(*arguments))
        return made[-1]

    monkeypatch.setattr(grammar_matcher, "make_matcher", make_and_record)
    return made


def test_matchers_stop_sharing_states_when_the_shared_table_is_full(monkeypatch):
    """Copies of one matcher fill one table of states; when it is full, each continues with a table of its own."""
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_lexer_states=60, verbose_errors=False))
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    made = record_made_matchers(monkeypatch)
    driver = make_driver(deferred_tasks="always")  # otherwise a busy machine may admit sequences later
    requests = [grammar_request(number, MANY_STATES.grammar, 2, 16) for number in range(12)]
    driver.run(requests)
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 24
    assert 1 < len(made) < 24 + 12
    num_before = len(made)
    for number in range(12, 16):
        driver.step([grammar_request(number, MANY_STATES.grammar, 1, 1)])
        driver.run_until_idle()
    assert len(made) == num_before + 1, "later sequences do not begin with a full table"
    driver.assert_nothing_is_left()


def test_a_sequence_that_fills_a_table_alone_gets_only_one_new_matcher(monkeypatch):
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_lexer_states=50, verbose_errors=False))
    monkeypatch.setitem(BY_GRAMMAR, MANY_STATES.grammar, MANY_STATES)
    made = record_made_matchers(monkeypatch)
    driver = make_driver()
    request = grammar_request(1, MANY_STATES.grammar, 8, 60)
    driver.run([request])
    failed = [delta for delta in driver.deltas if delta.error]
    assert 2 < len(failed) < 8
    assert all("too many states" in delta.error for delta in failed)
    assert_equals_simulation([delta for delta in driver.deltas if not delta.error], [request])
    assert len(made) <= 1 + 8
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("limit", ["MAX_COMPILED_GRAMMARS", "MAX_GRAMMAR_CHARS"])
def test_a_grammar_is_compiled_once_and_the_least_recently_used_is_dropped(limit, monkeypatch):
    made = []

    def record_and_make(vocabulary, grammar):
        made.append(grammar)
        return make_matcher(vocabulary, grammar)

    monkeypatch.setattr(grammar_matcher, "make_matcher", record_and_make)
    texts = [LLMatcher.grammar_from_regex(f"a{{{count}}}") for count in range(1, 6)]
    assert len({len(text) for text in texts}) == 1
    monkeypatch.setattr(grammar_manager, limit, 3 if limit == "MAX_COMPILED_GRAMMARS" else 3 * len(texts[0]))
    driver = make_driver()
    driver.worker.requests = UncheckedRequests()
    for number, index in enumerate([0, 1, 2, 0, 3, 0, 2, 1, 4, 3]):
        driver.step([grammar_request(2 * number, texts[index]), grammar_request(2 * number + 1, texts[index])])
        driver.run_until_idle()
    assert made == [texts[index] for index in [0, 1, 2, 3, 1, 4, 3]], (
        "the least recently used grammar is dropped each time"
    )
    assert [len(delta.token_ids) for delta in driver.deltas[::2]] == [1, 2, 3, 1, 4, 1, 3, 2, 5, 4]
    assert len(driver.deltas) == 20


def test_a_job_thread_runs_jobs_in_order_and_closes_after_the_running_one():
    thread, done, has_started, may_finish = grammar_manager.JobThread("test"), [], threading.Event(), threading.Event()

    def long_job():
        has_started.set()
        assert may_finish.wait(20)
        done.append(2)

    for job in (partial(done.append, 1), long_job, partial(done.append, 3)):
        thread(job)
    assert has_started.wait(20)
    closing = threading.Thread(target=thread.close, args=(20.0,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "close waits for the running job"
    may_finish.set()
    closing.join(20)
    assert done == [1, 2]
