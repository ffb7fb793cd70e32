"""Likeliest tokens come with the tokens at whose places they were, whatever becomes of their sequence."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.helpers.engine_driver import Bench, EndsNext, Shape, make_options, make_requests
from tests.manager.helpers.fake_worker import likeliest, make_request, simulate
from tokasaurus.messages.generation import CancelRequest, SequenceDelta, TopLogprobs

SHAPES = st.builds(
    Shape,
    prefix=st.integers(0, 2),
    num_shared=st.integers(0, 12),
    num_fresh=st.integers(1, 8),
    num_sequences=st.integers(1, 3),
    max_new_tokens=st.integers(1, 24),
    stop_strings=st.sampled_from([(), (), ("ab",), ("é", "gf")]),
    ignore_eos=st.booleans(),
    want_logprobs=st.just(True),
)


def joined_top(deltas: list[SequenceDelta]) -> TopLogprobs | None:
    parts = [delta.top for delta in deltas if delta.top is not None]
    if not parts:
        return None
    assert len(parts) == len(deltas)
    assert [len(part.token_ids) for part in parts] == [len(delta.token_ids) for delta in deltas]
    return TopLogprobs(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.booleans(), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from(["always", "deferred"]),
    st.integers(0, 1000),
)
def test_top_is_that_of_each_token_streamed_or_not_and_put_back_or_not(shapes, mode, seed):
    options = make_options(20, deferred_tasks=mode)
    requests = [
        dataclasses.replace(request, is_streamed=is_streamed, num_top_logprobs=num_top)
        for request, (_, is_streamed, num_top) in zip(
            make_requests([shape for shape, _, _ in shapes], options.limits), shapes, strict=True
        )
    ]
    bench = Bench(options, forecast=EndsNext())
    bench.rng.seed(seed)
    bench.run(requests)
    for request in requests:
        for index in range(request.num_sequences):
            own = [d for d in bench.deltas if (d.request_id, d.sequence_index) == (request.request_id, index)]
            top = joined_top(own)
            token_ids, logprobs, _ = simulate(request, index)
            if request.num_top_logprobs == 0:
                assert top is None
                continue
            assert top is not None
            expected = likeliest(token_ids, logprobs, request.num_top_logprobs)
            assert top.token_ids.tolist() == expected.token_ids.tolist()
            assert top.logprobs.tolist() == expected.logprobs.tolist()
            assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)


def test_what_comes_for_a_cancelled_sequence_goes_to_none_that_has_its_slot_next():
    first, second = (
        dataclasses.replace(make_request(n, 5, 1, 30, ignore_eos=True, want_logprobs=True), num_top_logprobs=2)
        for n in (1, 2)
    )
    bench = Bench(make_options(200, max_seqs_per_forward=1), (0.01,))
    bench.turn([first, second])
    for _ in range(5):
        bench.turn([], 1)
    bench.turn([CancelRequest("r1")])
    bench.run_until_idle()
    (delta,) = bench.deltas
    assert delta.top is not None
    token_ids, logprobs, _ = simulate(second, 0)
    assert delta.top.token_ids.tolist() == likeliest(token_ids, logprobs, 2).token_ids.tolist()
