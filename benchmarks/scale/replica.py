"""One replica: a real manager, and a device that computes nothing and takes the time of a step."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.manager.load import engine_options
from benchmarks.scale.clock import VirtualClock
from benchmarks.scale.load import FIRST_ID, VOCABULARY
from benchmarks.scale.step_times import StepTimes
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.planning.step_budget import make_step_limit
from tokasaurus.manager.state.engine_state import EngineOptions, EngineState, make_state
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client.replicas import Replica

_TOKENS = np.random.default_rng(3).integers(FIRST_ID, VOCABULARY, 1 << 16, dtype=np.int32)


def make_options(limits: EngineLimits, max_seqs_per_forward: int, max_tokens_per_forward: int) -> EngineOptions:
    """The engine's default options, without prefix groups."""
    made = engine_options(limits.num_kv_blocks * limits.page_size, max_seqs_per_forward, max_tokens_per_forward)
    return replace(made, limits=limits, hydragen=None, step_limit=make_step_limit(None, limits.seconds_per_step))


class Device:
    """Random tokens for the rows that sample. No sequence ends by itself: requests ignore the end token."""

    def __init__(self, num_slots: int) -> None:
        self._num_tokens = np.zeros(num_slots + 1, np.int64)
        self._num_prompt_tokens = np.zeros(num_slots + 1, np.int64)
        self._next_token = 0

    def forward(self, message: ForwardInput, seconds: float) -> ForwardOutput:
        opened, num_decode = message.changes.opened, message.num_decode
        if opened is not None:
            self._num_tokens[opened.slots] = opened.first_positions
            self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens
        slots = message.slots
        num_tokens = self._num_tokens[slots] + message.num_tokens
        self._num_tokens[slots] = num_tokens
        prefilled = num_tokens[num_decode:] >= self._num_prompt_tokens[slots[num_decode:]]
        num_sampled = num_decode + int(prefilled.sum())
        self._next_token = (self._next_token + 1) % (len(_TOKENS) - len(slots))
        return ForwardOutput(
            message.step_id, _TOKENS[self._next_token : self._next_token + num_sampled].copy(), None, seconds
        )


class SimulatedReplica:
    """Alive from the start. Times are the clock's."""

    def __init__(self, index: int, options: EngineOptions, times: StepTimes, clock: VirtualClock) -> None:
        self.known = Replica(index=index)
        """What the server knows of it."""
        self.num_lives = 0
        self.is_leaving = False
        """It gets no new requests, since it will be updated."""
        self.busy_s = 0.0
        """Time that its device computed."""
        self.num_steps = 0
        self.num_answered_tokens = 0
        self._options, self._times, self._clock = options, times, clock
        self.start()

    def start(self) -> None:
        """With nothing cached, and ready for requests."""
        self.num_lives += 1
        self.known.start(self._options.limits)
        self.known.num_unfinished_sequences = 0
        self.state: EngineState = make_state(self._options)
        self._engine = Engine(self.state, self._queue)
        self._device = Device(self._options.num_slots)
        self._steps: deque[tuple[ForwardInput, float]] = deque()
        self.ends_s = math.inf
        """When the step at work ends; inf while there is none."""

    def stop(self) -> None:
        """It has died, or ends for an update: what it had is lost."""
        self.known.is_ready = False
        self.ends_s = math.inf
        self._steps.clear()

    @property
    def is_idle(self) -> bool:
        return self.known.num_unfinished_sequences == 0

    def receive(self, requests: Sequence[GenerateRequest]) -> None:
        """Requests arrive now. The caller has counted them in `known`."""
        self._engine.step(requests, [])
        self._begin()

    def end_step(self) -> list[SequenceDelta]:
        """The step at work ends now -> the last deltas of the sequences that it ends."""
        message, seconds = self._steps.popleft()
        self.ends_s = math.inf
        self.busy_s += seconds
        self.num_steps += 1
        self._begin()  # the device does not wait for the manager
        self._engine.step([], [self._device.forward(message, seconds)])
        self._begin()
        deltas, self.state.deltas = self.state.deltas, []
        return deltas

    def _queue(self, message: ForwardInput) -> None:
        features = self.state.steps_in_flight[-1].features
        self._steps.append((message, self._times.seconds(features)))

    def _begin(self) -> None:
        if self._steps and self.ends_s == math.inf:
            self.ends_s = self._clock.now_s + self._steps[0][1]
