"""What a manager tells of itself while somebody watches: asked for once a second, and never otherwise.

Classes named Live… are parts of the events of GET /live as they are: server/protocol/live.py has the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokasaurus.messages.status import EngineStats, TimeLeft


@dataclass(frozen=True, slots=True)
class TakeSample:
    """Answer with a LiveSample soon: at once, unless the worker is about to run out of steps."""

    begins: bool
    """Nobody has watched before: what is counted since the previous sample is 0."""
    counts_clients: bool = False
    """Tell LiveSample.clients."""


@dataclass(frozen=True, slots=True)
class JobsLeft:
    """When the last job of the server will have ended, lines that no manager has yet included."""

    time_left: TimeLeft | None
    """None if there is no job, or no basis."""


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """KV blocks by who uses them. own: one sequence. shared: several. cached: none; they hold prefixes."""

    total: int
    own: int
    shared: int
    cached: int
    free: int

    @property
    def used(self) -> int:
        """By sequences."""
        return self.own + self.shared


@dataclass(frozen=True, slots=True)
class LiveEvents:
    """Since the event before. admitted, finished, preempted: sequences. evicted: blocks."""

    admitted: int
    finished: int
    preempted: int
    evicted: int


@dataclass(frozen=True, slots=True)
class LiveForecast:
    """Blocks in use by the running sequences until their predicted ends; linear between the points.

    step: number of the next step. steps: rounds after it. blocks: in use then. limit: what admission fills.
    """

    step: int
    steps: list[int]
    blocks: list[int]
    peak: int
    limit: int


MAX_FORECAST_POINTS = 240
"""If the KV simulation has more, the time is cut into equal parts, and each has its highest and its lowest point."""

Blocked = Literal["blocks", "slots", "paused"]


@dataclass(frozen=True, slots=True)
class LiveNext:
    """The first waiting sequence. fits_in_steps: the first round in which its blocks suffice; null: not foreseen.
    blocks: that it will need and no running sequence has. blocked_by: null if it is admitted at once."""

    fits_in_steps: int | None
    blocks: int
    prompt_tokens: int
    wait_seconds: float
    blocked_by: Blocked | None


@dataclass(frozen=True, slots=True)
class LiveStage:
    """A pipeline stage. busy, waiting: seconds since the event before. microbatches: in flight."""

    busy: float
    waiting: float
    microbatches: int


RequestState = Literal["running", "prefilling", "waiting"]


@dataclass(frozen=True, slots=True)
class LiveOldRequest:
    """One prompt with its samples. client: the name of its key, or its address. running: samples that run.
    generated_tokens: of its unfinished samples. max_tokens: of each sample. age_seconds: since its arrival.
    wait_seconds: until its first sample was admitted."""

    id: str
    client: str
    state: RequestState
    samples: int
    running: int
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    age_seconds: float
    wait_seconds: float


MAX_OLD_REQUESTS = 8
"""Requests that run, and as many that wait."""


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """The sequences of a client, background ones included."""

    client: str
    """As in GenerateRequest."""
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class LiveSample:
    """A snapshot of one manager. Sums are since the previous sample."""

    stats: EngineStats
    step: int
    """Number of the newest step whose results have arrived; -1 before the first."""
    num_steps: int
    round_seconds: float | None
    """Expected time of a decode step of each microbatch; None before the first result."""
    num_microbatches: int
    num_slots: int
    num_prefilling: int
    blocks: LiveBlocks
    events: LiveEvents
    forecast: LiveForecast | None
    """None if nothing runs."""
    next: LiveNext | None
    """None if none waits, or if all wait for their grammars."""
    oldest_wait_s: float | None
    """Age of the oldest request with a waiting sequence; None if none waits."""
    lengths: list[tuple[int, int]]
    """(tokens predicted when it was admitted, tokens) of the newest sequences that finished, at most
    MAX_SAMPLE_LENGTHS."""
    time_left: TimeLeft | None
    """Until all running and waiting sequences have ended, and all lines of the server's jobs; None if not known."""
    manager_seconds: Mapping[str, float]
    """Seconds in each part of the manager's step."""
    busy_seconds: float
    """Seconds that the worker computed, as EngineStats.total_forward_seconds."""
    idle_seconds: float
    """Seconds that the device idled, as EngineStats.total_device_idle_seconds."""
    phase_seconds: tuple[float, ...]
    """Seconds in each of FORWARD_PHASES; empty if the worker does not count them."""
    stages: tuple[LiveStage, ...] = ()
    """The pipeline stages; empty if there is only one."""
    oldest: tuple[LiveOldRequest, ...] = ()
    """The oldest requests that run, then the oldest that wait, of each at most MAX_OLD_REQUESTS."""
    clients: tuple[ClientCounts, ...] = ()
    """All clients with unfinished sequences, if they are asked for."""


MAX_SAMPLE_LENGTHS = 64
