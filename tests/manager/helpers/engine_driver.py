"""A manager and a fake worker in one process, and the requests that they are given."""

import dataclasses
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.manager.helpers.block_accounting import assert_each_block_has_one_place, tree_nodes
from tests.manager.helpers.fake_prompt_logprobs import assert_prompt_logprobs_are_true, assert_stored_logprobs_are_true
from tests.manager.helpers.fake_worker import EOS_ID, VOCAB_SIZE, FakeWorker, decode_text, make_request, simulate
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.planning.length_predictor import Forecast
from tokasaurus.manager.state.engine_state import EngineOptions, LengthPredictorOptions, make_state
from tokasaurus.manager.state.grammar_manager import Grammars, Job
from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest, SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.text.grammars import GrammarVocabulary

NEVER_LEARNS = LengthPredictorOptions(learns=False, init_mean=0.01)
"""A sequence is expected to end with its first tokens, and to use all it may once it has not."""


class EndsNext:
    """The forecast that every sequence ends with its next token: far too many are admitted, preemption is constant."""

    def expected(
        self, num_generated: NDArray[np.int64], max_new_tokens: NDArray[np.int64], _ranks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.minimum(num_generated + 1, max_new_tokens)


def make_options(num_blocks: int = 20, page_size: int = 4, **changed: Any) -> EngineOptions:
    """A small engine; all lengths are expected to be the longest allowed."""
    values: dict[str, Any] = {
        "limits": EngineLimits(num_blocks, page_size, num_blocks * page_size),
        "max_tokens_per_forward": 16,
        "max_seqs_per_forward": 4,
        "max_steps_ahead": 8,
        "eos_ids": frozenset({EOS_ID}),
        "decode_text": decode_text,
        "special_ids": frozenset({EOS_ID}),
        "min_lookback_tokens": 1,
        "early_stopping": None,
    }
    return EngineOptions(**{**values, **changed})


@dataclass
class Bench:
    """One turn at a time: the worker computes some of the steps that it has been sent, then the manager has its turn.

    step_seconds: what the worker says that a step took, one of these at random.
    forecast: used throughout, in place of what `options` say.
    vocabulary: of grammars; None where there are none. jobs: that wait in their two lanes; a turn runs some at random,
    each with the probability job_rate.
    deltas: of all turns. most_in_flight: steps that the worker ever had at once.
    """

    options: EngineOptions = field(default_factory=make_options)
    step_seconds: tuple[float, ...] = (0.002, 0.01, 0.1)
    forecast: Forecast | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    queue: deque[ForwardInput] = field(default_factory=deque)
    deltas: list[SequenceDelta] = field(default_factory=list)
    most_in_flight: int = 0
    vocabulary: GrammarVocabulary | None = None
    jobs: tuple[deque[Job], deque[Job]] = field(default_factory=lambda: (deque(), deque()))

    def __post_init__(self) -> None:
        options = self.options
        self.worker = FakeWorker(options.limits, options.max_tokens_per_forward, options.max_seqs_per_forward)
        grammars = None
        self.job_rate = self.rng.choice([0.2, 0.7, 0.9])
        if self.vocabulary is not None:
            grammars = Grammars(self.vocabulary, 1, *(partial(self._add_job, lane) for lane in self.jobs))
        self.state = make_state(options, grammars)
        if self.forecast is not None:
            self.state.forecast = self.forecast
        self.engine = Engine(self.state, self.send)

    def send(self, message: ForwardInput) -> None:
        self.queue.append(message)
        self.most_in_flight = max(self.most_in_flight, len(self.queue))

    def turn(
        self, messages: Iterable[GenerateRequest | CancelRequest] = (), num_results: int = 0
    ) -> list[SequenceDelta]:
        """Up to `num_results` of the steps sent are computed; the deltas of the turn are returned."""
        messages = list(messages)
        requests = [message for message in messages if isinstance(message, GenerateRequest)]
        self.worker.requests.update((request.sampling.seed, request) for request in requests)
        for lane in self.jobs:
            self._run_jobs(lane)
        num_results = min(num_results, len(self.queue))
        results = [
            self.worker.forward(self.queue.popleft(), self.rng.choice(self.step_seconds)) for _ in range(num_results)
        ]
        self.engine.step(messages, results)
        deltas, self.state.deltas = self.state.deltas, []
        self.deltas += deltas
        assert len(self.state.steps_in_flight) == len(self.queue)
        return deltas

    def _add_job(self, lane: deque[Job], job: Job) -> None:
        lane.append(job)
        self._run_jobs(lane)

    def _run_jobs(self, lane: deque[Job]) -> None:
        while lane and self.rng.random() < self.job_rate:
            lane.popleft()()

    def run_until_idle(self, most_results: int = 3) -> None:
        while self.queue or any(self.jobs):
            self.turn([], self.rng.randint(1, most_results))
        assert self.state.queues.num_waiting == 0, "nothing is sent although sequences wait"

    def run(self, requests: Iterable[GenerateRequest], cancelled: Iterable[str] = (), check_share: float = 0.1) -> None:
        """`requests` come at random moments, in their order; those whose ids are `cancelled` are, at random moments
        after that, some of them twice. The places of all blocks are checked after that share of the turns."""
        unsent, to_cancel, cancelled = deque(requests), [], set(cancelled)
        while unsent or self.queue or to_cancel or any(self.jobs) or self.state.queues.num_waiting:
            messages: list[GenerateRequest | CancelRequest] = []
            while unsent and self.rng.random() < 0.5:
                messages.append(unsent.popleft())
                if messages[-1].request_id in cancelled:
                    to_cancel += [messages[-1].request_id] * self.rng.choice([1, 1, 2])
            self.rng.shuffle(to_cancel)
            while to_cancel and self.rng.random() < 0.2:
                messages.append(CancelRequest(to_cancel.pop()))
            self.turn(messages, self.rng.randint(0, 3))
            if self.rng.random() < check_share:
                assert_each_block_has_one_place(self.state)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.state.sequences if sequence is not None]

    def assert_nothing_is_left(self) -> None:
        """After all work: no trace of a sequence, every slot free, what is cached is what the worker has there, and
        every block to be had."""
        assert not self.turn()
        state, num_slots = self.state, self.options.num_slots
        stats = state.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, stats.worker_queue_depth) == (0,) * 4
        assert not state.unfinished
        assert not state.has_uncounted
        assert state.num_with_stops == state.num_with_stop_tokens == state.num_with_grammars == 0
        assert not state.slots.has_grammar.any()
        assert not state.slots.awaits_matcher.any()
        assert (state.slots.stop_token_ids == -1).all()
        assert state.sequences == [None] * (num_slots + 1)
        assert sorted(state.free_slots) == list(range(1, num_slots + 1))
        assert not state.slots.is_running.any()
        assert not state.slots.is_decoding.any()
        assert not state.slots.block_tables.any()
        assert not state.queues.prefilling
        assert not len(state.queues.decoding())
        assert_each_block_has_one_place(state)
        for node in tree_nodes(state):
            assert state.blocks.is_computed[node.blocks].all()
            assert self.worker.memory[node.blocks].astype(np.int32).tobytes() == node.tokens
        if state.blocks.prompt_logprobs is not None:
            assert not (state.blocks.prompt_logprobs.num_top > np.where(state.blocks.is_computed, 1 << 30, -1)).any()
            assert_stored_logprobs_are_true(state, state.blocks.prompt_logprobs)
        num_blocks = state.blocks.num_blocks
        assert sorted(state.blocks.allocate(num_blocks).tolist()) == list(range(1, num_blocks + 1))
        assert state.blocks.tree.num_blocks == 0


@dataclass(frozen=True)
class Shape:
    """What a random request is made of.

    prefix: its prompt begins with `num_shared` tokens of one of a few long texts; or, if negative, with the prompt and
    the completion of the request so many before it, cut to that length, as the next turn of a conversation does.
    prompt_top: of how many likeliest tokens prompt log-probabilities are wanted, None for no log-probabilities.
    """

    prefix: int
    num_shared: int
    num_fresh: int
    num_sequences: int
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = True
    want_logprobs: bool = False
    cache_salt: str = ""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    prompt_top: int | None = None
    grammar: str = ""


def make_requests(shapes: Iterable[Shape], limits: EngineLimits) -> list[GenerateRequest]:
    """r0, r1, ... with seeds 0, 1, ...; prompts are cut to what fits."""
    requests: list[GenerateRequest] = []
    for number, shape in enumerate(shapes):
        if shape.prefix < 0 and requests:
            before = requests[max(0, number + shape.prefix)]
            text = [*before.prompt_ids.tolist(), *simulate(before, 0)[0]]
        else:
            text = np.random.default_rng([shape.prefix + 100, 7]).integers(0, VOCAB_SIZE, 200).tolist()
        fresh = np.random.default_rng([number, 9]).integers(0, VOCAB_SIZE, shape.num_fresh).tolist()
        most = limits.max_tokens_per_sequence - shape.max_new_tokens
        prompt_ids = [*text[: shape.num_shared], *fresh][:most] or [1]
        request = make_request(
            number,
            1,
            shape.num_sequences,
            shape.max_new_tokens,
            shape.stop_strings,
            shape.ignore_eos,
            shape.want_logprobs,
        )
        requests.append(
            dataclasses.replace(
                request,
                prompt_ids=np.array(prompt_ids, np.int32),
                cache_salt=shape.cache_salt,
                stop_token_ids=shape.stop_token_ids,
                min_tokens=min(shape.min_tokens, shape.max_new_tokens),
                want_prompt_logprobs=shape.prompt_top is not None,
                num_top_prompt_logprobs=shape.prompt_top or 0,
                grammar=shape.grammar,
            )
        )
    return requests


def sequence_keys(requests: Iterable[GenerateRequest]) -> list[tuple[int, int]]:
    """(seed, sample index) of every sequence, in order of arrival: how the fake worker names them."""
    return [(request.sampling.seed, index) for request in requests for index in range(request.num_sequences)]


def assert_equals_simulation(deltas: list[SequenceDelta], requests: list[GenerateRequest]) -> None:
    """`deltas` are the true ones of distinct sequences of `requests`."""
    by_id = {request.request_id: request for request in requests}
    assert len({(delta.request_id, delta.sequence_index) for delta in deltas}) == len(deltas)
    for delta in deltas:
        request = by_id[delta.request_id]
        token_ids, logprobs, finish_reason = simulate(request, delta.sequence_index)
        assert (delta.token_ids, delta.finish_reason) == (token_ids, finish_reason)
        assert delta.logprobs == (logprobs if request.want_logprobs else None)
        assert (delta.prompt_logprobs is not None) == (request.want_prompt_logprobs and delta.sequence_index == 0)
        if delta.prompt_logprobs is not None:
            assert_prompt_logprobs_are_true(
                delta.prompt_logprobs, request.prompt_ids.tolist(), request.num_top_prompt_logprobs
            )
