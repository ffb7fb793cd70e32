"""What is made of results: which texts are decoded, and which tokens count."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import assert_equals_simulation, decode_text, simulate
from tests.manager.helpers.strategies import STOP_TOKENS
from tokasaurus.manager.engine.lifecycle import sampled_tokens
from tokasaurus.manager.engine.outputs import apply_output
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.text.stop_strings import StopTokens


def run_counting_texts(stop_strings: tuple[str, ...], mode: str, stop_tokens: StopTokens | None) -> int:
    """How many texts are decoded for one sequence of 60 tokens that completes none of `stop_strings`."""
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode_text(list(token_ids))

    request = make_request(4, 5, 1, 60, stop_strings, ignore_eos=True)
    driver = EngineDriver(make_options(decode_text=decode, deferred_tasks=mode, stop_tokens=stop_tokens), (0.01,))
    driver.step([request])
    driver.run_until_idle(1)
    assert_equals_simulation(driver.deltas, [request])
    assert [delta.finish_reason for delta in driver.deltas] == ["length"]
    return len(decoded)


def test_texts_are_decoded_only_where_a_stop_string_may_have_ended():
    stop_strings = ("gggg",)
    may_end = [
        token_id for token_id in simulate(make_request(4, 5, 1, 60, (), True), 0)[0] if token_id in (4, 5, 6, 11)
    ]
    assert 10 < len(may_end) < 50
    assert run_counting_texts(stop_strings, "always", None) == 60
    assert run_counting_texts(stop_strings, "always", STOP_TOKENS) <= len(may_end) + 1
    assert run_counting_texts(stop_strings, "deferred", None) <= 60 / 8 + 2


@pytest.mark.parametrize("mode", ["always", "deferred"])
def test_tokens_behind_a_stop_string_or_of_a_cancelled_request_count_nowhere(mode):
    """Steps are sent ahead, so the worker samples more than is kept."""
    requests = [make_request(n, 5, 2, 60, ("ab", "c"), want_logprobs=True) for n in range(4)]
    gone = make_request(9, 5, 1, 60, ignore_eos=True)
    driver = EngineDriver(
        make_options(200, max_seqs_per_forward=9, deferred_tasks=mode, stop_tokens=STOP_TOKENS), (0.01,)
    )
    driver.step([*requests, gone])
    for _ in range(5):
        driver.step([], 1)
    (sequence,) = driver.state.unfinished["r9"]
    num_before = len(sampled_tokens(driver.state, sequence))
    driver.step([CancelRequest("r9")])
    driver.run_until_idle()
    driver.step()
    assert_equals_simulation(driver.deltas, requests)
    assert len(driver.deltas) == 8
    num_kept = sum(len(delta.token_ids) for delta in driver.deltas)
    assert sum(driver.worker.num_sampled.values()) > num_kept + num_before > num_kept
    assert driver.state.stats().total_generation_tokens == num_kept + num_before


def test_recompiles_of_every_step_are_counted():
    driver = EngineDriver()
    driver.step([make_request(1)])
    for step, num_recompiles in zip(list(driver.state.steps_in_flight), (2, 1), strict=True):
        tokens = np.ones(len(step.sampled), np.int32)
        apply_output(driver.state, ForwardOutput(step.step_id, tokens, None, 0.01, num_recompiles))
    assert driver.state.stats().total_recompiles == 3


@pytest.mark.parametrize(("step_id", "num_tokens"), [(1, 1), (0, 2)])
def test_a_result_of_another_step_or_of_other_rows_is_an_error(step_id, num_tokens):
    driver = EngineDriver()
    driver.step([make_request(1)])
    with pytest.raises(AssertionError):
        apply_output(driver.state, ForwardOutput(step_id, np.zeros(num_tokens, np.int32), None, 0.01))
