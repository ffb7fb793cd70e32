"""Requests with grammars, and an engine that runs them."""

from dataclasses import replace
from typing import Any

from llguidance import LLMatcher

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.fake_grammars import Language, fake_vocabulary
from tests.manager.helpers.requests import make_request
from tokasaurus.messages.generation import GenerateRequest

ANYTHING = LLMatcher.grammar_from_regex("[abcdfg]*")


MANY_STATES = Language(LLMatcher.grammar_from_regex("[abcdfg]*a[abcdfg]{6}"), b"[abcdfg]*", b"[abcdfg]*a[abcdfg]{6}")


VOCABULARY = fake_vocabulary()


def grammar_request(number: int, grammar: str, num_sequences: int = 1, max_new_tokens: int = 30) -> GenerateRequest:
    request = make_request(number, 6, num_sequences, max_new_tokens, ignore_eos=True)
    return replace(request, grammar=grammar)


def make_driver(**changed: Any) -> EngineDriver:
    driver = EngineDriver(make_options(200, max_seqs_per_forward=16, **changed), (0.01,), vocabulary=VOCABULARY)
    driver.job_rate = 1.0
    return driver


class UncheckedRequests(dict[int, GenerateRequest]):
    """Replaces FakeWorker.requests so that masks are not compared with the grammars."""

    def update(self, *_arguments: Any, **_changes: Any) -> None:
        pass
