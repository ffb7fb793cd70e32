"""Tests grammars that fail and requests that are cancelled while a grammar thread works for them."""

from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLParserLimits

import tokasaurus.text.grammars as grammars_of_text
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.fake_grammars import INVALID_GRAMMAR, TOKEN_BYTES
from tests.manager.helpers.grammar_requests import (
    ANYTHING,
    MANY_STATES,
    VOCABULARY,
    UncheckedRequests,
    grammar_request,
    make_driver,
)
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import assert_equals_simulation, join
from tokasaurus.manager.state import grammar_matcher
from tokasaurus.messages.generation import CancelRequest


def errors_by_request(driver: EngineDriver) -> dict[str, set[str]]:
    """The errors of each request's sequences; "" for a sequence without an error."""
    errors: dict[str, set[str]] = {}
    for delta in driver.deltas:
        assert delta.finish_reason is not None
        errors.setdefault(delta.request_id, set()).add(delta.error)
    return errors


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_an_invalid_grammar_ends_only_its_own_request(vocabulary):
    driver = EngineDriver(make_options(200, max_seqs_per_forward=16), vocabulary=vocabulary)
    plain = [make_request(n, 6, 2, 20, ignore_eos=True, want_logprobs=True) for n in (1, 3)]
    broken = make_request(2, 6, 2, 20, want_logprobs=True)
    broken = replace(broken, grammar=INVALID_GRAMMAR, num_top_logprobs=2)
    driver.step([plain[0], broken, plain[1]])
    driver.run_until_idle()
    errors = errors_by_request(driver)
    (error,) = errors.pop("r2")
    assert ("unclosed group" in error or "invalid regex" in error) if vocabulary else "tokenizer" in error
    assert "\n" not in error
    assert errors == {"r1": {""}, "r3": {""}}
    for delta in driver.deltas:
        if delta.error:
            assert (delta.token_ids, delta.logprobs, delta.top.token_ids.shape) == ([], [], (0, 2))
    assert_equals_simulation([delta for delta in driver.deltas if not delta.error], plain)
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("pattern", ["(y|z)a", "ab(y|z)"])
def test_a_grammar_with_characters_outside_the_vocabulary_ends_only_its_own_sequences(pattern):
    driver = make_driver()
    driver.worker.requests = UncheckedRequests()
    plain = make_request(1, 6, 2, 20, ignore_eos=True)
    driver.step([plain, grammar_request(2, LLMatcher.grammar_from_regex(pattern), 2)])
    driver.run_until_idle()
    assert_equals_simulation([delta for delta in driver.deltas if delta.request_id == "r1"], [plain])
    errors = errors_by_request(driver)
    assert errors.pop("r1") == {""}
    assert all("no token can follow" in error for error in errors["r2"])
    assert [len(delta.token_ids) > 0 for delta in driver.deltas if delta.error] == [pattern[0] == "a"] * 2
    driver.assert_nothing_is_left()


def test_a_grammar_over_the_parser_limits_ends_only_its_own_sequences(monkeypatch):
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_items_in_row=20, verbose_errors=False))
    driver = make_driver()
    plain, good = make_request(1, 6, 2, 30, ignore_eos=True), grammar_request(2, ANYTHING, 2)
    wild = grammar_request(3, 'start: e\ne: e e | "f" | "g" |', 2, 40)
    driver.worker.requests = UncheckedRequests()
    driver.step([plain, good, replace(wild, is_streamed=True)])
    driver.run_until_idle()
    deltas = {(delta.request_id, delta.sequence_index): delta for delta in join(driver.deltas)}
    assert_equals_simulation([delta for key, delta in deltas.items() if key[0] != "r3"], [plain, good])
    for index in range(2):
        delta = deltas["r3", index]
        assert "max is 20" in delta.error
        assert 0 < len(delta.token_ids) < 40
        assert {TOKEN_BYTES[token_id] for token_id in delta.token_ids} <= {b"f", b"g"}
    driver.assert_nothing_is_left()


def test_a_stop_string_before_a_grammar_failure_finishes_the_sequence_without_error(monkeypatch):
    """The deferred search finds the stop string some steps later, so perhaps after the failure."""
    monkeypatch.setattr(grammars_of_text, "LIMITS", LLParserLimits(max_items_in_row=12, verbose_errors=False))
    driver = make_driver(deferred_tasks="deferred", use_spec_allocation=True)
    driver.worker.requests = UncheckedRequests()
    request = grammar_request(3, 'start: e\ne: e e | "f" | "g" |', 16, 40)
    driver.step([replace(request, stop_strings=("fg",))])
    driver.run_until_idle()
    texts: dict[bool, list[bytes]] = {True: [], False: []}
    for delta in driver.deltas:
        assert delta.finish_reason == "stop"
        texts[delta.error == ""].append(b"".join(TOKEN_BYTES[token_id] for token_id in delta.token_ids))
    assert min(len(group) for group in texts.values()) > 2
    assert all(text.find(b"fg") == len(text) - 2 for text in texts[True])
    assert not any(b"fg" in text for text in texts[False])
    assert driver.state.lengths.recorded is not None
    assert driver.state.lengths.recorded.num_recorded == len(texts[True]), (
        "a failed sequence records no completion length"
    )
    driver.assert_nothing_is_left()


def test_a_panic_in_llguidance_ends_only_sequences_with_grammars(monkeypatch):
    """A panic in llguidance is a BaseException, not an Exception."""

    class Panic(BaseException):
        pass

    def fail(*_arguments):
        raise Panic("out of bounds")

    driver = make_driver()
    plain, other = make_request(1, 6, 2, 20, ignore_eos=True), grammar_request(2, ANYTHING, 2)
    driver.step([plain, other])
    driver.step([], 1)
    monkeypatch.setattr(grammar_matcher.MatcherThreads, "advance", fail)
    monkeypatch.setattr(grammar_matcher.MatcherThreads, "compile", fail)
    driver.step([grammar_request(3, MANY_STATES.grammar)])
    driver.run_until_idle()
    errors = errors_by_request(driver)
    assert errors.pop("r1") == {""}
    assert all("out of bounds" in error for error in errors["r2"] | errors["r3"])
    driver.assert_nothing_is_left()


def test_a_request_cancelled_while_its_grammar_compiles_leaves_no_state():
    driver = make_driver()
    driver.job_rate = 0.0
    driver.step([grammar_request(1, ANYTHING, 2), grammar_request(2, ANYTHING, 2), grammar_request(3, INVALID_GRAMMAR)])
    assert driver.state.stats().num_waiting == 5
    driver.step([CancelRequest("r1"), CancelRequest("r3")])
    assert driver.state.stats().num_waiting == 2
    driver.job_rate = 1.0
    driver.run_until_idle()
    assert {delta.request_id for delta in driver.deltas} == {"r2"}
    driver.assert_nothing_is_left()


def test_a_request_cancelled_while_its_matcher_reads_the_last_token_leaves_no_state():
    driver = make_driver()
    whole = LLMatcher.grammar_from_regex("d")
    driver.worker.requests = UncheckedRequests()
    driver.step([grammar_request(1, whole, 2), grammar_request(2, whole, 2)])
    driver.job_rate = 0.0
    driver.step([], len(driver.queue))
    assert driver.state.stats().num_running == 4
    driver.step([CancelRequest("r1")])
    driver.job_rate = 1.0
    driver.run_until_idle()
    assert {delta.request_id for delta in driver.deltas} == {"r2"}
    driver.assert_nothing_is_left()
