"""Times, lengths and ends of requests, counted by the server as their last deltas arrive. Names are in `metrics`.

A request is one prompt with its n samples, whether a route, a line of a bulk request or a line of a batch sent it; a
sequence is one sample. Plain lists and bisect: counting a sequence takes a few microseconds.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta

EndReason = Literal["stop", "length", "abort", "error", "cancelled"]
"""How a sequence ended: its finish reason; `error` if the engine failed it or another sample of its request;
`cancelled` if nobody waited for it any more, mostly because the client had disconnected."""

END_REASONS: tuple[EndReason, ...] = get_args(EndReason)

# Each contains the bounds that vLLM has for the same quantity, so that its dashboards and rules find theirs. Smaller
# ones follow the times of small models, larger ones the largest requests that are accepted here.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
PHASE_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SAMPLES = TOKENS[:15]


class Histogram:
    """Counts of values by bucket, and their sum.

    bounds: the largest value of each bucket, in increasing order; a last one takes all larger values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Values in each bucket alone."""
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts the value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[int]:
        """Values up to each bound, and all of them."""
        return list(accumulate(self.counts))


def _first_token_seconds() -> Histogram:
    return Histogram(FIRST_TOKEN_SECONDS)


def _per_token_seconds() -> Histogram:
    return Histogram(PER_TOKEN_SECONDS)


def _phase_seconds() -> Histogram:
    return Histogram(PHASE_SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class RequestMetrics:
    """Histograms and counts over the requests of one replica. `metrics` says of each histogram what it counts."""

    finished: dict[EndReason, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))
    """Sequences that have ended."""
    time_to_first_token: Histogram = field(default_factory=_first_token_seconds)
    time_per_output_token: Histogram = field(default_factory=_per_token_seconds)
    between_tokens: Histogram = field(default_factory=_per_token_seconds)
    """Values of time_per_output_token, where a sequence counts once for each of its tokens after the first."""
    queue: Histogram = field(default_factory=_phase_seconds)
    prefill: Histogram = field(default_factory=_phase_seconds)
    decode: Histogram = field(default_factory=_phase_seconds)
    completion_tokens: Histogram = field(default_factory=_tokens)
    request: Histogram = field(default_factory=_phase_seconds)
    prompt_tokens: Histogram = field(default_factory=_tokens)
    num_samples: Histogram = field(default_factory=lambda: Histogram(SAMPLES))
    longest_completion: Histogram = field(default_factory=_tokens)

    def note_sequence(self, request: GenerateRequest, delta: SequenceDelta) -> None:
        """delta: the last of one of the request's sequences."""
        if delta.error or delta.finish_reason is None:
            self.finished["error"] += 1
            return
        self.finished[delta.finish_reason] += 1
        times = delta.times
        if times is None:
            return
        arrived_s = request.arrived_s or times.admitted_s
        self.completion_tokens.observe(times.num_tokens)
        if request.kept:  # it began in an earlier server
            return
        if times.admitted_s:
            self.queue.observe(max(0.0, times.admitted_s - arrived_s))
        if times.first_token_s:
            self.prefill.observe(times.first_token_s - times.admitted_s)
            if times.num_tokens:
                decode_s = times.ended_s - times.first_token_s
                self.time_to_first_token.observe(max(0.0, times.first_token_s - arrived_s))
                self.decode.observe(decode_s)
                if times.num_tokens > 1:
                    per_token_s = decode_s / (times.num_tokens - 1)
                    self.time_per_output_token.observe(per_token_s)
                    self.between_tokens.observe(per_token_s, times.num_tokens - 1)

    def note_request(self, request: GenerateRequest, longest: int) -> None:
        """All its sequences have ended. longest: tokens of the longest completion."""
        self._note_size(request)
        if request.arrived_s:
            self.request.observe(time.monotonic() - request.arrived_s)
        self.longest_completion.observe(longest)

    def note_broken_request(self, request: GenerateRequest, num_unfinished: int, reason: EndReason) -> None:
        """`num_unfinished` of its sequences end without a result."""
        self._note_size(request)
        self.finished[reason] += num_unfinished

    def _note_size(self, request: GenerateRequest) -> None:
        self.prompt_tokens.observe(len(request.prompt_ids))
        self.num_samples.observe(request.num_sequences)
