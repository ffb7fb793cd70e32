"""What follows from a series of samples: rates, sums over a time, quotients of lengths, and old forecasts today."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tokasaurus.commands.top.samples import Forecast, ReplicaSample, Sample

KEPT_SECONDS = 900.0
MAX_LENGTHS = 1024
"""Newest sequences whose predicted and actual lengths are compared."""
_EARLIER_S = 60.0
"""Age of the forecast that is shown beside the newest one."""
_MIN_EARLIER_S = 5.0
_LATE_S = 5.0
"""How long the figures of an engine stay that does not answer."""
_PAST_S = 5.0
"""Between two samples of the server's own past."""
_GAP_S, _PAST_GAP_S = 5.0, 2.2 * _PAST_S
"""A longer time between two samples is a gap; the second if one of them is of that past."""


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
        return max([self._at(start), self._at(end), *inside])

    def shifted(self, by: float) -> "Curve":
        return Curve(tuple(x + by for x in self.xs), self.ys)

    def _at(self, x: float) -> float:
        right = bisect_right(self.xs, x)
        if right == len(self.xs):
            return self.ys[-1]
        left_x, right_x = self.xs[right - 1], self.xs[right]
        left_y, right_y = self.ys[right - 1], self.ys[right]
        return left_y + (right_y - left_y) * (x - left_x) / (right_x - left_x)


@dataclass(frozen=True, slots=True)
class EarlierForecast:
    seconds_ago: float
    curve: Curve
    """Blocks in use, over rounds after now."""


@dataclass(frozen=True, slots=True)
class LengthQuotients:
    """Actual by predicted lengths."""

    count: int
    median: float
    low: float
    """The quotient that a tenth of the sequences is below."""
    high: float
    """The quotient that a tenth of the sequences is above."""


@dataclass(frozen=True, slots=True)
class PartsOfSteps:
    seconds: float
    """Time in which the steps were counted."""
    steps: float
    by_group: Mapping[str, Mapping[str, float]]
    """Seconds of each part, by group."""


@dataclass(frozen=True, slots=True)
class StageShares:
    """A pipeline stage."""

    busy: float
    """Share of the time in which the stage computes."""
    waiting: float
    """Share of the time in which it waits for other stages."""
    microbatches: int
    """Microbatches in flight now."""


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
        if self.samples and sample.time <= self.samples[-1].time:
            self.samples.clear()
        missing = [
            then
            for then in sample.past
            if then.time < sample.time and all(abs(then.time - one.time) >= _PAST_S for one in self.samples)
        ]
        if missing:
            self.samples = deque(sorted([*self.samples, *missing], key=lambda one: one.time))
        self.samples.append(replace(sample, past=()))
        while sample.time - self.samples[0].time > KEPT_SECONDS:
            self.samples.popleft()

    def rate(self, name: str, seconds: float = 5.0, index: int | None = None) -> float | None:
        """Tokens per second of the total `name`, of one replica or of all, in the last `seconds`, or between the last
        two samples if they are further apart; None without two samples."""
        samples = self._last(seconds, with_past=True)
        if len(samples) < 2:
            return None
        gain = sum(_gain(name, before, after, index) for before, after in itertools.pairwise(samples))
        return gain / (samples[-1].time - samples[0].time)

    def rates(self, name: str, count: int) -> list[float]:
        """Tokens per second between every two of the newest samples, oldest first; at most `count`."""
        samples = list(self.samples)[-count - 1 :]
        return [
            _gain(name, before, after, None) / (after.time - before.time)
            for before, after in itertools.pairwise(samples)
        ]

    def means(self, name: str, count: int) -> list[float | None]:
        """Tokens per second of all replicas in equal parts of the last KEPT_SECONDS, oldest first; None where nothing
        is known."""
        part_s = KEPT_SECONDS / max(1, count)
        gains, known_s = [0.0] * count, [0.0] * count
        for before, after in itertools.pairwise(self.samples):
            if _is_gap(before, after):
                continue
            per_s = _gain(name, before, after, None) / (after.time - before.time)
            start, end = (one.time - self.samples[-1].time + KEPT_SECONDS for one in (before, after))
            for part in range(max(0, int(start // part_s)), min(count, math.ceil(end / part_s))):
                seconds = min(end, (part + 1) * part_s) - max(start, part * part_s)
                gains[part] += per_s * seconds
                known_s[part] += seconds
        return [gain / seconds if seconds > 0 else None for gain, seconds in zip(gains, known_s, strict=True)]

    def used_blocks(self, index: int) -> list[Curve]:
        """Blocks in use, in seconds before the newest sample; a curve for each time without a gap."""
        parts: list[tuple[list[float], list[float]]] = []
        before: tuple[Sample, ReplicaSample] | None = None
        for sample in self.samples:
            replica = sample.replica(index)
            if replica is None or not replica.blocks.total:
                continue
            if before is None or _is_gap(before[0], sample) or before[1].restarts != replica.restarts:
                parts.append(([], []))
            parts[-1][0].append(sample.time - self.samples[-1].time)
            parts[-1][1].append(float(replica.blocks.used))
            before = sample, replica
        return [Curve(tuple(xs), tuple(ys)) for xs, ys in parts]

    def events(self, index: int, seconds: float = 60.0) -> dict[str, float]:
        """Number of events of each kind in the last `seconds`."""
        sums: dict[str, float] = {}
        for replica in self._counted(index, seconds):
            _add(sums, replica.events)
        return sums

    def parts(self, index: int, seconds: float = 10.0) -> PartsOfSteps | None:
        """Times of the steps' parts in the last `seconds`; None if nothing was counted."""
        by_group: dict[str, dict[str, float]] = {}
        counted = self._counted(index, seconds)
        for replica in counted:
            for group, parts in replica.parts.items():
                _add(by_group.setdefault(group, {}), parts)
        if not any(by_group.values()):
            return None
        samples = self._last(seconds)
        return PartsOfSteps(
            samples[-1].time - samples[0].time, float(sum(replica.steps for replica in counted)), by_group
        )

    def stages(self, index: int, seconds: float = 10.0) -> list[StageShares]:
        """Shares of each pipeline stage in the last `seconds`; empty without pipeline stages."""
        samples = self._last(seconds)
        counted = [replica.stages for replica in self._counted(index, seconds) if replica.stages]
        if not counted:
            return []
        elapsed_s = samples[-1].time - samples[0].time
        return [
            StageShares(
                sum(stage.busy for stage in stages) / elapsed_s,
                sum(stage.waiting for stage in stages) / elapsed_s,
                stages[-1].microbatches,
            )
            for stages in zip(*counted, strict=False)
        ]

    def lengths(self, index: int) -> LengthQuotients | None:
        """Quotients of the newest sequences that have finished; None if there are none."""
        quotients: list[float] = []
        for replica in self._backwards(index):
            for predicted, actual in reversed(replica.lengths):
                if predicted > 0 and len(quotients) < MAX_LENGTHS:
                    quotients.append(actual / predicted)
        if not quotients:
            return None
        quotients.sort()
        low, median, high = (quantile(quotients, share) for share in (0.1, 0.5, 0.9))
        return LengthQuotients(len(quotients), median, low, high)

    def earlier_forecast(self, index: int) -> EarlierForecast | None:
        """What was said a minute ago, or as early as possible after it, in rounds after now; None if the engine was
        started anew since then, or nothing old enough is known."""
        found: EarlierForecast | None = None
        for seconds_ago, rounds_ago, replica in self._same_engine(index):
            if seconds_ago < _MIN_EARLIER_S or replica.forecast is None:
                continue
            if found is not None and seconds_ago > _EARLIER_S:
                break
            found = EarlierForecast(seconds_ago, curve_of(replica.forecast).shifted(-rounds_ago))
        return found

    def past_blocks(self, index: int) -> Curve:
        """Blocks in use at the samples, in rounds after now, so that all x are at most 0."""
        points = [(-rounds_ago, float(replica.blocks.used)) for _, rounds_ago, replica in self._same_engine(index)]
        points.reverse()
        return Curve(tuple(x for x, _ in points), tuple(y for _, y in points))

    def replica(self, index: int) -> ReplicaSample | None:
        """The newest sample of a replica. If its engine did not answer in time, the one before is the newest, for a few
        seconds."""
        latest = None if self.latest is None else self.latest.replica(index)
        if self.latest is None or latest is None or latest.step is not None:
            return latest
        for sample in reversed(self.samples):
            if self.latest.time - sample.time > _LATE_S:
                break
            before = sample.replica(index)
            if before is None or (before.state, before.restarts) != (latest.state, latest.restarts):
                break
            if before.step is not None:
                return before
        return latest

    def _last(self, seconds: float, with_past: bool = False) -> list[Sample]:
        """Samples of the last seconds, at least two if there are. with_past: those that the server remembers too."""
        found: list[Sample] = []
        for sample in reversed(self.samples):
            if sample.is_past and not with_past:
                break
            if len(found) >= 2 and self.samples[-1].time - sample.time > seconds:
                break
            found.append(sample)
        found.reverse()
        return found

    def _counted(self, index: int, seconds: float) -> list[ReplicaSample]:
        """The replica in the samples that count what was in the last seconds: the first of them counts earlier."""
        return [replica for sample in self._last(seconds)[1:] if (replica := sample.replica(index)) is not None]

    def _backwards(self, index: int) -> Iterator[ReplicaSample]:
        for sample in reversed(self.samples):
            replica = sample.replica(index)
            if replica is not None:
                yield replica

    def _same_engine(self, index: int) -> Iterator[tuple[float, float, ReplicaSample]]:
        """(seconds ago, rounds ago, replica), newest first, as long as the replica was not started anew."""
        latest, after = self.latest, self.replica(index)
        if latest is None or after is None:
            return
        microbatches = after.microbatches
        now = last = _moment(after)
        for sample in reversed(self.samples):
            replica = sample.replica(index)
            if replica is None or now is None or last is None:
                return
            if replica.step is None and replica.restarts == after.restarts:  # its engine did not answer in time
                continue
            moment = _moment(replica)
            if moment is None or (replica.step or 0) > (after.step or 0):
                return
            if replica.restarts != after.restarts or sample.server.started != latest.server.started:
                return
            last = min(last, moment)
            yield latest.time - sample.time, (now - last) / microbatches, replica
            after = replica


def curve_of(forecast: Forecast) -> Curve:
    return Curve(forecast.steps, forecast.blocks)


def gained(before: float, after: float) -> float:
    """Growth of a total. A total that is smaller than before has begun at 0 again."""
    return after - before if after >= before else after


def quantile(ascending: Sequence[float], share: float) -> float:
    """Linear between two values, as NumPy's."""
    position = share * (len(ascending) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ascending[low] + (ascending[high] - ascending[low]) * (position - low)


def _gain(name: str, before: Sample, after: Sample, index: int | None) -> float:
    """Growth of a total, of one replica or of all. One whose total is not known in both samples adds nothing."""
    is_new_server = before.server.started != after.server.started
    gain = 0.0
    for replica in after.replicas:
        if index is not None and replica.index != index:
            continue
        old = before.replica(replica.index)
        if name not in replica.tokens or old is None or name not in old.tokens:
            continue
        is_new = is_new_server or replica.restarts != old.restarts
        gain += replica.tokens[name] if is_new else gained(old.tokens[name], replica.tokens[name])
    return gain


def _is_gap(before: Sample, after: Sample) -> bool:
    is_past = before.is_past or after.is_past
    return after.time - before.time > (_PAST_GAP_S if is_past else _GAP_S)


def _moment(replica: ReplicaSample) -> int | None:
    """The step from which the replica's forecast counts; steps in flight lie between it and the newest results."""
    return replica.step if replica.forecast is None else replica.forecast.step


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
