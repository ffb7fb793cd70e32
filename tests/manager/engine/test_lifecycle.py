"""Tests which blocks sequences find in the prefix tree, against a list of all cached texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import Shape, make_requests
from tests.manager.helpers.simulation import assert_equals_simulation, simulate
from tests.manager.helpers.strategies import CACHE_SALTS, random_shape
from tokasaurus.manager.state.sequence import Phase
from tokasaurus.messages.generation import CancelRequest, GenerateRequest

PAGE_SIZE = 4

shapes_strategy = st.lists(
    random_shape(
        num_sequences=st.integers(1, 3), max_new_tokens=st.integers(1, 12), cache_salt=st.sampled_from(CACHE_SALTS)
    ),
    min_size=1,
    max_size=8,
)


class Texts:
    """All texts whose whole blocks are cached."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, list[int]]] = []

    def num_cached(self, request: GenerateRequest) -> int:
        """Prompt tokens that need not be computed: those of whole blocks, but for the last token."""
        prompt, most = request.prompt_ids.tolist(), 0
        for salt, text in self.texts:
            for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE):
                if salt == request.cache_salt and text[:end] == prompt[:end]:
                    most = max(most, min(end, len(prompt) - 1))
        return most

    def add(self, request: GenerateRequest, completion: list[int]) -> None:
        self.texts.append((request.cache_salt, [*request.prompt_ids.tolist(), *completion]))


@examples(200)
@given(shapes=shapes_strategy, max_tokens=st.integers(1, 40))
def test_a_request_reuses_all_earlier_prompts_and_completions(shapes, max_tokens):
    """Requests come one after the other; nothing is ever evicted."""
    driver = EngineDriver(make_options(1000, PAGE_SIZE, max_tokens_per_forward=max_tokens))
    texts, expected = Texts(), {}
    requests = make_requests(shapes, make_options(20, PAGE_SIZE).limits)
    for request in requests:
        for index in range(request.num_sequences):
            expected[request.request_id, index] = texts.num_cached(request)
            texts.add(request, [])
        driver.step([request])
        driver.run_until_idle()
        for index in range(request.num_sequences):
            texts.add(request, simulate(request, index)[0][:-1])
    assert {(delta.request_id, delta.sequence_index): delta.num_cached_tokens for delta in driver.deltas} == expected
    assert driver.state.stats().total_prefix_cache_hit_tokens == sum(expected.values())
    assert_equals_simulation(driver.deltas, requests)


@examples(200)
@given(shapes=shapes_strategy, max_tokens=st.integers(24, 40))
def test_simultaneous_requests_share_blocks_that_are_not_computed_yet(shapes, max_tokens):
    """Requests arrive at once; of the sequences that share a block, the first one computes it."""
    driver = EngineDriver(make_options(1000, PAGE_SIZE, max_tokens_per_forward=max_tokens, max_seqs_per_forward=24))
    texts, expected = Texts(), {}
    requests = make_requests(shapes, make_options(20, PAGE_SIZE).limits)
    for request in requests:
        for index in range(request.num_sequences):
            expected[request.request_id, index] = texts.num_cached(request)
            texts.add(request, [])
    driver.step(requests)
    assert len(driver.running()) == len(expected)
    driver.run_until_idle()
    assert {(delta.request_id, delta.sequence_index): delta.num_cached_tokens for delta in driver.deltas} == expected
    assert_equals_simulation(driver.deltas, requests)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_another_request_computes_the_blocks_missing_after_a_cancel(num_steps):
    """Prompts of 41, 42 and 43 tokens in steps of 6 tokens: whole blocks that were sent to the worker stay cached, and
    the first of the other two requests computes the remaining ones for both."""
    options = make_options(60, PAGE_SIZE, max_tokens_per_forward=6, max_seqs_per_forward=6, scheduling_steps_ahead=1)
    driver = EngineDriver(options)
    cancelled, other, last = make_requests([Shape(0, 40, 1 + number, 1, 3) for number in range(3)], options.limits)
    driver.step([cancelled, other, last])
    for _ in range(num_steps - 1):
        driver.step([], 1)
    assert [sequence.phase for sequence in driver.running()] == [Phase.PREFILL] * 3
    driver.step([CancelRequest(cancelled.request_id)])
    assert_each_block_has_one_owner(driver.state)
    driver.run_until_idle()
    starts = driver.worker.first_positions
    assert (starts[1, 0], starts[2, 0]) == (6 * num_steps // PAGE_SIZE * PAGE_SIZE, 40)
    assert_equals_simulation(driver.deltas, [cancelled, other, last])
    assert [delta.request_id for delta in driver.deltas] == ["r1", "r2"]
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("num_prompt_tokens", [2, 3, 4, 5, 9])
def test_cache_salts_separate_cached_completions(num_prompt_tokens):
    """A conversation continues under three salts, one of them its original salt."""
    driver = EngineDriver(make_options(100, PAGE_SIZE))
    begin = Shape(0, num_prompt_tokens, 0, 1, 12, cache_salt="x")
    follow = [Shape(-number, 100, 1, 1, 1, cache_salt=salt) for number, salt in enumerate(["", "y", "x"], 1)]
    begin, *follow = make_requests([begin, *follow], driver.options.limits)
    for requests in ([begin], follow):
        driver.step(requests)
        driver.run_until_idle()
    num_computed = num_prompt_tokens + 11
    by_salt = {follow[int(delta.request_id[1:]) - 1].cache_salt: delta for delta in driver.deltas[1:]}
    assert {salt: delta.num_cached_tokens for salt, delta in by_salt.items()} == {
        "": 0,
        "y": 0,
        "x": num_computed // PAGE_SIZE * PAGE_SIZE,
    }
    assert all(len(request.prompt_ids) > num_computed for request in follow)
