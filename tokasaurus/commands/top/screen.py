"""The screen of `toka top`, and the one line of a sample for pipes."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import quantiles

from rich.text import Text

from tokasaurus.commands.top.samples import History, Line, forecast_of, parts_of, time_left
from tokasaurus.messages.live import LiveNext
from tokasaurus.monitoring.progress import show_left, show_time
from tokasaurus.server.live_past import KEPT_SECONDS
from tokasaurus.server.protocol.live import LiveEvent, LiveJob, LiveKey, LiveReplica

_LABEL, _RATE = 12, 22
"""Columns of the words at the left, and of tokens per second beside bars."""
_MIN_CHART, _MAX_CHART = 4, 20
"""Rows of the chart."""
_MIDDLE, _HIGH = 16, 30
"""Rows of a screen that has the chart, and of one that also has the oldest requests, and keys."""
_LITTLE = 0.35
"""Share of the pool; if no more was in use while nothing runs, the chart is enlarged."""
_POOL = {"own": ("█", "cyan"), "shared": ("▓", "blue"), "cached": ("▒", "magenta"), "free": ("░", "dim")}
_STATES = {"up": "green", "starting": "yellow", "paused": "yellow", "asleep": "yellow", "down": "bold red"}
HELP = """\
q, Ctrl-C: quit    p, space: pause, again: go on    r: next replica
left, right: in a replay, 10 s back, 10 s on    ?: this, again: the figures

Rates are means of the last 5 s, events sums of the last minute, parts of a step
means of the last 10 s. The server remembers the last 15 minutes. The forecast
counts the blocks in use until the last running sequence has ended, by predicted
lengths; the dotted line is what it said a minute ago. Lengths compare the last
1,024 sequences that ended with what was predicted when they were admitted."""


@dataclass
class Screen:
    """What is known, and how much of it the user sees."""

    keys: str
    """The last line."""
    history: History = field(default_factory=History)
    status: str = "live"
    is_old: bool = False
    """There is no connection: the figures are paler."""
    replica: int = 0
    """Index of the one that is shown."""
    shows_help: bool = False
    width: int = 80

    def lines(self, width: int, height: int) -> list[Text]:
        """`height` lines, which a console cuts."""
        self.width = width
        body = self._body(height - 2) if self.history.samples else [Text("no sample yet")]
        body = list(map(Text, HELP.splitlines())) if self.shows_help else body
        for line in body if self.is_old else ():
            line.stylize("dim")
        body = [*body, *[Text()] * height][: max(0, height - 2)]
        lines = [self._header(), *body, Text(self.keys, style="dim")][:height]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines

    def show_next_replica(self) -> None:
        indices = sorted(one["index"] for sample in self.history.samples[-1:] for one in sample["replicas"])
        self.replica = next((index for index in indices if index > self.replica), min(indices, default=0))

    def _header(self) -> Text:
        style = "bold red" if self.is_old else "green" if self.status == "live" else "yellow"
        line = Text.assemble(("toka top  ", "bold"), (self.status, style))
        for sample in self.history.samples[-1:]:
            server = sample["server"]
            sizes = {"replicas": server["dp_size"], "stages": server["pp_size"], "ranks": server["tp_size"]}
            facts = [server["model"], f"{server['device'] or ''} {server['dtype'] or ''}".strip()]
            facts += [f"{size} {name}" for name, size in sizes.items() if size > 1]
            facts.append(f"up {show_time(max(0.0, sample['time'] - server['started']))}" if server["started"] else "")
            facts.append("draining" if server["draining"] else "")
            line.append("".join(f"  {fact}" for fact in facts if fact))
        return line

    def _body(self, height: int) -> list[Text]:
        """The most important lines are above; the chart has the rows that are left."""
        sample, replica = self.history.samples[-1], self.history.replica(self.replica)
        replicas = [self.history.replica(one["index"]) or one for one in sample["replicas"]]
        jobs = [one for one in sample["jobs"] if one["ended"] is None or sample["time"] - one["ended"] < KEPT_SECONDS]
        jobs.sort(key=lambda one: one["state"] not in ("running", "validating", "waiting"))
        above = [self._rate("generated", "green"), self._rate("prompt", "yellow"), self._quarter()]
        above += _limited(list(map(self._replica, replicas)) if len(replicas) > 1 else [], height // 6)
        below = [_requests(sample), *_limited([self._job(one, sample["time"]) for one in jobs], height // 5)]
        if replica is not None:
            above += [_batch(replica), self._pool(replica), _pool_counts(replica), _forecast(replica)]
            below = [_queue(replica), *below, self._events(replica), self._lengths(replica)]
            below += [*self._step(replica), *self._stages(replica)]
            below += self._oldest(replica, height // 8) if height >= _HIGH else []
        below += _limited(list(_keys(sample)), height // 6) if height >= _HIGH else []
        room = max(_MIN_CHART, min(_MAX_CHART, height - len(above) - len(below) - 1))
        return [*above, *(self._chart(replica, room) if replica and height >= _MIDDLE else []), *below]

    def _rate(self, name: str, style: str) -> Text:
        (rate,), room = self.history.means(name, 5), max(0, self.width - _LABEL - _RATE)
        bars = _bars(self.history.means(name, room, room))
        return _line(name, f"{_per_s(rate):>10} tokens/s  ").append(bars, style)

    def _quarter(self) -> Text:
        """Generated tokens of the last quarter of an hour."""
        means = self.history.means("generated", KEPT_SECONDS, max(1, self.width - _LABEL - _RATE))
        highest = max((mean for mean in means if mean is not None), default=None)
        return _line("15 minutes", f"max {_per_s(highest):>6} tokens/s  ").append(_bars(means), "green")

    def _replica(self, replica: LiveReplica) -> Text:
        index, state, blocks = replica["index"], replica["state"], replica["blocks"]
        (rate,) = self.history.means("generated", 5, index=index)
        facts = [f"{_per_s(rate):>8} tokens/s", f"{replica['running']:,} running", f"{replica['waiting']:,} waiting"]
        facts += [f"pool {_percent(blocks.used, blocks.total)}"]
        facts += [f"{replica['restarts']} restarts" if replica["restarts"] else ""]
        label = f"{'>' if index == self.replica else ' '} replica {index}"
        return _line(label, *facts, between="  ", head=[Text(f"{state:<9}", _STATES.get(state, ""))])

    def _pool(self, replica: LiveReplica) -> Text:
        blocks, line = replica["blocks"], _line("pool")
        text = f" {_percent(blocks.used, blocks.total)} of {blocks.total:,} blocks in use"
        counts = list(itertools.accumulate([0, *(getattr(blocks, name) for name in _POOL)]))
        room = max(0, self.width - _LABEL - len(text))
        ends = [round(count / max(1, counts[-1]) * room) for count in counts]
        for (cell, style), (start, end) in zip(_POOL.values(), itertools.pairwise(ends), strict=True):
            line.append(cell * (end - start), style)
        return line.append(text)

    def _chart(self, replica: LiveReplica, height: int) -> list[Text]:
        """`height` rows of the blocks in use, in the past and by the forecast, and the axis below them. While nothing
        runs there is no forecast, and all that is known of the past."""
        columns, index = max(1, self.width - _LABEL - 1), replica["index"]
        past, ahead = self.history.used_blocks(index), forecast_of(replica)
        earlier_s, earlier = self.history.earlier_forecast(index) if ahead else (0.0, [])
        start, end = past[0][0][0] if past else 0.0, ahead[-1][1][0] if ahead else 0.0
        start = max(start, -end / 2) if ahead else start  # a third of the chart at most is the past
        highest = max((point[1] for line in past + ahead for point in line), default=0.0)
        top = max(highest, replica["blocks"].total, replica["forecast"].limit if replica["forecast"] else 0)
        top = 1.5 * highest if not ahead and 0 < highest < _LITTLE * top else top
        if end <= start or top <= 0:
            return []
        now = max(0, min(round(-start / (end - start) * columns), columns - 3))
        rows = _rows(_columns(past + ahead, start, end, columns), top, height)
        for column, value in enumerate(_columns(earlier, start, end, columns)):
            if value is not None:
                level = min(4 * height - 1, int(value / top * 4 * height))
                rows[height - 1 - level // 4][column] = "⣀⠤⠒⠉"[level % 4]
        labels, lines = {0: f"{top:,.0f}", height // 2: f"{top * (1 - height // 2 / height):,.0f}"}, list[Text]()
        for number, row in enumerate(map("".join, rows)):
            label = f"{labels.get(number, ''):>{_LABEL - 1}} │"
            lines.append(Text.assemble((label, "dim"), (row[:now], "blue"), (row[now:], "cyan")))
            lines[-1].highlight_regex("[⣀⠤⠒⠉]+", "bright_yellow")
        first, last = f"{show_time(-start)} ago", f"+{show_time(end)}" if ahead else ""
        note, room = f"dots: {earlier_s:.0f} s ago" if earlier else "", max(0, columns - now - 3 - len(last))
        axis = f"{first if len(first) < now else '':<{now}}now{note if len(note) + 2 <= room else '':^{room}}{last}"
        return [*lines, Text(" " * (_LABEL + 1) + axis, style="dim")]

    def _events(self, replica: LiveReplica) -> Text:
        counted = [one["events"] for one in self.history.counted(replica["index"], 60)[1]]
        words = {"admitted": "", "finished": "", "preempted": "", "evicted": "blocks "}
        facts = [f"{sum(getattr(one, name) for one in counted):,} {word}{name}" for name, word in words.items()]
        return _line("last minute", *facts, between=", ")

    def _lengths(self, replica: LiveReplica) -> Text:
        found = self.history.lengths(replica["index"])
        if not found:
            return _line("lengths", "none has finished yet")
        tenths = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
        facts = [f"actual / predicted: median {tenths[4]:.2f}", f"10-90 % {tenths[0]:.2f} to {tenths[8]:.2f}"]
        return _line("lengths", *facts, f"of {len(found):,}", between=", ")

    def _step(self, replica: LiveReplica) -> list[Text]:
        """What a step takes, and its parts in milliseconds, the longest first."""
        step_s, (seconds, counted) = replica["step_seconds"], self.history.counted(replica["index"], 10)
        num_steps, facts = sum(one["steps"] for one in counted), ["–" if step_s is None else f"{step_s * 1000:.1f} ms"]
        device, phases, manager = (_sums(counted, group) for group in ("device", "phases", "manager"))
        if device and seconds > 0:
            facts.append(f"device {_percent(device.get('busy', 0.0), seconds)} busy")
            facts.append(f"{_percent(device.get('idle', 0.0), seconds)} idle between steps")
        lines = [_line("step", *facts, f"{replica['queue_depth']} in flight")]
        for name, group in (("model", phases), ("manager", manager)) if num_steps else ():
            found = sorted(
                ((part_s / num_steps * 1000, part) for part, part_s in group.items() if part_s), reverse=True
            )
            head = Text(f"{name} {sum(ms for ms, _ in found):.2f} ms: ")
            lines += (
                [_line("", *(f"{part} {ms:.2f}" for ms, part in found), between=", ", head=[head])] if found else []
            )
        return lines

    def _stages(self, replica: LiveReplica) -> list[Text]:
        """One line for all pipeline stages, the first one first; none without."""
        seconds, counted = self.history.counted(replica["index"], 10)
        stages, facts = list(zip(*(one["stages"] for one in counted if one["stages"]), strict=False)), []
        for name in ("busy", "waiting"):
            shares = (min(1.0, sum(getattr(one, name) for one in stage) / seconds) for stage in stages)
            facts.append(f"{name} {', '.join(f'{share * 100:.0f}' for share in shares)} %")
        flying = ", ".join(str(stage[-1].microbatches) for stage in stages)
        return [_line("stages", *facts, f"microbatches {flying}")] if stages else []

    def _oldest(self, replica: LiveReplica, count: int) -> Iterator[Text]:
        """The oldest requests that run, and as many that wait."""
        running = [one for one in replica["oldest"] if one.state != "waiting"]
        waiting = [one for one in replica["oldest"] if one.state == "waiting"]
        for number, one in enumerate([*running[:count], *waiting[:count]]):
            facts = [f"{one.state} {_seconds(one.age_seconds)}"]
            facts += [f"{one.prompt_tokens:,} + {one.generated_tokens:,} tokens"]
            facts += [f"{one.running} of {one.samples} samples" if one.samples > 1 else ""]
            facts += [f"waited {_seconds(one.wait_seconds)}" if one.state != "waiting" else ""]
            head = [_padded(one.client or "unknown", 15), _padded(one.id, 16 if self.width < 100 else 42)]
            yield _line("" if number else "oldest", *facts, between=", ", head=head)

    def _job(self, job: LiveJob, now: float) -> Text:
        total, ended, failed, left = job["lines"]["total"], job["ended"], job["lines"]["failed"], time_left(job)
        done, price, device_s = job["lines"]["done"] + failed, job["cost"]["price"], job["cost"]["device_seconds"]
        unknown = "" if ended is not None else ", of an unknown number"
        facts = [f"{_percent(done, total)} of {total:,}" if total else f"{done:,} lines{unknown}"]
        if job["state"] == "running":
            facts += [f"{_per_s(job['tokens_per_second'])} tokens/s", f"{show_left(left)} left" if left else ""]
        else:
            facts.append(f"{job['state']}{'' if ended is None else f' {show_time(max(0.0, now - ended))} ago'}")
        facts += [f"{failed:,} failed" if failed else "", job["reason"] or ""]
        if price is not None:
            facts.append(f"cost {price:,.2f}" if price >= 0.995 else f"cost {price:.2g}")
        elif device_s is not None:
            facts.append(f"device {_seconds(device_s)}")
        head = _padded(job["name"] or job["id"], 18 if self.width < 100 else 30)
        return _line(job["kind"], *facts, between=", ", head=[head])


def _line(label: str, *facts: str, between: str = "; ", head: Sequence[Text] = ()) -> Text:
    """The label, the head, and the facts that are not empty, the most important first."""
    text = between.join(filter(None, facts))
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), *head, text)


def _requests(sample: LiveEvent) -> Text:
    facts = [f"{sample['requests'][name]:,} {name}" for name in ("open", "answered", "aborted", "failed")]
    cached, computed = (sum(one["tokens"][name] for one in sample["replicas"]) for name in ("cached", "computed"))
    of_prompts = f"{_percent(cached, cached + computed)} of prompt tokens cached" if cached + computed else ""
    return _line("requests", *facts, of_prompts, between=", ")


def _keys(sample: LiveEvent) -> Iterator[Text]:
    nobody: LiveKey = {"name": None, "running": 0, "waiting": 0, "tokens": {"prompt": 0, "generated": 0}}
    for number, one in enumerate(one for one in sample["keys"] if one != nobody):
        facts = [f"{one['running']:,} running, {one['waiting']:,} waiting"]
        facts += [f"{one['tokens']['prompt']:,} + {one['tokens']['generated']:,} tokens so far"]
        yield _line("" if number else "keys", *facts, head=[_padded(one["name"] or "others", 15)])


def _batch(replica: LiveReplica) -> Text:
    left = time_left(replica)
    facts = [f"{replica['running']:,} running, {replica['prefilling']:,} prefilling", f"{replica['waiting']:,} waiting"]
    facts += [
        f"all done in {show_left(left)}" if left else "",
        f"{replica['slots']:,} slots" if replica["slots"] else "",
    ]
    return _line("batch", *facts, f"{replica['background']:,} of batches" if replica["background"] else "")


def _pool_counts(replica: LiveReplica) -> Text:
    counts = [(cell, f" {getattr(replica['blocks'], name):,} {name}") for name, cell in _POOL.items()]
    return _line("", head=[Text("   ").join(Text.assemble(*count) for count in counts)])


def _forecast(replica: LiveReplica) -> Text:
    forecast, step_s = replica["forecast"], replica["step_seconds"]
    if forecast is None or not forecast.steps:
        return _line("forecast", "nothing runs")
    rounds, peak, limit = forecast.steps[-1], forecast.peak or max(forecast.blocks, default=0), forecast.limit
    time_of = "" if step_s is None else f" ({_seconds(rounds * step_s)})"
    # Above the limit as when requests become longer than expected.
    height = "peak above the limit" if peak > limit else f"peak {_percent(peak, limit)}"
    return _line("forecast", f"all that runs ends in {rounds:,} steps{time_of}", height, f"{peak:,} blocks")


def _queue(replica: LiveReplica) -> Text:
    first, oldest_s = replica["next"], replica["oldest_wait_seconds"]
    waiting = f"{replica['waiting']:,} waiting" if replica["waiting"] else "empty"
    fact = next_sentence(first, replica["step_seconds"]) if first else waiting
    return _line("queue", fact, "" if oldest_s is None else f"oldest {_seconds(oldest_s)}")


def next_sentence(first: LiveNext, step_s: float | None) -> str:
    """When the first waiting sequence is admitted."""
    needs, why, steps = f" (+{first.blocks:,} blocks)", first.blocked_by, first.fits_in_steps
    if why == "paused":
        return "next in the queue waits until the server resumes"
    if not why:
        return f"next in the queue is admitted with the next steps{needs}"
    what = "gets a slot" if why == "slots" else "fits"
    if steps is None:
        return f"next in the queue {what} after all that runs{needs}"
    left = "" if step_s is None else f", {_seconds(steps * step_s)}"
    return f"next in the queue {what} in {steps:,} steps{needs}{left}"


def compact_line(history: History) -> str:
    """The newest sample in one line, for pipes."""
    sample = history.samples[-1]
    replicas = sample["replicas"]
    in_use, total = (sum(getattr(one["blocks"], name) for one in replicas) for name in ("used", "total"))
    running, prefilling, waiting = (sum(one[name] for one in replicas) for name in ("running", "prefilling", "waiting"))
    (generated,), (prompt,) = (history.means(name, 5) for name in ("generated", "prompt"))
    left = max(filter(None, map(time_left, replicas)), key=attrgetter("middle_s"), default=None)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(sample["time"])),
        f"{_per_s(generated)} generated, {_per_s(prompt)} prompt tokens/s",
        f"{running:,} running, {prefilling:,} prefilling, {waiting:,} waiting",
        f"{_percent(in_use, total)} of {total:,} blocks",
        f"{show_left(left)} left" if left else "",
        *(f"replica {one['index']} {one['state']}" for one in replicas if one["state"] != "up"),
    ]
    return "  ".join(filter(None, parts))


def _columns(lines: Sequence[Line], start: float, end: float, count: int) -> list[float | None]:
    """The highest value in each of `count` equal parts from start to end; None where there is no line."""
    found: list[float | None] = [None] * count
    for (x0, y0), (x1, y1) in lines:
        first, last = ((x - start) / (end - start) * count for x in (x0, x1))
        for part, *ends in parts_of(first, last, count) if last > first else ():
            found[part] = max(found[part] or 0.0, *(y0 + (y1 - y0) * (x - first) / (last - first) for x in ends))
    return found


def _rows(values: Sequence[float | None], top: float, height: int) -> list[list[str]]:
    """Cells of bars, the highest row first; a bar of `top` fills all rows. None is a gap, and 0 the lowest bar."""
    eighths = [0 if value is None else max(1, round(value / (top or 1.0) * height * 8)) for value in values]
    return [[" ▁▂▃▄▅▆▇█"[min(8, max(0, own - 8 * row))] for own in eighths] for row in reversed(range(height))]


def _bars(values: Sequence[float | None]) -> str:
    return "".join(_rows(values, max(filter(None, values), default=0.0), 1)[0])


def _limited(lines: list[Text], count: int) -> list[Text]:
    num_shown = max(1, count - 1)
    more = Text(f"{'':<{_LABEL}}and {len(lines) - num_shown} more")
    return [*lines[:num_shown], more] if len(lines) > num_shown + 1 else lines


def _padded(text: str, width: int) -> Text:
    cell = Text(text)
    cell.truncate(width, overflow="ellipsis", pad=True)
    return cell.append(" ")


def _sums(replicas: Sequence[LiveReplica], group: str) -> dict[str, float]:
    parts: list[dict[str, float]] = [one["parts"][group] for one in replicas]  # type: ignore[literal-required]
    return {name: sum(one.get(name, 0.0) for one in parts) for one in parts for name in one}


def _per_s(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}"


def _percent(part: float, whole: float) -> str:
    """At most 100 %: parts that were measured apart from the whole may exceed it by a little."""
    return "–" if whole <= 0 else f"{min(1.0, part / whole) * 100:.0f} %"


def _seconds(seconds: float) -> str:
    """A time as `show_time` writes it, but with a decimal below 10 s."""
    return f"{seconds:.1f} s" if seconds < 9.95 else show_time(seconds)
