"""Events of GET /live. Readers must ignore fields that they do not know; docs/live.md says more of each field."""

from dataclasses import dataclass
from typing import Final, Literal

from typing_extensions import Required, TypedDict

from tokasaurus.messages.live import LiveBlocks, LiveEvents, LiveForecast, LiveNext, LiveOldRequest, LiveStage

FORMAT: Final = 1

JobState = Literal["validating", "waiting", "running", "finished", "failed", "cancelled"]
ReplicaState = Literal["starting", "up", "paused", "asleep", "down"]


class LiveServer(TypedDict):
    """started: seconds since 1970. device, dtype, page_size: as flags ask for, or null, until the model is loaded.
    price_per_hour: of the flag. ended: why the server ends, in the last event; else null."""

    version: str
    model: str
    started: float
    dp_size: int
    pp_size: int
    tp_size: int
    device: str | None
    dtype: str | None
    page_size: int | None
    draining: bool
    price_per_hour: float | None
    ended: str | None


class LiveRequests(TypedDict):
    """Bodies of generation routes, and lines of jobs. open: now. answered, aborted, failed: since the start."""

    open: int
    answered: int
    aborted: int
    failed: int


class LiveTokens(TypedDict):
    """Totals since the replica's start. prompt: of requests, each once. cached, computed: of sequences. shared: in
    prefix groups. recomputed: after preemptions."""

    prompt: int
    generated: int
    cached: int
    computed: int
    shared: int
    recomputed: int


class LiveParts(TypedDict, total=False):
    """Seconds since the event before, by part of the manager's step, of the device's time and of the forward."""

    manager: Required[dict[str, float]]
    device: Required[dict[str, float]]
    phases: dict[str, float]


class LiveReplica(TypedDict, total=False):
    """A replica. Fields may be missing while it is down, or answers late; stages, without pp_size.

    restarts: how often it was started again. step: number of the newest step whose results have arrived.
    steps: since the event before. step_seconds: expected time of a round of decode steps. microbatches: steps of a
    round. background: running sequences of batches. slots: most sequences that can run. queue_depth: steps in flight.
    oldest_wait_seconds: of a request with a waiting sequence. lengths: predicted and actual tokens of sequences that
    finished since the event before. eta_seconds: until all that runs and waits, and all lines of the jobs, will have
    ended. eta_range: the same as a range [lowest, highest]. oldest: the oldest requests that run, then the oldest that
    wait. adapters: of those with sequences, how many run and how many wait for their adapter's turn, by name.
    """

    index: Required[int]
    state: Required[ReplicaState]
    restarts: Required[int]
    step: int
    steps: int
    step_seconds: float | None
    microbatches: int
    running: int
    prefilling: int
    background: int
    waiting: int
    slots: int
    queue_depth: int
    tokens: LiveTokens
    blocks: LiveBlocks
    events: LiveEvents
    forecast: LiveForecast | None
    next: LiveNext | None
    oldest_wait_seconds: float | None
    lengths: list[tuple[int, int]]
    eta_seconds: float | None
    eta_range: list[float] | None
    parts: LiveParts
    stages: list[LiveStage]
    oldest: list[LiveOldRequest]
    adapters: dict[str, tuple[int, int]]


class LiveLines(TypedDict):
    """total: null while it is not known. done: with an answer."""

    total: int | None
    done: int
    failed: int
    running: int


class LiveJobTokens(TypedDict):
    """prompt: of lines that are done. generated: also of running lines, where they are known."""

    prompt: int
    generated: int


class LiveCost(TypedDict):
    """device_seconds: the job's share of the time in which the devices were busy; null if nobody watched it. price:
    their part of price_per_hour."""

    device_seconds: float | None
    price: float | None


class LiveJob(TypedDict):
    """started, ended: seconds since 1970; ended is null before the end. tokens_per_second: generated. eta_seconds:
    until its end. eta_range: the same as a range [lowest, highest]. Both are null while there is no basis. reason: why
    a batch failed as a whole."""

    id: str
    kind: Literal["batch", "bulk"]
    name: str
    state: JobState
    lines: LiveLines
    tokens: LiveJobTokens
    started: float
    tokens_per_second: float
    eta_seconds: float | None
    eta_range: list[float] | None
    cost: LiveCost
    ended: float | None
    reason: str | None


class LiveKeyTokens(TypedDict):
    """Of requests that have ended, since the server's start. prompt: each prompt once."""

    prompt: int
    generated: int


class LiveKey(TypedDict):
    """An API key. name: null for all that is not of the keys before, such as batches. running, waiting: sequences."""

    name: str | None
    running: int
    waiting: int
    tokens: LiveKeyTokens


@dataclass(frozen=True, slots=True)
class LiveMomentBlocks:
    """KV blocks. used: by sequences. cached: by none; they hold prefixes."""

    total: int
    used: int
    cached: int
    free: int


class LiveMomentEvents(TypedDict):
    """Since the moment before. preempted: sequences. evicted: blocks."""

    preempted: int
    evicted: int


class LiveMomentReplica(TypedDict, total=False):
    """A replica, some time ago: fields as in LiveReplica. All but the first three are missing while it is down.
    lengths: at most 64, only if somebody watched then."""

    index: Required[int]
    state: Required[ReplicaState]
    restarts: Required[int]
    running: int
    background: int
    waiting: int
    queue_depth: int
    tokens: LiveTokens
    blocks: LiveMomentBlocks
    events: LiveMomentEvents
    lengths: list[tuple[int, int]]


class LiveMoment(TypedDict):
    """What the server did some time ago. time: seconds since 1970."""

    time: float
    requests: LiveRequests
    replicas: list[LiveMomentReplica]


class LiveEvent(TypedDict, total=False):
    """What the server does now: one of the events of GET /live. time: seconds since 1970. keys: empty unless there are
    several; those with the most sequences, then tokens, and one for the others. past: of a stream's first event; the
    last 15 minutes, oldest first."""

    format: Required[Literal[1]]
    time: Required[float]
    server: Required[LiveServer]
    requests: Required[LiveRequests]
    replicas: Required[list[LiveReplica]]
    jobs: Required[list[LiveJob]]
    keys: Required[list[LiveKey]]
    past: list[LiveMoment]
