"""The screen as lines of a given width, and the one line of a sample for pipes."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import quantiles

from rich.text import Text

from tokasaurus.commands.top.charts import Area, area_chart, cells_of_shares, sparkline
from tokasaurus.commands.top.history import Curve, History, curve_of, used
from tokasaurus.commands.top.samples import Sample, time_left
from tokasaurus.messages.live import LiveNext
from tokasaurus.monitoring.progress import show_left, show_time
from tokasaurus.server.live_past import KEPT_SECONDS
from tokasaurus.server.protocol.live import LiveJob, LiveReplica

_LABEL = 12
"""Columns of the words at the left."""
_MIN_CHART, _MAX_CHART = 4, 20
"""Rows of the chart of the forecast."""
_POOL = (
    ("own", "█", "#", "cyan"),
    ("shared", "▓", "=", "blue"),
    ("cached", "▒", "-", "magenta"),
    ("free", "░", ".", "dim"),
)
"""(kind of blocks, cell, cell in ASCII, style)."""
_LITTLE = 0.35
"""Share of the pool; if no more is in use, the chart of the past is enlarged."""
_STATES = {"up": "green", "starting": "yellow", "paused": "yellow", "asleep": "yellow", "down": "bold red"}
HELP = """\
q, Ctrl-C    quit
p            pause; again, go on
r            next replica
left, right  in a replay: 10 s back, 10 s on
space        in a replay: pause; again, go on
?            this list; again, the figures

Rates are means of the last 5 s, events sums of the last minute, parts of a step
means of the last 10 s. 15 minutes: generated tokens, and the highest bar; the
server remembers them, also of the time before this command. The forecast counts
the blocks in use until the last running sequence has ended, by the lengths that
are predicted now; the dotted line is what it said a minute ago. Lengths compare
the newest 1,024 sequences that have ended with what was predicted when they
were admitted.""".splitlines()

_Fact = str | tuple[str, str] | Text
"""A tuple is a text and its style."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the terminal can show."""

    has_colours: bool = True
    ascii_only: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """What is on the screen beside the figures."""

    status: str
    """Text at the right of the first line."""
    status_style: str = "green"
    keys: str = "q quit   p pause   r replica   ? help"
    replica: int = 0
    """Index of the one that is shown."""
    shows_help: bool = False
    is_old: bool = False
    """There is no connection: the figures are paler."""


def screen_lines(history: History, frame: Frame, width: int, height: int, look: Look) -> list[Text]:
    """Lines of the screen: at most `height` of at most `width` columns."""
    sample = history.latest
    if frame.shows_help:
        body = [Text(line) for line in HELP][: max(0, height - 2)]
    elif sample is None:
        body = [Text("no sample yet", style="dim")]
    else:
        body = _View(history, sample, frame, width, look).body(height - 2)
    if frame.is_old:
        for line in body:
            line.stylize("dim")
    lines = [_header(sample, frame, width), *body][: max(1, height - 1)]
    lines += [Text()] * (height - 1 - len(lines)) + [Text(frame.keys, style="dim")]
    for line in lines:
        line.truncate(width)
    return lines[:height]


def compact_line(history: History) -> str:
    """The newest sample in one line, for pipes."""
    sample = history.latest
    assert sample is not None, "a sample has come"
    replicas = sample["replicas"]
    in_use, total = sum(map(used, replicas)), sum(one["blocks"].total for one in replicas)
    running, prefilling, waiting = (sum(one[name] for one in replicas) for name in ("running", "prefilling", "waiting"))
    parts = [
        time.strftime("%H:%M:%S", time.localtime(sample["time"])),
        f"{_rate(history.rate('generated'))} generated, {_rate(history.rate('prompt'))} prompt tokens/s",
        f"{running:,} running, {prefilling:,} prefilling, {waiting:,} waiting",
        f"{_percent(in_use, total)} of {total:,} blocks",
    ]
    if ends := [left for one in replicas if (left := time_left(one)) is not None]:
        parts.append(f"{show_left(max(ends, key=attrgetter('middle_s')))} left")
    parts += [f"replica {one['index']} {one['state']}" for one in replicas if str(one["state"]) not in ("up", "")]
    return "  ".join(parts)


def _header(sample: Sample | None, frame: Frame, width: int) -> Text:
    line = Text("toka top", style="bold", no_wrap=True)
    if sample is not None:
        server = sample["server"]
        facts = [server["model"], " ".join(word for word in (server["device"], server["dtype"]) if word)]
        sizes = (("replicas", server["dp_size"]), ("stages", server["pp_size"]), ("ranks", server["tp_size"]))
        facts += [f"{size} {name}" for name, size in sizes if size > 1]
        if server["started"]:
            facts.append(f"up {show_time(max(0.0, sample['time'] - server['started']))}")
        line.append("".join(f"  {fact}" for fact in facts if fact), style="not bold")
        line.append("  draining" if server["draining"] else "", style="not bold yellow")
    status = Text(frame.status, style=frame.status_style)
    status.truncate(max(0, width - 10))
    line.truncate(max(0, width - status.cell_len - 2), overflow="ellipsis", pad=True)
    return Text.assemble(line, "  ", status, no_wrap=True)


def next_sentence(waiting: LiveNext, step_seconds: float | None) -> str:
    """When the first waiting sequence is admitted."""
    needs, why, steps = f" (+{waiting.blocks:,} blocks)", waiting.blocked_by, waiting.fits_in_steps
    if why == "paused":
        return "next in the queue waits until the server resumes"
    if not why:
        return f"next in the queue is admitted with the next steps{needs}"
    what = "gets a slot" if why == "slots" else "fits"
    if steps is None:
        return f"next in the queue {what} after all that runs{needs}"
    left = "" if step_seconds is None else f", {_seconds(steps * step_seconds)}"
    return f"next in the queue {what} in {steps:,} steps{needs}{left}"


@dataclass(frozen=True, slots=True)
class _View:
    """The lines of the figures."""

    history: History
    sample: Sample
    frame: Frame
    width: int
    look: Look

    def body(self, height: int) -> list[Text]:
        """Sections in order; where the screen is too low, sections of higher ranks are left out first."""
        sample, frame = self.sample, self.frame
        replica, sections = self.history.replica(frame.replica), list[tuple[int, list[Text]]]()
        sections += [(0, self._throughput()), (4, [self._quarter()]), (2, [self._requests()])]
        if len(sample["replicas"]) > 1:
            shown = [self.history.replica(one["index"]) or one for one in sample["replicas"]]
            sections.append((3, _limited(list(map(self._replica, shown)), max(1, height // 6))))
        chart = list[Text]()
        if replica is None:
            sections.append((1, [self._line("replica", f"{frame.replica} is not known")]))
        else:
            sections += [
                (0, [self._batch(replica)]),
                (1, [self._pool(replica)]),
                (5, [self._pool_counts(replica)]),
                (1, [self._forecast(replica)]),
                (6, chart),
                (1, [self._queue(replica)]),
                (4, [self._events(replica), self._lengths(replica)]),
                (7, self._step(replica)),
                (6, self._stages(replica)),
                (8, self._oldest(replica, max(1, height // 4))),
            ]
        keys = [
            one
            for one in sample["keys"]
            if one["name"] or one["running"] or one["waiting"] or one["tokens"]["generated"]
        ]
        lines = [
            self._line(
                "keys" if not number else "",
                f"{one['running']:,} running, {one['waiting']:,} waiting",
                f"{one['tokens']['prompt']:,} + {one['tokens']['generated']:,} tokens so far",
                after=[(one["name"] or "others", 15)],
            )
            for number, one in enumerate(keys)
        ]
        sections.append((7, _limited(lines, max(1, height // 6))))
        jobs = [one for one in sample["jobs"] if one["ended"] is None or sample["time"] - one["ended"] < KEPT_SECONDS]
        jobs.sort(key=lambda one: one["state"] not in ("running", "validating", "waiting"))
        sections.append((2, _limited(list(map(self._job, jobs)), max(1, height // 5))))

        def num_lines() -> int:
            return sum(len(lines) for _, lines in sections)

        if replica is not None:
            for rank in (8, 7):  # of less use than the chart
                if height - num_lines() < _MIN_CHART + 1:
                    sections = [section for section in sections if section[0] != rank]
            room = height - num_lines()
            chart += self._chart(replica, min(room - 1, _MAX_CHART)) if room >= 3 else []
        while num_lines() > height and len(sections) > 1:
            sections.remove(max(sections, key=lambda section: section[0]))
        return [line for _, lines in sections for line in lines]

    def _line(self, label: str, *facts: _Fact, between: str = "; ", after: Sequence[tuple[str, int]] = ()) -> Text:
        """The label, texts cut to a width, and the facts, the most important first, as long as they fit."""
        line = Text.assemble((f"{label:<{_LABEL}}", "dim"), no_wrap=True)
        for text, width in after:
            cut = Text(text)
            cut.truncate(width, overflow="ellipsis", pad=True)
            line.append_text(cut).append(" ")
        return self._fitting(line, facts, between)

    def _fitting(self, line: Text, facts: Sequence[_Fact], between: str) -> Text:
        for number, fact in enumerate(facts):
            text = fact if isinstance(fact, Text) else Text.assemble(fact)
            if number and line.cell_len + len(between) + text.cell_len > self.width:
                break
            line.append(between if number else "").append_text(text)
        return line

    def _throughput(self) -> list[Text]:
        room, lines = max(0, self.width - _LABEL - 22), []
        for name, style in (("generated", "green"), ("prompt", "yellow")):
            line = self._line(name, Text.assemble((f"{_rate(self.history.rate(name)):>10}", "bold"), " tokens/s  "))
            lines.append(line.append(sparkline(self.history.rates(name, room), room, self.look.ascii_only), style))
        return lines

    def _quarter(self) -> Text:
        """Generated tokens of the last quarter of an hour."""
        room = max(0, self.width - _LABEL - 22)
        means = self.history.means("generated", room)
        highest = max((mean for mean in means if mean is not None), default=None)
        line = self._line("15 minutes", f"max {_rate(highest):>6} tokens/s  ")
        return line.append(sparkline(means, room, self.look.ascii_only), "green")

    def _requests(self) -> Text:
        told = self.sample["requests"]
        facts = [f"{told['open']:,} open", f"{told['answered']:,} answered", f"{told['aborted']:,} aborted"]
        facts.append(f"{told['failed']:,} failed")
        totals = [one["tokens"] for one in self.sample["replicas"] if "tokens" in one]
        cached, computed = (sum(one[name] for one in totals) for name in ("cached", "computed"))
        if cached + computed:
            facts.append(f"{_percent(cached, cached + computed)} of prompt tokens cached")
        return self._line("requests", *facts, between=", ")

    def _replica(self, replica: LiveReplica) -> Text:
        index, state = replica["index"], replica["state"]
        line = self._line(f"{'>' if index == self.frame.replica else ' '} replica {index}")
        line.append(f"{state:<9}", _STATES.get(state, ""))
        line.append(f"{_rate(self.history.rate('generated', index=index)):>8} tokens/s")
        pool = _percent(used(replica), replica["blocks"].total)
        facts = ["", f"{replica['running']:,} running", f"{replica['waiting']:,} waiting", f"pool {pool}"]
        facts += [f"{replica['restarts']} restarts"] if replica["restarts"] else []
        return self._fitting(line, facts, "  ")

    def _batch(self, replica: LiveReplica) -> Text:
        running = Text.assemble((f"{replica['running']:,}", "bold"), f" running, {replica['prefilling']:,} prefilling")
        left = time_left(replica)
        facts = [
            "" if left is None else f"all done in {show_left(left)}",
            f"{replica['slots']:,} slots" if replica["slots"] else "",
            f"{replica['background']:,} of batches" if replica["background"] else "",
        ]
        return self._line("batch", running, f"{replica['waiting']:,} waiting", *filter(None, facts))

    def _pool(self, replica: LiveReplica) -> Text:
        line, blocks = self._line("pool"), replica["blocks"]
        end = f" {_percent(used(replica), blocks.total)} of {blocks.total:,} blocks in use"
        shares = [blocks.own, blocks.shared, blocks.cached, blocks.free]
        counts = cells_of_shares(shares, max(0, self.width - _LABEL - len(end)))
        for (_, *cells, style), count in zip(_POOL, counts, strict=True):
            line.append(cells[self.look.ascii_only] * count, style)
        return line.append(end)

    def _pool_counts(self, replica: LiveReplica) -> Text:
        facts = [
            Text.assemble((cells[self.look.ascii_only], style), f" {getattr(replica['blocks'], name):,} {name}")
            for name, *cells, style in _POOL
        ]
        return self._line("").append_text(Text("   ").join(facts))

    def _forecast(self, replica: LiveReplica) -> Text:
        forecast, step_seconds = replica["forecast"], replica["step_seconds"]
        if forecast is None:
            return self._line("forecast", "nothing runs")
        rounds, peak, limit = forecast.steps[-1], forecast.peak, forecast.limit
        time_of = "" if step_seconds is None else f" ({_seconds(rounds * step_seconds)})"
        # Above the limit as when requests become longer than expected.
        height = "peak above the limit" if peak > limit else f"peak {_percent(peak, limit)}"
        end = Text.assemble("all that runs ends in ", (f"{rounds:,} steps", "bold"), time_of)
        return self._line("forecast", end, *([height] if limit else []), f"{peak:,} blocks")

    def _chart(self, replica: LiveReplica, height: int) -> list[Text]:
        """`height` rows, and the axis below them. While nothing runs there is no forecast, and no step passes: the last
        15 minutes, by time."""
        columns, total, forecast = (
            max(1, self.width - _LABEL - 1),
            float(replica["blocks"].total),
            replica["forecast"],
        )
        earlier: tuple[float, Curve] | None = None
        if forecast is None:
            areas = [Area(curve, "blue") for curve in self.history.used_blocks(replica["index"])]
            start, end, top = min((area.curve.xs[0] for area in areas), default=0.0), 0.0, total
            highest = max((max(area.curve.ys) for area in areas), default=0.0)
            top = 1.5 * highest if 0 < highest < _LITTLE * top else top
            first = f"{show_time(-start)} ago"
            marks = [(0, first), (columns - 3, "now")] if columns >= len(first) + 5 else []
        else:
            ahead, past = curve_of(forecast), self.history.past_blocks(replica["index"])
            earlier, areas = self.history.earlier_forecast(replica["index"]), [Area(past, "blue"), Area(ahead, "cyan")]
            end = ahead.xs[-1]
            if earlier is not None:
                end = max(end, min(earlier[1].xs[-1], 2 * end))
            # A third of the chart at most is the past.
            start = max(past.xs[0] if past.xs else 0.0, -end / 2 if end > 0 else -math.inf)
            top = max([total, float(forecast.limit), *ahead.ys])
            marks = self._marks(replica, start, end, columns, earlier)
        if end <= start or top <= 0:
            return []
        line, look = (None if earlier is None else earlier[1]), self.look
        rows = area_chart(
            areas, line, "bright_yellow", start, end, top, columns, height, look.has_colours, look.ascii_only
        )
        labels = {0: f"{top:,.0f}", height // 2: f"{top * (1 - (height // 2) / height):,.0f}"}
        wall = "|" if look.ascii_only else "│"
        walled = [
            Text.assemble((f"{labels.get(number, ''):>{_LABEL - 1}} {wall}", "dim"), row, no_wrap=True)
            for number, row in enumerate(rows)
        ]
        cells = [" "] * columns
        for place, text in marks:
            place = max(0, min(place, columns - len(text)))
            if text and all(cell == " " for cell in cells[max(0, place - 1) : place + len(text) + 1]):
                cells[place : place + len(text)] = text
        return [*walled, Text.assemble(" " * (_LABEL + 1), ("".join(cells), "dim"), no_wrap=True)]

    def _marks(
        self, replica: LiveReplica, start: float, end: float, columns: int, earlier: tuple[float, Curve] | None
    ) -> list[tuple[int, str]]:
        """(column, text) below the chart, the most important first: where now is, and how far the chart goes."""
        if end <= start:
            return []
        now, seconds = min(columns - 1, round(-start / (end - start) * columns)), replica["step_seconds"]
        last = "" if end <= 0 else f"+{end:,.0f} steps" + ("" if seconds is None else f", {_seconds(end * seconds)}")
        note = "" if earlier is None else f"dots: {earlier[0]:.0f} s ago"
        middle = now + 3 + (columns - now - 3 - len(last) - len(note)) // 2
        return [(now, "now"), (columns - len(last), last), (middle, note), (0, f"{start:,.0f}" if start < 0 else "")]

    def _queue(self, replica: LiveReplica) -> Text:
        waiting, oldest = replica["next"], replica["oldest_wait_seconds"]
        fact: _Fact = "empty" if not replica["waiting"] else f"{replica['waiting']:,} waiting"
        if waiting is not None:
            fact = next_sentence(waiting, replica["step_seconds"]), "bold"
        return self._line("queue", fact, *([] if oldest is None else [f"oldest {_seconds(oldest)}"]))

    def _events(self, replica: LiveReplica) -> Text:
        counted = [one["events"] for one in self.history.counted(replica["index"], 60.0)[1]]
        admitted, finished, preempted, evicted = (
            sum(getattr(one, name) for one in counted) for name in ("admitted", "finished", "preempted", "evicted")
        )
        style = "yellow" if preempted else ""
        facts: list[_Fact] = [f"{admitted:,} admitted", f"{finished:,} finished", (f"{preempted:,} preempted", style)]
        return self._line("last minute", *facts, f"{evicted:,} blocks evicted", between=", ")

    def _lengths(self, replica: LiveReplica) -> Text:
        found = self.history.lengths(replica["index"])
        if not found:
            return self._line("lengths", "none has finished yet")
        tenths = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
        median = Text.assemble("actual / predicted: median ", (f"{tenths[4]:.2f}", "bold"))
        middle = f"10-90 % {tenths[0]:.2f} to {tenths[8]:.2f}"
        return self._line("lengths", median, middle, f"of {len(found):,}", between=", ")

    def _step(self, replica: LiveReplica) -> list[Text]:
        """What a step takes, and its parts in milliseconds, the longest first."""
        step_seconds = replica["step_seconds"]
        facts: list[_Fact] = [("–" if step_seconds is None else f"{step_seconds * 1000:.1f} ms", "bold")]
        seconds, counted = self.history.counted(replica["index"], 10.0)
        parts = {group: _sums([one["parts"][group] for one in counted]) for group in ("device", "phases", "manager")}
        if not any(parts.values()):
            return [self._line("step", *facts)]
        device, num_steps = parts["device"], sum(one["steps"] for one in counted)
        if device and seconds > 0:
            facts.append(f"device {_percent(device.get('busy', 0.0), seconds)} busy")
            facts.append(f"{_percent(device.get('idle', 0.0), seconds)} idle between steps")
        lines = [self._line("step", *facts, f"{replica['queue_depth']} in flight")]
        for group, name in (("phases", "model"), ("manager", "manager")):
            found = sorted(parts[group].items(), key=lambda part: -part[1])
            if found and num_steps:
                ms = [(part, part_s / num_steps * 1000) for part, part_s in found]
                line = self._line("", f"{name} {sum(each for _, each in ms):.2f} ms: ")
                lines.append(self._fitting(line, [f"{part} {each:.2f}" for part, each in ms if each > 0], ", "))
        return lines

    def _stages(self, replica: LiveReplica) -> list[Text]:
        """One line for all pipeline stages, the first one first; none without."""
        seconds, counted = self.history.counted(replica["index"], 10.0)
        stages = list(zip(*(one["stages"] for one in counted if one["stages"]), strict=False))
        if not stages:
            return []

        def shares(name: str) -> str:
            sums = (sum(getattr(one, name) for one in stage) for stage in stages)
            return f"{name} {', '.join(f'{min(1.0, share / seconds) * 100:.0f}' for share in sums)} %"

        flying = ", ".join(str(stage[-1].microbatches) for stage in stages)
        return [self._line("stages", shares("busy"), shares("waiting"), f"microbatches {flying}")]

    def _oldest(self, replica: LiveReplica, max_lines: int) -> list[Text]:
        """The oldest requests: as many that wait as run, if there are more than lines."""
        running = [one for one in replica["oldest"] if one.state != "waiting"]
        waiting = [one for one in replica["oldest"] if one.state == "waiting"]
        num_waiting = min(len(waiting), max(max_lines // 2, max_lines - len(running)))
        lines: list[Text] = []
        for one in [*running[: max_lines - num_waiting], *waiting[:num_waiting]]:
            samples = f", {one.running} of {one.samples} samples" if one.samples > 1 else ""
            facts = [
                f"{one.state} {_seconds(one.age_seconds)}",
                f"{one.prompt_tokens:,} + {one.generated_tokens:,} tokens{samples}",
            ]
            facts += [f"waited {_seconds(one.wait_seconds)}"] if one.state != "waiting" else []
            names = [(one.client or "unknown", 15), (one.id, 16 if self.width < 100 else 42)]
            lines.append(self._line("" if lines else "oldest", *facts, between=", ", after=names))
        return lines

    def _job(self, job: LiveJob) -> Text:
        done, failed, total = job["lines"]["done"], job["lines"]["failed"], job["lines"]["total"]
        ended, left, reason = job["ended"], time_left(job), job["reason"]
        line = self._line(job["kind"], after=[(job["name"] or job["id"], 18 if self.width < 100 else 30)])
        if total:
            cells = 0 if reason else max(0, min(40, self.width - line.cell_len - 60))
            full = round(min(done + failed, total) / total * cells)
            marks = "#." if self.look.ascii_only else "█░"
            line.append(marks[0] * full, "green").append(marks[1] * (cells - full), "dim")
            line.append(f" {_percent(done + failed, total)} of {total:,}")
        else:
            line.append(f" {done + failed:,} lines" + ("" if ended is not None else ", of an unknown number"))
        facts = [""]
        if job["state"] == "running":
            facts += [f"{_rate(job['tokens_per_second'])} tokens/s", *([f"{show_left(left)} left"] if left else [])]
        else:
            ago = "" if ended is None else f" {show_time(max(0.0, self.sample['time'] - ended))} ago"
            facts.append(f"{job['state']}{ago}")
        facts += [f"{failed:,} failed"] if failed else []
        price, device_s = job["cost"]["price"], job["cost"]["device_seconds"]
        if price is not None and not reason:  # which needs the room
            facts.append(f"cost {price:,.2f}" if price >= 0.995 else f"cost {price:.2g}")
        elif device_s is not None and not reason:
            facts.append(f"device {_seconds(device_s)}")
        line = self._fitting(line, facts, ", ")
        room = self.width - line.cell_len - 2
        if reason and room > 10:
            cut = Text(reason)
            cut.truncate(room, overflow="ellipsis")
            line.append(", ").append_text(cut)
        return line


def _limited(lines: list[Text], count: int) -> list[Text]:
    if len(lines) <= count:
        return lines
    return [*lines[: count - 1], Text(f"{'':<{_LABEL}}and {len(lines) - count + 1} more")]


def _sums(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one.get(name, 0.0) for one in parts) for one in parts for name in one}


def _rate(per_s: float | None) -> str:
    return "–" if per_s is None else f"{per_s:,.1f}" if per_s < 1000 else f"{per_s:,.0f}"


def _percent(part: float, whole: float) -> str:
    """At most 100 %: parts that were measured apart from the whole may exceed it by a little."""
    return "–" if whole <= 0 else f"{min(1.0, part / whole) * 100:.0f} %"


def _seconds(seconds: float) -> str:
    """A time as `show_time` writes it, but with a decimal below 10 s."""
    return f"{seconds:.1f} s" if seconds < 9.95 else show_time(seconds)
