"""What a manager tells of itself while somebody watches: asked for once a second, and never otherwise."""

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
class BlockUse:
    """The KV blocks by who uses them; together they are all blocks."""

    own: int
    """Blocks used by one sequence."""
    shared: int
    """Blocks used by several sequences, each counted once."""
    cached: int
    """Blocks of cached prefixes that no sequence uses."""
    free: int


@dataclass(frozen=True, slots=True)
class KVForecastPoints:
    """Blocks in use by the running sequences until the last of them ends, linear between the points.

    Steps are rounds: one step of each microbatch. The points come from the KV simulation. If it has more than
    MAX_FORECAST_POINTS, the time is cut into equal parts, and each part has its highest and its lowest point.
    """

    step: int
    """Number of the next step to be sent."""
    steps: list[int]
    """Steps from that one on, in increasing order; the first is 0."""
    blocks: list[int]
    """Blocks in use after as many steps; the last is 0."""
    peak: int
    limit: int
    """Most blocks that admission fills."""


MAX_FORECAST_POINTS = 240

Blocked = Literal["blocks", "slots", "paused"]


@dataclass(frozen=True, slots=True)
class NextSequence:
    """The first waiting sequence that may be admitted."""

    fits_in_steps: int | None
    """The forecast's first step from which on its blocks suffice to its end; None if the forecast does not tell."""
    num_blocks: int
    """Blocks that it is expected to need, without those that running sequences or the cache already have."""
    num_prompt_tokens: int
    """Tokens to prefill: the prompt, and what was sampled before a preemption."""
    wait_s: float
    """Seconds since its request arrived."""
    blocked_by: Blocked | None
    """None: it will be admitted at once."""


@dataclass(frozen=True, slots=True)
class StageSample:
    """A pipeline stage. Seconds are since the previous sample."""

    busy_seconds: float
    """Time in which it computed."""
    waiting_seconds: float
    """Time within its steps in which it waited for what other stages send or receive."""
    num_microbatches: int
    """Steps that the stage before it has computed and it has not; of the first stage: that the manager has sent."""


RequestState = Literal["running", "prefilling", "waiting"]


@dataclass(frozen=True, slots=True)
class OldRequest:
    """One of the oldest requests: one prompt with its samples. Times are in seconds."""

    request_id: str
    client: str
    """As in GenerateRequest."""
    state: RequestState
    """waiting: none of its samples runs. prefilling: one runs, and none decodes."""
    num_samples: int
    num_running: int
    num_prompt_tokens: int
    num_generated_tokens: int
    """Tokens of its unfinished samples together."""
    max_new_tokens: int
    """Most tokens of each sample."""
    age_s: float
    wait_s: float
    """From its arrival to the admission of its first sample; until now if none was admitted."""


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
    blocks: BlockUse
    num_admitted: int
    num_finished: int
    """Sequences that ended with all their tokens; neither cancelled ones nor errors."""
    num_preempted: int
    num_evicted_blocks: int
    forecast: KVForecastPoints | None
    """None if nothing runs."""
    next: NextSequence | None
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
    stages: tuple[StageSample, ...] = ()
    """The pipeline stages; empty if there is only one."""
    oldest: tuple[OldRequest, ...] = ()
    """The oldest requests that run, then the oldest that wait, of each at most MAX_OLD_REQUESTS."""
    clients: tuple[ClientCounts, ...] = ()
    """All clients with unfinished sequences, if they are asked for."""


MAX_SAMPLE_LENGTHS = 64
