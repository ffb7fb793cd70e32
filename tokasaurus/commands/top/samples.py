"""Samples of a server, as server/protocol/live.py declares them, and what follows from a series of them."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, get_args, get_origin

import orjson
from typing_extensions import get_type_hints, is_typeddict

from tokasaurus.messages.status import TimeLeft, UserError
from tokasaurus.server.live_past import KEPT_SECONDS, SECONDS_BETWEEN
from tokasaurus.server.protocol.live import FORMAT, LiveEvent, LiveJob, LiveReplica

_MAX_LENGTHS = 1024
"""Newest sequences whose predicted and actual lengths are compared."""
_MIN_EARLIER_S, _MAX_EARLIER_S = 5.0, 60.0
"""Age of the forecast that is shown beside the newest one."""
_GAP_S, _PAST_GAP_S = 5.0, 2.2 * SECONDS_BETWEEN
"""A longer time between two samples is a gap; the second if one of them is of the server's own past."""
_LOADED_SAMPLES = 300
"""Samples of a recording that are read at most when another one is shown."""

Line: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
"""From a point (x, y) to another one."""


class NotASample(UserError):
    """The message says why."""


def read_sample(line: bytes) -> LiveEvent:
    """A sample from its JSON. What is absent, or of another type, is None, 0 or empty. Raises NotASample."""
    try:
        value = orjson.loads(line)
    except ValueError:
        raise NotASample("no JSON") from None
    if not isinstance(value, dict) or not value.keys() >= {"format", "time"}:
        raise NotASample("no sample: it lacks a format or a time")
    if value["format"] != FORMAT:
        raise NotASample(f"format {value['format']!r:.20} of samples is not known, this toka reads {FORMAT}")
    sample: LiveEvent = _read(LiveEvent, value)
    return sample


_fields = cache(get_type_hints)


def _read(kind: Any, value: Any) -> Any:
    """The value as `kind` declares it."""
    origin, kinds = get_origin(kind), get_args(kind)
    if NoneType in kinds:
        return None if value is None else _read(kinds[0], value)
    if is_typeddict(kind) or is_dataclass(kind):
        told = value if isinstance(value, dict) else {}
        return kind(**{name: _read(field, told.get(name)) for name, field in _fields(kind).items()})
    if origin is list:
        return [_read(kinds[0], one) for one in value] if isinstance(value, list) else []
    if origin is tuple:
        is_whole = isinstance(value, list) and len(value) == len(kinds)
        return tuple(map(_read, kinds, value if is_whole else [None] * len(kinds)))
    if origin is dict:
        return {_clean(key): _read(kinds[1], one) for key, one in value.items()} if isinstance(value, dict) else {}
    if kind in (int, float, bool):
        return kind(value if isinstance(value, int | float) and math.isfinite(value) else 0)
    return _clean(value) if isinstance(value, str) else ""


def _clean(text: str) -> str:
    """Without characters that would move a terminal's cursor or change its state: clients choose names of jobs."""
    return "".join(char if char.isprintable() else "?" for char in text)


def time_left(of: LiveReplica | LiveJob) -> TimeLeft | None:
    """A recording of an earlier server has no range."""
    seconds, ends = of["eta_seconds"], of["eta_range"]
    if ends is not None and len(ends) == 2:
        return TimeLeft(*ends)
    return None if seconds is None else TimeLeft(seconds, seconds)


def replica_of(sample: LiveEvent, index: int) -> LiveReplica | None:
    return next((replica for replica in sample["replicas"] if replica["index"] == index), None)


def forecast_of(replica: LiveReplica, shift_s: float = 0.0) -> list[Line]:
    """Blocks in use over seconds, from `shift_s` on; empty if nothing runs or the time of a step is not known."""
    forecast, step_s = replica["forecast"], replica["step_seconds"]
    if forecast is None or step_s is None:
        return []
    points = zip(forecast.steps, forecast.blocks, strict=False)
    return list(itertools.pairwise((step * step_s + shift_s, float(blocks)) for step, blocks in points))


def parts_of(start: float, end: float, count: int) -> Iterator[tuple[int, float, float]]:
    """(number, start, end) of what lies from `start` to `end` in each of the `count` parts [0, 1], [1, 2], …"""
    for part in range(max(0, math.floor(start)), min(count, math.ceil(end))):
        yield part, max(start, part), min(end, part + 1)


class History:
    """The samples of the last 15 minutes, oldest first. Those that the server remembers have no `server`."""

    def __init__(self) -> None:
        self.samples: list[LiveEvent] = []

    def add(self, sample: LiveEvent) -> None:
        """A sample that is not newer than those before belongs to another clock: these are forgotten. What the server
        remembers fills the times of which there is no sample."""
        now, past = sample["time"], sample["past"]
        known = self.samples if self.samples and self.samples[-1]["time"] < now else []
        past = [one for one in past if all(abs(one["time"] - other["time"]) >= SECONDS_BETWEEN for other in known)]
        kept: list[Any] = [one for one in [*known, *past] if 0 < now - one["time"] <= KEPT_SECONDS]
        self.samples = [*sorted(kept, key=lambda one: one["time"]), sample]

    def means(self, name: str, seconds: float, count: int = 1, index: int | None = None) -> list[float | None]:
        """Tokens per second by the total `name`, of one replica or of all, in equal parts of the last `seconds`, oldest
        first; None where nothing is known."""
        gains, known, begin = [0.0] * count, [0.0] * count, self.samples[-1]["time"] - seconds
        for before, after in itertools.pairwise(self.samples):
            if not max(before["time"], begin) < after["time"] or _is_gap(before, after):
                continue
            per_s = _gain(name, before, after, index) / (after["time"] - before["time"])
            first, last = ((one["time"] - begin) * count / seconds for one in (before, after))
            for part, start, end in parts_of(first, last, count):
                gains[part] += per_s * (end - start)
                known[part] += end - start
        return [gain / share if share else None for gain, share in zip(gains, known, strict=True)]

    def used_blocks(self, index: int) -> list[Line]:
        """Blocks in use over seconds after now, without the gaps."""
        now = self.samples[-1]["time"]
        found = [(one, own) for one in self.samples if (own := replica_of(one, index)) and own["blocks"].total]
        return [
            ((before["time"] - now, old["blocks"].used), (after["time"] - now, new["blocks"].used))
            for (before, old), (after, new) in itertools.pairwise(found)
            if not _is_gap(before, after) and not _has_begun(before, after, old, new)
        ]

    def counted(self, index: int, seconds: float) -> tuple[float, list[LiveReplica]]:
        """(seconds, the replica in the samples that count what was in them)."""
        now = self.samples[-1]["time"]
        own = [one for one in self.samples if "server" in one and now - one["time"] <= seconds]
        return now - own[0]["time"], [replica for one in own[1:] if (replica := replica_of(one, index))]

    def lengths(self, index: int) -> list[float]:
        """Actual by predicted lengths of the newest sequences that have finished."""
        replicas = (replica_of(sample, index) for sample in self.samples)
        pairs = [pair for replica in replicas if replica for pair in replica["lengths"] if pair[0] > 0]
        return [actual / predicted for predicted, actual in pairs[-_MAX_LENGTHS:]]

    def earlier_forecast(self, index: int) -> tuple[float, list[Line]]:
        """(seconds ago, blocks in use over seconds after now): what was said a minute ago, or as early as possible
        after it; no lines if the engine has started since, or nothing old enough is known."""
        latest = self.samples[-1]
        for sample in self.samples:
            age_s, own, newest = latest["time"] - sample["time"], replica_of(sample, index), replica_of(latest, index)
            is_of_age = "server" in sample and _MIN_EARLIER_S <= age_s <= _MAX_EARLIER_S
            if is_of_age and own and newest and not _has_begun(sample, latest, own, newest):
                return age_s, forecast_of(own, -age_s)
        return 0.0, []

    def replica(self, index: int) -> LiveReplica | None:
        """The newest sample of a replica; for a few seconds in which its engine does not answer, the one before."""
        newest, now = replica_of(self.samples[-1], index), self.samples[-1]["time"]
        for sample in reversed(self.samples):
            own = replica_of(sample, index)
            if not newest or not own or "server" not in sample or now - sample["time"] > _GAP_S:
                break
            if own["blocks"].total and [own["state"], own["restarts"]] == [newest["state"], newest["restarts"]]:
                return own
        return newest


def _gain(name: str, before: LiveEvent, after: LiveEvent, index: int | None) -> float:
    """Growth of a total. One that is smaller than before has begun at 0 again."""
    gain = 0.0
    for replica in after["replicas"]:
        old = replica_of(before, replica["index"])
        if old is not None and index in (None, replica["index"]):
            earlier, now = (one["tokens"][name] for one in (old, replica))  # type: ignore[literal-required]
            gain += now if now < earlier or _has_begun(before, after, old, replica) else now - earlier
    return gain


def _has_begun(before: LiveEvent, after: LiveEvent, old: LiveReplica, new: LiveReplica) -> bool:
    """Whether the server or the replica was started between two samples."""
    starts = {one["server"]["started"] for one in (before, after) if "server" in one}
    return len(starts) > 1 or old["restarts"] != new["restarts"]


def _is_gap(before: LiveEvent, after: LiveEvent) -> bool:
    is_past = "server" not in before or "server" not in after
    return after["time"] - before["time"] > (_PAST_GAP_S if is_past else _GAP_S)


class Recording:
    """A file with a sample per line. Lines that are no samples are left out: a killed server may have begun them."""

    def __init__(self, path: str) -> None:
        """Reads the whole file once. Raises UserError."""
        self._offsets, times, offset, why = list[int](), list[float](), 0, "the file is empty"
        self.num_left_out = 0
        """Without the last one."""
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115 (until the command ends)
            for line in self._file:
                try:
                    times.append(read_sample(line)["time"])
                    self._offsets.append(offset)
                except NotASample as error:
                    why = str(error)
                    self.num_left_out += line.endswith(b"\n")
                offset += len(line)
        except OSError as error:
            raise UserError(f"replay={path}: {error.strerror}") from None
        if not times:
            raise UserError(f"replay={path}: no recording: {why}")
        # A clock set back passes no time, and long pauses are shortened.
        gaps = (min(max(0.0, after - before), _GAP_S) for before, after in itertools.pairwise(times))
        self.positions = list(itertools.accumulate(gaps, initial=0.0))
        """Seconds from the first sample to each."""
        self._history, self._index = History(), -1

    def line(self, index: int) -> bytes:
        """As it was recorded."""
        self._file.seek(self._offsets[index])
        return self._file.readline().rstrip(b"\r\n")

    def history_at(self, position: float) -> History:
        index = max(0, bisect_right(self.positions, position) - 1)
        if not self._index <= index <= self._index + _LOADED_SAMPLES:
            self._history, self._index = History(), max(-1, index - _LOADED_SAMPLES)
        for number in range(self._index + 1, index + 1):
            self._history.add(read_sample(self.line(number)))
        self._index = index
        return self._history
