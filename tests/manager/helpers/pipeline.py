"""The real engine before simulated pipeline stages, in simulated time."""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.manager.helpers.engine_driver import make_options
from tests.manager.helpers.fake_worker import FakeWorker
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.state.engine_state import make_state
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta

SECONDS_OF_STEP, SECONDS_OF_TOKEN = 0.01, 0.0002
"""Of a stage: for any step, and for each of its tokens."""


@dataclass
class Pipeline:
    """Each stage runs steps one by one, in order. The first waits for the tokens that its decode rows need, which
    the last stage has sampled; nothing else takes time."""

    factors: list[float]
    """Of each stage: how many times as long as SECONDS_OF_STEP and SECONDS_OF_TOKEN say it takes."""
    num_microbatches: int
    num_slots: int
    max_tokens: int = 512
    delay_s: float = 0.0
    """From the end of a step until the manager has its result."""
    now_s: float = 0.0
    events: list[tuple[float, int, ForwardInput, float]] = field(default_factory=list)
    """When the manager gets the result of each step that was sent, and how long the last stage says that it took."""
    sent_s: list[float] = field(default_factory=list)
    """By step."""
    busy_s: list[tuple[float, float]] = field(default_factory=list)
    """Of the slowest stage: when each step began and ended."""
    deltas: list[tuple[float, SequenceDelta]] = field(default_factory=list)
    first_steps: dict[int, int] = field(default_factory=dict)
    """By seed of a request: the first step that computes something of it."""
    first_token_steps: dict[int, int] = field(default_factory=dict)
    """By seed of a request: the step that samples its first token."""

    def __post_init__(self) -> None:
        options = make_options(
            *(100_000, 16),
            max_tokens_per_forward=self.max_tokens,
            max_seqs_per_forward=self.num_slots,
            pp_size=len(self.factors),
            num_microbatches=self.num_microbatches,
            deferred_tasks="always",
        )
        self.worker = FakeWorker(
            options.limits, options.config.max_tokens_per_forward, options.config.max_seqs_per_forward
        )
        self.state = make_state(options)
        self.engine = Engine(self.state, self._send)
        self._free_s = [0.0] * len(self.factors)
        self._tokens_s = np.zeros(self.num_slots + 1)
        """Of each slot: when its last token is sampled."""

    def _send(self, message: ForwardInput) -> None:
        """Work out at once when each stage runs the step: nothing that comes later changes it."""
        seconds = SECONDS_OF_STEP + SECONDS_OF_TOKEN * int(message.num_tokens.sum())
        last_busy_s = max(self.now_s, self._free_s[-1])
        ready_s = max(self.now_s, self._tokens_s[message.slots[: message.num_decode]].max(initial=0.0))
        for stage, factor in enumerate(self.factors):
            begin_s = max(ready_s, self._free_s[stage])
            ready_s = self._free_s[stage] = begin_s + factor * seconds
            if factor == max(self.factors) and stage == self.factors.index(factor):
                self.busy_s.append((begin_s, ready_s))
        self._tokens_s[message.slots] = ready_s
        # The last stage waits for hidden states within its step, and cannot tell that from computing.
        heapq.heappush(self.events, (ready_s + self.delay_s, message.step_id, message, ready_s - last_busy_s))
        self.sent_s.append(self.now_s)
        if message.changes.opened is not None:
            for seed in message.changes.opened.seeds.tolist():
                self.first_steps.setdefault(seed, message.step_id)
        for slot in self.state.steps_in_flight[-1].sampled.tolist():
            sequence = self.state.slots.sequences[slot]
            assert sequence is not None
            self.first_token_steps.setdefault(sequence.request.seed, message.step_id)

    def run(self, arrivals: Iterator[tuple[float, GenerateRequest]]) -> None:
        """arrivals: requests and when they come, in order. Runs until all have finished."""
        arrival = next(arrivals, None)
        while arrival is not None or self.events:
            if arrival is not None and (not self.events or arrival[0] <= self.events[0][0]):
                self.now_s = max(self.now_s, arrival[0])
                self.engine.step([arrival[1]], [])
                arrival = next(arrivals, None)
            else:
                self.now_s, _, message, seconds = heapq.heappop(self.events)
                self.engine.step([], [self.worker.forward(message, seconds)])
            self.deltas += [(self.now_s, delta) for delta in self.state.deltas]
            self.state.deltas = []

    def first_stage_busy_s(self) -> float:
        """How long the first stage is busy with what it has been sent, if tokens that it waits for come in time."""
        return max(0.0, self._free_s[0] - self.now_s)

    def busy_share(self, start_s: float, end_s: float) -> float:
        """Of the slowest stage, between two moments."""
        inside = (min(end, end_s) - max(begin, start_s) for begin, end in self.busy_s)
        return sum(max(0.0, seconds) for seconds in inside) / (end_s - start_s)


def at_once(requests: list[GenerateRequest]) -> Iterator[tuple[float, GenerateRequest]]:
    return zip(itertools.repeat(0.0), requests)


def spread(requests: list[GenerateRequest], per_second: float, seed: int) -> Iterator[tuple[float, GenerateRequest]]:
    """Poisson arrivals."""
    rng, now_s = random.Random(seed), 0.0
    for request in requests:
        now_s += rng.expovariate(per_second)
        yield now_s, request
