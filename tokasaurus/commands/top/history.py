"""What follows from a series of samples: rates, sums over a time, and old forecasts today."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokasaurus.commands.top.samples import Sample
from tokasaurus.messages.live import LiveForecast
from tokasaurus.server.live_past import KEPT_SECONDS, SECONDS_BETWEEN
from tokasaurus.server.protocol.live import LiveReplica

MAX_LENGTHS = 1024
"""Newest sequences whose predicted and actual lengths are compared."""
_EARLIER_S = 60.0
"""Age of the forecast that is shown beside the newest one."""
_MIN_EARLIER_S = 5.0
_LATE_S = 5.0
"""How long the figures of an engine stay that does not answer."""
_GAP_S, _PAST_GAP_S = 5.0, 2.2 * SECONDS_BETWEEN
"""A longer time between two samples is a gap; the second if one of them is of the server's own past."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear; not defined outside of its ends."""

    xs: tuple[float, ...]
    """Ascending; two equal ones are a jump."""
    ys: tuple[float, ...]

    def highest(self, start: float, end: float) -> float | None:
        """The largest value from start to end; None if it is nowhere defined there."""
        if not self.xs or end < self.xs[0] or start > self.xs[-1]:
            return None
        start, end = max(start, self.xs[0]), min(end, self.xs[-1])
        inside = self.ys[bisect_left(self.xs, start) : bisect_right(self.xs, end)]
        return max([*inside, self._at(start), self._at(end)])

    def _at(self, x: float) -> float:
        right = min(max(1, bisect_right(self.xs, x)), len(self.xs) - 1)
        (left_x, left_y), (right_x, right_y) = ((self.xs[i], self.ys[i]) for i in (right - 1, right))
        return left_y + (right_y - left_y) * (x - left_x) / (right_x - left_x) if right_x > left_x else right_y


class History:
    """The samples of the last minutes, oldest first."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()

    @property
    def latest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def add(self, sample: Sample) -> None:
        """A sample that is not newer than those before belongs to another clock: these are forgotten. What the server
        remembers fills the times of which there is no sample."""
        now = sample["time"]
        if self.samples and now <= self.samples[-1]["time"]:
            self.samples.clear()
        past: list[Sample] = sample.pop("past", [])  # type: ignore[assignment]  # read_sample has them so
        known = [one["time"] for one in self.samples]
        missing = [
            one for one in past if one["time"] < now and all(abs(one["time"] - s) >= SECONDS_BETWEEN for s in known)
        ]
        self.samples = deque(
            sorted([*self.samples, *missing], key=lambda one: one["time"]) if missing else self.samples
        )
        self.samples.append(sample)
        while now - self.samples[0]["time"] > KEPT_SECONDS:
            self.samples.popleft()

    def rate(self, name: str, seconds: float = 5.0, index: int | None = None) -> float | None:
        """Tokens per second of the total `name`, of one replica or of all, in the last `seconds`, or between the last
        two samples if they are further apart; None without two samples."""
        samples = self._last(seconds, with_past=True)
        if len(samples) < 2:
            return None
        gain = sum(_gain(name, before, after, index) for before, after in itertools.pairwise(samples))
        return gain / (samples[-1]["time"] - samples[0]["time"])

    def rates(self, name: str, count: int) -> list[float]:
        """Tokens per second between every two of the newest samples, oldest first; at most `count`."""
        pairs = itertools.pairwise(list(self.samples)[-count - 1 :])
        return [_gain(name, before, after) / (after["time"] - before["time"]) for before, after in pairs]

    def means(self, name: str, count: int) -> list[float | None]:
        """Tokens per second of all replicas in equal parts of the last KEPT_SECONDS, oldest first; None where nothing
        is known."""
        part_s = KEPT_SECONDS / max(1, count)
        gains, known_s = [0.0] * count, [0.0] * count
        for before, after in itertools.pairwise(self.samples):
            if _is_gap(before, after):
                continue
            per_s = _gain(name, before, after) / (after["time"] - before["time"])
            start, end = (one["time"] - self.samples[-1]["time"] + KEPT_SECONDS for one in (before, after))
            for part in range(max(0, int(start // part_s)), min(count, math.ceil(end / part_s))):
                seconds = min(end, (part + 1) * part_s) - max(start, part * part_s)
                gains[part] += per_s * seconds
                known_s[part] += seconds
        return [gain / seconds if seconds > 0 else None for gain, seconds in zip(gains, known_s, strict=True)]

    def used_blocks(self, index: int) -> list[Curve]:
        """Blocks in use, in seconds before the newest sample; a curve for each time without a gap."""
        parts: list[list[tuple[float, float]]] = []
        before: tuple[Sample, LiveReplica] | None = None
        for sample in self.samples:
            replica = replica_of(sample, index)
            if replica is None or not replica["blocks"].total:
                continue
            if before is None or _is_gap(before[0], sample) or before[1]["restarts"] != replica["restarts"]:
                parts.append([])
            parts[-1].append((sample["time"] - self.samples[-1]["time"], used(replica)))
            before = sample, replica
        return [_curve(points) for points in parts]

    def counted(self, index: int, seconds: float) -> tuple[float, list[LiveReplica]]:
        """(seconds, the replica in the samples that count what was in them): the last `seconds`, or the time between
        the last two samples. Empty with one sample."""
        samples = self._last(seconds)
        found = [replica for sample in samples[1:] if (replica := replica_of(sample, index)) is not None]
        return (samples[-1]["time"] - samples[0]["time"] if samples else 0.0), found

    def lengths(self, index: int) -> list[float]:
        """Actual by predicted lengths of the newest sequences that have finished."""
        replicas = (replica_of(sample, index) for sample in reversed(self.samples))
        pairs = (pair for replica in replicas if replica is not None for pair in reversed(replica["lengths"]))
        quotients = (actual / predicted for predicted, actual in pairs if predicted > 0)
        return list(itertools.islice(quotients, MAX_LENGTHS))

    def earlier_forecast(self, index: int) -> tuple[float, Curve] | None:
        """(seconds ago, blocks in use over rounds after now): what was said a minute ago, or as early as possible after
        it; None if the engine was started anew since then, or nothing old enough is known."""
        found: tuple[float, Curve] | None = None
        for seconds_ago, rounds_ago, replica in self._same_engine(index):
            if seconds_ago < _MIN_EARLIER_S or replica["forecast"] is None:
                continue
            if found is not None and seconds_ago > _EARLIER_S:
                break
            found = seconds_ago, curve_of(replica["forecast"], -rounds_ago)
        return found

    def past_blocks(self, index: int) -> Curve:
        """Blocks in use at the samples, in rounds after now, so that all x are at most 0."""
        return _curve(reversed([(-rounds, used(replica)) for _, rounds, replica in self._same_engine(index)]))

    def replica(self, index: int) -> LiveReplica | None:
        """The newest sample of a replica. If its engine did not answer in time, the one before is the newest, for a few
        seconds."""
        latest = None if self.latest is None else replica_of(self.latest, index)
        for sample in reversed(self.samples):
            before = replica_of(sample, index)
            if latest is None or before is None or self.samples[-1]["time"] - sample["time"] > _LATE_S:
                break
            if (before["state"], before["restarts"]) != (latest["state"], latest["restarts"]):
                break
            if "step" in before:
                return before
        return latest

    def _last(self, seconds: float, with_past: bool = False) -> list[Sample]:
        """Samples of the last seconds, at least two if there are. with_past: also samples that the server remembers."""
        found: list[Sample] = []
        for sample in reversed(self.samples):
            if sample["is_past"] and not with_past:
                break
            if len(found) >= 2 and self.samples[-1]["time"] - sample["time"] > seconds:
                break
            found.append(sample)
        return found[::-1]

    def _same_engine(self, index: int) -> Iterator[tuple[float, float, LiveReplica]]:
        """(seconds ago, rounds ago, replica), newest first, as long as the replica was not started anew."""
        latest, after = self.latest, self.replica(index)
        if latest is None or after is None or "step" not in after:
            return
        rounds_per_step = 1 / max(1, after["microbatches"])
        now = last = _moment(after)
        for sample in reversed(self.samples):
            replica = replica_of(sample, index)
            if replica is None:
                return
            if "step" not in replica and replica["restarts"] == after["restarts"]:
                continue  # its engine did not answer in time
            if "step" not in replica or replica["step"] > after["step"] or replica["restarts"] != after["restarts"]:
                return
            if sample["server"]["started"] != latest["server"]["started"]:
                return
            last = min(last, _moment(replica))
            yield latest["time"] - sample["time"], (now - last) * rounds_per_step, replica
            after = replica


def replica_of(sample: Sample, index: int) -> LiveReplica | None:
    return next((replica for replica in sample["replicas"] if replica["index"] == index), None)


def used(replica: LiveReplica) -> float:
    """Blocks in use."""
    return float(replica["blocks"].own + replica["blocks"].shared)


def curve_of(forecast: LiveForecast, shift: float = 0.0) -> Curve:
    """Blocks in use over rounds, from `shift` on."""
    return Curve(tuple(step + shift for step in forecast.steps), tuple(map(float, forecast.blocks)))


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    pairs = list(points)
    return Curve(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def _gain(name: str, before: Sample, after: Sample, index: int | None = None) -> float:
    """Growth of a total, of one replica or of all. One whose total is not known in both samples adds nothing; one that
    is smaller than before has begun at 0 again."""
    is_new_server = before["server"]["started"] != after["server"]["started"]
    gain = 0.0
    for replica in after["replicas"]:
        old = replica_of(before, replica["index"])
        if index not in (None, replica["index"]) or old is None or "tokens" not in old or "tokens" not in replica:
            continue
        earlier, now = (int(one["tokens"][name]) for one in (old, replica))  # type: ignore[literal-required]
        is_new = is_new_server or replica["restarts"] != old["restarts"] or now < earlier
        gain += now if is_new else now - earlier
    return gain


def _is_gap(before: Sample, after: Sample) -> bool:
    is_past = before["is_past"] or after["is_past"]
    return after["time"] - before["time"] > (_PAST_GAP_S if is_past else _GAP_S)


def _moment(replica: LiveReplica) -> int:
    """The step from which the replica's forecast counts; steps in flight lie between it and the newest results."""
    return replica["step"] if replica["forecast"] is None else replica["forecast"].step
