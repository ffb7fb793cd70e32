"""One sample of a server's state, as `GET /live` sends it once a second and a recording keeps it."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tokasaurus.messages.status import TimeLeft

FORMAT = 1
"""The version of the format that is read."""


class NotASample(Exception):
    """The message says why, in one line."""


class UnknownFormat(NotASample):
    """The sample has another version of the format."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Blocks in use in the future, as one moment foresaw it."""

    step: int
    """The newest step then."""
    steps: tuple[float, ...]
    """Rounds of decode steps after that moment, ascending."""
    blocks: tuple[float, ...]
    """Blocks in use after each of these rounds; linear between two entries."""
    peak: float
    limit: float
    """Blocks of the pool."""


@dataclass(frozen=True, slots=True)
class NextInQueue:
    """The first waiting sequence."""

    fits_in_steps: int | None
    """Steps until it fits; None if it never does within the forecast."""
    blocks: int
    """Blocks that it needs."""
    blocked_by: str
    """blocks, slots, paused or turn; empty if it will be admitted at once."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The KV pool."""

    total: int
    own: int
    """Blocks used by one sequence."""
    shared: int
    """Blocks used by several."""
    cached: int
    """Blocks that none uses, kept for later prompts."""
    free: int
    used: int
    """Own and shared ones: in the server's past, only their sum is known."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage. Seconds are since the sample before."""

    busy: float
    waiting: float
    """Time in which it waited for other stages."""
    microbatches: int
    """Microbatches in flight: the stage before it has computed them, and it has not."""


@dataclass(frozen=True, slots=True)
class OldRequest:
    """One of the oldest requests. Times are in seconds."""

    id: str
    client: str
    state: str
    """running, prefilling or waiting."""
    samples: int
    running: int
    prompt_tokens: int
    generated_tokens: int
    age_seconds: float
    wait_seconds: float
    """From its arrival to its admission, or until now."""


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    index: int
    state: str
    restarts: int
    step: int | None
    """The newest step whose results have arrived."""
    steps: int
    """Steps since the sample before; `events`, `lengths` and `parts` are since then, too."""
    step_seconds: float | None
    """Expected time of a round of decode steps."""
    microbatches: int
    """Steps of a round."""
    running: int
    prefilling: int
    background: int
    waiting: int
    slots: int
    queue_depth: int
    tokens: Mapping[str, float]
    """Totals since the replica's start."""
    blocks: Blocks
    events: Mapping[str, float]
    forecast: Forecast | None
    next: NextInQueue | None
    oldest_wait_seconds: float | None
    lengths: tuple[tuple[float, float], ...]
    """(predicted, actual) completion tokens."""
    time_left: TimeLeft | None
    parts: Mapping[str, Mapping[str, float]]
    """Seconds by part, of `manager`, `device` and `phases`."""
    stages: tuple[Stage, ...]
    """The pipeline stages; empty if there is only one."""
    oldest: tuple[OldRequest, ...]
    """The oldest requests that run, then the oldest that wait."""


@dataclass(frozen=True, slots=True)
class JobSample:
    id: str
    kind: str
    name: str
    state: str
    lines_total: int | None
    lines_done: int
    lines_failed: int
    tokens_per_second: float | None
    time_left: TimeLeft | None
    device_seconds: float | None
    price: float | None
    ended: float | None
    """Unix seconds; None before."""
    reason: str
    """Why it failed as a whole; empty if it did not."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    version: str
    model: str
    started: float | None
    """Unix seconds."""
    dp_size: int
    pp_size: int
    tp_size: int
    device: str
    dtype: str
    is_draining: bool
    ended: str
    """Why the server ends, in its last sample; else empty."""


@dataclass(frozen=True, slots=True)
class KeySample:
    """The sequences and tokens of an API key."""

    name: str
    """Empty: all others together."""
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    time: float
    """Unix seconds."""
    server: ServerFacts
    requests: Mapping[str, float]
    replicas: tuple[ReplicaSample, ...]
    jobs: tuple[JobSample, ...] = ()
    keys: tuple[KeySample, ...] = ()
    past: "tuple[Sample, ...]" = ()
    """What the server remembers, oldest first; of a stream's first sample."""
    is_past: bool = False
    """One of those: the server has taken it by itself, and it tells less."""

    def replica(self, index: int) -> ReplicaSample | None:
        return next((replica for replica in self.replicas if replica.index == index), None)


def read_sample(line: bytes) -> Sample:
    """A sample from its JSON. Unknown keys are ignored. A key that is absent, or has another type, counts as not known
    or 0. Raises NotASample, UnknownFormat for another version of the format."""
    try:
        value = orjson.loads(line)
    except ValueError:
        raise NotASample("no JSON") from None
    version = value.get("format") if isinstance(value, dict) else None
    if version is None:
        raise NotASample('no sample: it has no "format"')
    if version is True or version != FORMAT:
        raise UnknownFormat(f"format {_clean(str(version))[:20]} of samples is not known, this toka reads {FORMAT}")
    fields = _Fields(value)
    time = fields.number("time")
    if time is None:
        raise NotASample('no sample: it has no "time"')
    server = _server(fields.object("server"))
    return Sample(
        time,
        server,
        fields.object("requests").numbers(),
        _replicas(fields),
        tuple(_job(job) for job in fields.objects("jobs")),
        tuple(_key(key) for key in fields.objects("keys")),
        tuple(
            Sample(then, server, moment.object("requests").numbers(), _replicas(moment), is_past=True)
            for moment in fields.objects("past")
            if (then := moment.number("time")) is not None
        ),
    )


class _Fields:
    """An object of JSON. Anything else has no fields."""

    def __init__(self, value: Any) -> None:
        self._value: dict[str, Any] = value if isinstance(value, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._value)

    def number(self, key: str) -> float | None:
        return _number(self._value.get(key))

    def count(self, key: str, default: int = 0) -> int:
        value = self.number(key)
        return default if value is None else int(value)

    def text(self, key: str) -> str:
        value = self._value.get(key)
        return _clean(value) if isinstance(value, str) else ""

    def flag(self, key: str) -> bool:
        return self._value.get(key) is True

    def object(self, key: str) -> "_Fields":
        return _Fields(self._value.get(key))

    def objects(self, key: str) -> "list[_Fields]":
        return [_Fields(value) for value in self.values(key) if isinstance(value, dict)]

    def values(self, key: str) -> list[Any]:
        value = self._value.get(key)
        return value if isinstance(value, list) else []

    def numbers(self) -> dict[str, float]:
        found = {_clean(key): _number(value) for key, value in self._value.items()}
        return {key: value for key, value in found.items() if value is not None}

    def keys(self) -> list[str]:
        return list(self._value)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _clean(text: str) -> str:
    """The text without characters that would move a terminal's cursor or change its state: clients choose names of
    jobs."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _server(fields: _Fields) -> ServerFacts:
    return ServerFacts(
        version=fields.text("version"),
        model=fields.text("model"),
        started=fields.number("started"),
        dp_size=fields.count("dp_size", 1),
        pp_size=fields.count("pp_size", 1),
        tp_size=fields.count("tp_size", 1),
        device=fields.text("device"),
        dtype=fields.text("dtype"),
        is_draining=fields.flag("draining"),
        ended=fields.text("ended"),
    )


def _replicas(fields: _Fields) -> tuple[ReplicaSample, ...]:
    return tuple(_replica(replica, number) for number, replica in enumerate(fields.objects("replicas")))


def _replica(fields: _Fields, number: int) -> ReplicaSample:
    parts = fields.object("parts")
    step = fields.number("step")
    return ReplicaSample(
        index=fields.count("index", number),
        state=fields.text("state"),
        restarts=fields.count("restarts"),
        step=None if step is None else int(step),
        steps=fields.count("steps"),
        step_seconds=fields.number("step_seconds"),
        microbatches=max(1, fields.count("microbatches", 1)),
        running=fields.count("running"),
        prefilling=fields.count("prefilling"),
        background=fields.count("background"),
        waiting=fields.count("waiting"),
        slots=fields.count("slots"),
        queue_depth=fields.count("queue_depth"),
        tokens=fields.object("tokens").numbers(),
        blocks=_blocks(fields.object("blocks")),
        events=fields.object("events").numbers(),
        forecast=_forecast(fields.object("forecast")),
        next=_next(fields.object("next")),
        oldest_wait_seconds=fields.number("oldest_wait_seconds"),
        lengths=tuple(pair for value in fields.values("lengths") if (pair := _pair(value)) is not None),
        time_left=_time_left(fields),
        parts={name: parts.object(name).numbers() for name in parts.keys()},  # noqa: SIM118 (no dictionary)
        stages=tuple(
            Stage(stage.number("busy") or 0.0, stage.number("waiting") or 0.0, stage.count("microbatches"))
            for stage in fields.objects("stages")
        ),
        oldest=tuple(map(_old_request, fields.objects("oldest"))),
    )


def _blocks(fields: _Fields) -> Blocks:
    own, shared = fields.count("own"), fields.count("shared")
    return Blocks(
        total=fields.count("total"),
        own=own,
        shared=shared,
        cached=fields.count("cached"),
        free=fields.count("free"),
        used=fields.count("used", own + shared),
    )


def _forecast(fields: _Fields) -> Forecast | None:
    steps = [_number(value) for value in fields.values("steps")]
    blocks = [_number(value) for value in fields.values("blocks")]
    points = [(x, y) for x, y in zip(steps, blocks, strict=False) if x is not None and y is not None]
    is_whole = len(points) == len(steps) == len(blocks) > 0
    if not is_whole or any(after[0] < before[0] for before, after in itertools.pairwise(points)):
        return None
    xs, ys = zip(*points, strict=True)
    peak, limit = fields.number("peak"), fields.number("limit")
    return Forecast(fields.count("step"), xs, ys, max(ys) if peak is None else peak, 0.0 if limit is None else limit)


def _next(fields: _Fields) -> NextInQueue | None:
    if not fields:
        return None
    fits = fields.number("fits_in_steps")
    return NextInQueue(
        fits_in_steps=None if fits is None else int(fits),
        blocks=fields.count("blocks"),
        blocked_by=fields.text("blocked_by"),
    )


def _old_request(fields: _Fields) -> OldRequest:
    return OldRequest(
        id=fields.text("id"),
        client=fields.text("client"),
        state=fields.text("state"),
        samples=fields.count("samples", 1),
        running=fields.count("running"),
        prompt_tokens=fields.count("prompt_tokens"),
        generated_tokens=fields.count("generated_tokens"),
        age_seconds=fields.number("age_seconds") or 0.0,
        wait_seconds=fields.number("wait_seconds") or 0.0,
    )


def _pair(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    predicted, actual = _number(value[0]), _number(value[1])
    return None if predicted is None or actual is None else (predicted, actual)


def _key(fields: _Fields) -> KeySample:
    tokens = fields.object("tokens")
    return KeySample(
        name=fields.text("name"),
        running=fields.count("running"),
        waiting=fields.count("waiting"),
        prompt_tokens=tokens.count("prompt"),
        generated_tokens=tokens.count("generated"),
    )


def _time_left(fields: _Fields) -> TimeLeft | None:
    """Of a replica or a job. A recording of an earlier server has no range."""
    seconds = fields.number("eta_seconds")
    ends = _pair(fields.values("eta_range"))
    if ends is not None:
        return TimeLeft(*ends)
    return None if seconds is None else TimeLeft(seconds, seconds)


def _job(fields: _Fields) -> JobSample:
    lines, cost = fields.object("lines"), fields.object("cost")
    total = lines.number("total")
    return JobSample(
        id=fields.text("id"),
        kind=fields.text("kind"),
        name=fields.text("name"),
        state=fields.text("state"),
        lines_total=None if total is None else int(total),
        lines_done=lines.count("done"),
        lines_failed=lines.count("failed"),
        tokens_per_second=fields.number("tokens_per_second"),
        time_left=_time_left(fields),
        device_seconds=cost.number("device_seconds"),
        price=cost.number("price"),
        ended=fields.number("ended"),
        reason=fields.text("reason"),
    )
