"""The whole manager against a worker that checks every message, and against token-by-token simulation."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manager.fake_worker import EOS_ID, FakeWorker, decode_text, make_request, simulate
from tokasaurus.manager.loop import is_worth_an_update, take_turn
from tokasaurus.manager.state import EngineOptions, EngineState, make_state
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest, SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats


@dataclass
class Bench:
    """A manager and a fake worker in one process, a turn at a time. A turn's cancellations follow its requests."""

    num_blocks: int = 20
    page_size: int = 4
    max_tokens: int = 16
    max_seqs: int = 4
    max_steps_ahead: int = 8
    step_seconds: tuple[float, ...] = (0.002, 0.01, 0.1)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    queue: deque[ForwardInput] = field(default_factory=deque)
    deltas: list[SequenceDelta] = field(default_factory=list)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        limits = EngineLimits(self.num_blocks, self.page_size, self.num_blocks * self.page_size)
        self.worker = FakeWorker(limits, self.max_tokens, self.max_seqs)
        self.state: EngineState = make_state(
            EngineOptions(
                limits=limits,
                max_tokens_per_forward=self.max_tokens,
                max_seqs_per_forward=self.max_seqs,
                max_steps_ahead=self.max_steps_ahead,
                eos_ids=frozenset({EOS_ID}),
                decode_text=decode_text,
                special_ids=frozenset({EOS_ID}),
                min_lookback_tokens=1,
            )
        )

    def turn(self, messages: list[GenerateRequest | CancelRequest], num_steps: int) -> list[SequenceDelta]:
        """The worker computes up to `num_steps` of what it has been sent; then the manager has its turn."""
        results: list[ForwardOutput] = [
            self.worker.forward(self.queue.popleft(), self.rng.choice(self.step_seconds))
            for _ in range(min(num_steps, len(self.queue)))
        ]
        deltas = take_turn(self.state, messages, results, self.queue.append)
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        assert self.state.stats().num_kv_blocks_used <= self.state.num_blocks_reserved <= self.num_blocks
        assert self.state.stats().worker_queue_depth == len(self.queue)
        self.deltas += deltas
        return deltas

    def run_until_idle(self) -> None:
        while self.queue:
            self.turn([], self.rng.randint(1, 3))
        assert not self.state.queues.waiting, "nothing is sent although sequences wait"

    def assert_nothing_is_left(self) -> None:
        stats = self.state.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, stats.worker_queue_depth) == (0,) * 4
        assert sorted(self.state.free_slots) == list(range(1, self.max_seqs + 1))
        assert sorted(self.state.blocks.take(self.num_blocks)) == list(range(1, self.num_blocks + 1))
        assert self.state.num_blocks_reserved == 0
        assert not self.state.unfinished


def assert_equals_simulation(deltas: list[SequenceDelta], requests: list[GenerateRequest]) -> None:
    """`deltas` are the true ones of distinct sequences of `requests`."""
    by_id = {request.request_id: request for request in requests}
    assert len({(delta.request_id, delta.sequence_index) for delta in deltas}) == len(deltas)
    for delta in deltas:
        request = by_id[delta.request_id]
        token_ids, logprobs, finish_reason = simulate(request, delta.sequence_index)
        assert (delta.token_ids, delta.finish_reason) == (token_ids, finish_reason)
        assert delta.logprobs == (logprobs if request.want_logprobs else None)


requests_strategy = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 4),  # sequences
        st.integers(1, 24),  # max_new_tokens
        st.sampled_from([(), (), ("ab",), ("éa", "cc"), ("abc", "bcab", "é"), ("abababab", "b")]),
        st.booleans(),  # ignore_eos
        st.booleans(),  # want_logprobs
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    shapes=requests_strategy,
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 60),
    page_size=st.sampled_from([4, 7]),
    max_tokens=st.integers(1, 40),
    max_seqs=st.integers(1, 8),
    max_steps_ahead=st.sampled_from([1, 2, 3, 8]),
    cancel_share=st.sampled_from([0.0, 0.3]),
)
def test_every_sequence_equals_its_simulation_and_nothing_is_left(
    shapes, seed, num_blocks, page_size, max_tokens, max_seqs, max_steps_ahead, cancel_share
):
    rng = random.Random(seed)
    bench = Bench(num_blocks, page_size, max_tokens, max_seqs, max_steps_ahead, rng=rng)
    requests = [make_request(number, *shape) for number, shape in enumerate(shapes)]
    cancelled = {request.request_id for request in requests if rng.random() < cancel_share}
    unsent, uncancelled = deque(requests), []
    while unsent or bench.queue or uncancelled:
        messages: list[GenerateRequest | CancelRequest] = []
        while unsent and rng.random() < 0.5:
            request = unsent.popleft()
            messages.append(request)
            if request.request_id in cancelled:
                uncancelled.append(request.request_id)
        rng.shuffle(uncancelled)
        while uncancelled and rng.random() < 0.2:
            messages.append(CancelRequest(uncancelled.pop()))
        bench.turn(messages, rng.randint(0, 3))
    bench.run_until_idle()

    assert_equals_simulation(bench.deltas, requests)
    finished = {(delta.request_id, delta.sequence_index) for delta in bench.deltas}
    for request in requests:
        for index in range(request.num_sequences):
            assert (request.request_id, index) in finished or request.request_id in cancelled
            assert bench.worker.num_sampled.get((request.sampling.seed, index), 0) <= request.max_new_tokens
    submitted = [(request.sampling.seed, index) for request in requests for index in range(request.num_sequences)]
    ranks = [submitted.index(opened) for opened in bench.worker.opened]
    assert ranks == sorted(ranks), "first come first served"
    num_returned = sum(len(delta.token_ids) for delta in bench.deltas)
    stats = bench.state.stats()
    if cancelled:
        assert stats.total_generation_tokens >= num_returned
    else:
        assert stats.total_generation_tokens == num_returned
        assert stats.total_prompt_tokens == sum(len(request.prompt_ids) for request in requests)
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("step_seconds", [0.0001, 0.01])
def test_look_ahead_changes_no_token(step_seconds):
    requests = [make_request(n, 3 + 5 * n, 3, 20, ("abc",) if n % 2 else ()) for n in range(6)]
    results = []
    for max_steps_ahead in (1, 8):
        bench = Bench(max_steps_ahead=max_steps_ahead, step_seconds=(step_seconds,))
        bench.turn(requests, 0)
        bench.run_until_idle()
        results.append({(delta.request_id, delta.sequence_index): delta.token_ids for delta in bench.deltas})
        assert (
            bench.most_in_flight
            == {(1, 0.0001): 1, (1, 0.01): 1, (8, 0.0001): 8, (8, 0.01): 4}[max_steps_ahead, step_seconds]
        )
    assert results[0] == results[1]
    assert len(results[0]) == 18


@pytest.mark.parametrize("turns_before", range(12))
def test_a_cancelled_request_frees_its_blocks_in_the_same_turn(turns_before):
    """Waiting, chunked prefill, decode, all of it sent: the number of turns decides where the request is."""
    kept = make_request(1, 30, 1, 16, ignore_eos=True)
    gone = make_request(2, 30, 2, 12, ignore_eos=True)
    bench = Bench(num_blocks=30)
    bench.turn([kept, gone], 0)
    for _ in range(turns_before):
        bench.turn([], 1)
    bench.turn([CancelRequest("r2"), CancelRequest("never seen")], 0)
    kept_only = [sequence for sequences in bench.state.unfinished.values() for sequence in sequences]
    assert all(sequence.request is kept for sequence in kept_only)
    assert bench.state.stats().num_kv_blocks_used == sum(len(sequence.block_table) for sequence in kept_only)
    bench.run_until_idle()
    assert [delta.request_id for delta in bench.deltas] == ["r1"]
    assert_equals_simulation(bench.deltas, [kept])
    bench.turn([CancelRequest("r1")], 0)
    bench.assert_nothing_is_left()


def test_all_prompts_and_decodes_share_the_steps():
    """A long prompt does not stop the others from decoding, and takes no more steps than its tokens need."""
    bench = Bench(num_blocks=60, max_tokens=10, max_steps_ahead=1)
    short = make_request(1, 4, 1, 30, ignore_eos=True)
    long = make_request(2, 90, 1, 1, ignore_eos=True)
    bench.turn([short], 0)
    bench.turn([long], 1)
    num_turns = 0
    while not bench.deltas:
        bench.turn([], 1)
        num_turns += 1
    assert bench.deltas[0].request_id == "r2"
    assert num_turns == 10, "90 prompt tokens, 9 in each step beside the one that decodes"
    (sequence,) = bench.state.unfinished["r1"]
    assert len(sequence.token_ids) == 1 + num_turns


def test_a_stop_at_the_last_allowed_token_is_a_stop():
    for number in range(200):
        request = make_request(number, max_new_tokens=64)
        token_ids, _, finish_reason = simulate(request, 0)
        if finish_reason == "stop" and len(token_ids) > 1:
            break
    exact = make_request(number, max_new_tokens=len(token_ids))
    shorter = make_request(number, max_new_tokens=len(token_ids) - 1)
    for request, reason in ((exact, "stop"), (shorter, "length")):
        bench = Bench()
        bench.turn([request], 0)
        bench.run_until_idle()
        assert [delta.finish_reason for delta in bench.deltas] == [reason]


def make_stats(**changed: int) -> EngineStats:
    values = dict.fromkeys(EngineStats.__slots__, 0)
    return EngineStats(**{**values, "num_kv_blocks_total": 9, **changed})


@pytest.mark.parametrize(
    ("now", "last", "seconds", "expected"),
    [
        ({}, {}, 100.0, False),
        ({"num_running": 1}, {}, 0.0, True),
        ({"num_waiting": 1}, {}, 0.0, True),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.1, False),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.3, True),
        ({"worker_queue_depth": 1}, {"worker_queue_depth": 2}, 0.1, False),
        ({}, {"worker_queue_depth": 1}, 0.0, True),
    ],
)
def test_the_server_hears_of_starts_ends_and_idleness_at_once(now, last, seconds, expected):
    assert is_worth_an_update(make_stats(**now), make_stats(**last), seconds) is expected
