"""Top-k logprobs arrive with the tokens they belong to, whatever happens to their sequence."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request, make_requests
from tests.manager.helpers.simulation import most_likely, simulate
from tests.manager.helpers.strategies import random_shape
from tokasaurus.messages.generation import CancelRequest, SequenceDelta, TopLogprobs

SHAPES = random_shape(
    stop_strings=st.sampled_from([(), (), ("ab",), ("é", "gf")]), ignore_eos=st.booleans(), want_logprobs=st.just(True)
)


def joined_top_logprobs(deltas: list[SequenceDelta]) -> TopLogprobs | None:
    parts = [delta.top for delta in deltas if delta.top is not None]
    if not parts:
        return None
    assert len(parts) == len(deltas)
    assert [len(part.token_ids) for part in parts] == [len(delta.token_ids) for delta in deltas]
    return TopLogprobs(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


@examples(60)
@given(
    st.lists(st.tuples(SHAPES, st.booleans(), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from(["always", "deferred"]),
    st.integers(0, 1000),
)
def test_each_token_has_its_top_logprobs_despite_streaming_and_preemption(shapes, mode, seed):
    options = make_options(20, deferred_tasks=mode)
    requests = [
        dataclasses.replace(request, is_streamed=is_streamed, num_top_logprobs=num_top)
        for request, (_, is_streamed, num_top) in zip(
            make_requests([shape for shape, _, _ in shapes], options.limits), shapes, strict=True
        )
    ]
    driver = EngineDriver(options, forecast=EndsNext())
    driver.rng.seed(seed)
    driver.run(requests)
    for request in requests:
        for index in range(request.num_sequences):
            own = [d for d in driver.deltas if (d.request_id, d.sequence_index) == (request.request_id, index)]
            top = joined_top_logprobs(own)
            token_ids, logprobs, _ = simulate(request, index)
            if request.num_top_logprobs == 0:
                assert top is None
                continue
            assert top is not None
            expected = most_likely(token_ids, logprobs, request.num_top_logprobs)
            assert top.token_ids.tolist() == expected.token_ids.tolist()
            assert top.logprobs.tolist() == expected.logprobs.tolist()
            assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)


def test_results_of_a_cancelled_sequence_do_not_reach_the_next_owner_of_its_slot():
    first, second = (
        dataclasses.replace(make_request(n, 5, 1, 30, ignore_eos=True, want_logprobs=True), num_top_logprobs=2)
        for n in (1, 2)
    )
    driver = EngineDriver(make_options(200, max_seqs_per_forward=1), (0.01,))
    driver.step([first, second])
    for _ in range(5):
        driver.step([], 1)
    driver.step([CancelRequest("r1")])
    driver.run_until_idle()
    (delta,) = driver.deltas
    assert delta.top is not None
    token_ids, logprobs, _ = simulate(second, 0)
    assert delta.top.token_ids.tolist() == most_likely(token_ids, logprobs, 2).token_ids.tolist()
