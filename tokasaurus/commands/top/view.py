"""The screen as lines of a given width, and the one line of a sample for pipes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from rich.text import Text

from tokasaurus.commands.top.charts import Area, area_chart, cells_of_shares, sparkline
from tokasaurus.commands.top.history import History, curve_of
from tokasaurus.commands.top.samples import JobSample, KeySample, NextInQueue, OldRequest, ReplicaSample, Sample
from tokasaurus.monitoring.progress import show_left, show_time

_LABEL = 12
"""Columns of the words at the left."""
_SHOWN_SECONDS = 900.0
"""How long a job is shown after its end."""
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
HELP = (
    "q, Ctrl-C    quit",
    "p            pause; again, go on",
    "r            next replica",
    "left, right  in a replay: 10 s back, 10 s on",
    "space        in a replay: pause; again, go on",
    "?            this list; again, the figures",
    "",
    "Rates are means of the last 5 s, events sums of the last minute, parts of a step",
    "means of the last 10 s. 15 minutes: generated tokens, and the highest bar; the",
    "server remembers them, also of the time before this command. The forecast counts",
    "the blocks in use until the last running sequence has ended, by the lengths that",
    "are predicted now; the dotted line is what it said a minute ago. Lengths compare",
    "the newest 1,024 sequences that have ended with what was predicted when they",
    "were admitted.",
)


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


@dataclass(slots=True)
class _Section:
    rank: int
    """Sections of higher ranks are left out first, where the screen is too low."""
    lines: list[Text] = field(default_factory=list)


def screen_lines(history: History, frame: Frame, width: int, height: int, look: Look) -> list[Text]:
    """Lines of the screen: at most `height` of at most `width` columns."""
    sample = history.latest
    lines = [_header(sample, frame, width)]
    body_height = height - 2
    if frame.shows_help:
        lines += [Text(line) for line in HELP][: max(0, body_height)]
    elif sample is None:
        lines.append(Text("no sample yet", style="dim"))
    else:
        lines += _body(history, sample, frame, width, body_height, look)
    if frame.is_old:
        for line in lines[1:]:
            line.stylize("dim")
    lines = lines[: max(1, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text(frame.keys, style="dim"))
    for line in lines[:height]:
        line.truncate(width)
    return lines[:height]


def compact_line(history: History) -> str:
    """The newest sample in one line, for pipes."""
    sample = history.latest
    assert sample is not None, "a sample has come"
    replicas = sample.replicas
    total, used = sum(replica.blocks.total for replica in replicas), sum(replica.blocks.used for replica in replicas)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(sample.time)),
        f"{_rate(history.rate('generated'))} generated, {_rate(history.rate('prompt'))} prompt tokens/s",
        f"{_sum(replicas, 'running'):,} running, {_sum(replicas, 'prefilling'):,} prefilling, "
        f"{_sum(replicas, 'waiting'):,} waiting",
        f"{_percent(used, total)} of {total:,} blocks",
    ]
    ends = [replica.time_left for replica in replicas if replica.time_left is not None]
    if ends:
        parts.append(f"{show_left(max(ends, key=attrgetter('middle_s')))} left")
    parts += [f"replica {replica.index} {replica.state}" for replica in replicas if replica.state not in ("up", "")]
    return "  ".join(parts)


def _header(sample: Sample | None, frame: Frame, width: int) -> Text:
    line = Text("toka top", style="bold", no_wrap=True)
    if sample is not None:
        server = sample.server
        facts = [server.model, " ".join(word for word in (server.device, server.dtype) if word)]
        sizes = [("replicas", server.dp_size), ("stages", server.pp_size), ("ranks", server.tp_size)]
        facts += [f"{size} {name}" for name, size in sizes if size > 1]
        if server.started is not None:
            facts.append(f"up {show_time(max(0.0, sample.time - server.started))}")
        line.append("".join(f"  {fact}" for fact in facts if fact), style="not bold")
        if server.is_draining:
            line.append("  draining", style="not bold yellow")
    status = Text(frame.status, style=frame.status_style)
    status.truncate(max(0, width - 10))
    line.truncate(max(0, width - status.cell_len - 2), overflow="ellipsis", pad=True)
    return Text.assemble(line, "  ", status, no_wrap=True)


def _body(history: History, sample: Sample, frame: Frame, width: int, height: int, look: Look) -> list[Text]:
    replica = history.replica(frame.replica)
    sections = [
        _Section(0, _throughput(history, width, look)),
        _Section(4, [_quarter(history, width, look)]),
        _Section(2, [_requests(sample, width)]),
    ]
    if len(sample.replicas) > 1:
        lines = [
            _replica_line(history, history.replica(one.index) or one, width, one.index == frame.replica)
            for one in sample.replicas
        ]
        sections.append(_Section(3, _limited(lines, max(1, height // 6))))
    chart = _Section(6)
    if replica is None:
        sections.append(_Section(1, [_labelled("replica", f"{frame.replica} is not known")]))
    else:
        sections += [
            _Section(0, [_batch(replica, width)]),
            _Section(1, [_pool_bar(replica, width, look)]),
            _Section(5, [_pool_counts(replica, look)]),
            _Section(1, [_forecast(replica, width)]),
            chart,
            _Section(1, [_queue(replica, width)]),
            _Section(4, [_events(history, replica, width)]),
            _Section(4, [_lengths(history, replica, width)]),
            _Section(7, _step(history, replica, width)),
            _Section(6, _stages(history, replica, width)),
            _Section(8, _oldest(replica, width, max(1, height // 4))),
        ]
    if keys := [key for key in sample.keys if key.name or key.running or key.waiting or key.generated_tokens]:
        lines = [_key("" if number else "keys", key, width) for number, key in enumerate(keys)]
        sections.append(_Section(7, _limited(lines, max(1, height // 6))))
    jobs = [job for job in sample.jobs if job.ended is None or sample.time - job.ended < _SHOWN_SECONDS]
    if jobs:
        order = sorted(jobs, key=lambda job: job.state not in ("running", "validating", "waiting"))
        lines = [_job(job, sample.time, width, look) for job in order]
        sections.append(_Section(2, _limited(lines, max(1, height // 5))))
    if replica is not None:
        room = height - sum(len(section.lines) for section in sections)
        # The sections that are of less use than the chart make room for it.
        for rank in (8, 7):
            if room < _MIN_CHART + 1:
                room += sum(len(section.lines) for section in sections if section.rank == rank)
                sections = [section for section in sections if section.rank != rank]
        if room >= 3:
            chart.lines = _chart(history, replica, width, min(room - 1, _MAX_CHART), look)
    while sum(len(section.lines) for section in sections) > height and len(sections) > 1:
        sections.remove(max(sections, key=lambda section: section.rank))
    return [line for section in sections for line in section.lines]


def _labelled(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), *parts, no_wrap=True)


def _fitting(line: Text, width: int, facts: Sequence[str | tuple[str, str] | Text], between: str = "; ") -> Text:
    """The line with the facts after it, the most important first, as long as they fit."""
    for number, fact in enumerate(facts):
        text = fact if isinstance(fact, Text) else Text.assemble(fact)
        if number and line.cell_len + len(between) + text.cell_len > width:
            break
        line.append(between if number else "").append_text(text)
    return line


def _limited(lines: list[Text], count: int) -> list[Text]:
    if len(lines) <= count:
        return lines
    return [*lines[: count - 1], _labelled("", f"and {len(lines) - count + 1} more")]


def _throughput(history: History, width: int, look: Look) -> list[Text]:
    lines = []
    room = max(0, width - _LABEL - 22)
    for name, style in (("generated", "green"), ("prompt", "yellow")):
        line = _labelled(name, (f"{_rate(history.rate(name)):>10}", "bold"), " tokens/s  ")
        lines.append(line.append(sparkline(history.rates(name, room), room, look.ascii_only), style))
    return lines


def _quarter(history: History, width: int, look: Look) -> Text:
    """Generated tokens of the last quarter of an hour."""
    room = max(0, width - _LABEL - 22)
    means = history.means("generated", room)
    known = [mean for mean in means if mean is not None]
    line = _labelled("15 minutes", f"max {_rate(max(known, default=None)):>6}", " tokens/s  ")
    return line.append(sparkline(means, room, look.ascii_only), "green")


def _requests(sample: Sample, width: int) -> Text:
    facts = [f"{sample.requests.get(name, 0):,.0f} {name}" for name in ("open", "answered", "aborted", "failed")]
    prompt = {
        name: sum(replica.tokens.get(name, 0.0) for replica in sample.replicas) for name in ("cached", "computed")
    }
    if sum(prompt.values()):
        facts.append(f"{_percent(prompt['cached'], sum(prompt.values()))} of prompt tokens cached")
    return _fitting(_labelled("requests"), width, facts, ", ")


def _replica_line(history: History, replica: ReplicaSample, width: int, is_shown: bool) -> Text:
    line = _labelled(f"{'>' if is_shown else ' '} replica {replica.index}")
    line.append(f"{replica.state:<9}", _STATES.get(replica.state, ""))
    line.append(f"{_rate(history.rate('generated', index=replica.index)):>8} tokens/s")
    facts = [
        "",
        f"{replica.running:,} running",
        f"{replica.waiting:,} waiting",
        f"pool {_percent(replica.blocks.used, replica.blocks.total)}",
    ]
    if replica.restarts:
        facts.append(f"{replica.restarts} restarts")
    return _fitting(line, width, facts, "  ")


def _batch(replica: ReplicaSample, width: int) -> Text:
    facts: list[str | Text] = [
        Text.assemble((f"{replica.running:,}", "bold"), f" running, {replica.prefilling:,} prefilling"),
        f"{replica.waiting:,} waiting",
    ]
    if replica.time_left is not None:
        facts.append(f"all done in {show_left(replica.time_left)}")
    if replica.slots:
        facts.append(f"{replica.slots:,} slots")
    if replica.background:
        facts.append(f"{replica.background:,} of batches")
    return _fitting(_labelled("batch"), width, facts)


def _pool_bar(replica: ReplicaSample, width: int, look: Look) -> Text:
    blocks = replica.blocks
    line = _labelled("pool")
    end = f" {_percent(replica.blocks.used, blocks.total)} of {blocks.total:,} blocks in use"
    shares = [getattr(blocks, name) for name, *_ in _POOL]
    counts = cells_of_shares(shares, max(0, width - _LABEL - len(end)))
    for (_, cell, ascii_cell, style), count in zip(_POOL, counts, strict=True):
        line.append((ascii_cell if look.ascii_only else cell) * count, style)
    return line.append(end)


def _pool_counts(replica: ReplicaSample, look: Look) -> Text:
    line = _labelled("")
    for number, (name, cell, ascii_cell, style) in enumerate(_POOL):
        line.append("   " if number else "").append(ascii_cell if look.ascii_only else cell, style)
        line.append(f" {getattr(replica.blocks, name):,} {name}")
    return line


def _forecast(replica: ReplicaSample, width: int) -> Text:
    forecast = replica.forecast
    if forecast is None:
        return _labelled("forecast", "nothing runs")
    rounds = forecast.steps[-1]
    end = Text.assemble("all that runs ends in ", (f"{rounds:,.0f} steps", "bold"))
    if replica.step_seconds is not None:
        end.append(f" ({_seconds(rounds * replica.step_seconds)})")
    facts: list[str | Text] = [end]
    if forecast.limit:
        is_above = forecast.peak > forecast.limit  # as when requests become longer than expected
        facts.append("peak above the limit" if is_above else f"peak {_percent(forecast.peak, forecast.limit)}")
    return _fitting(_labelled("forecast"), width, [*facts, f"{forecast.peak:,.0f} blocks"])


def _chart(history: History, replica: ReplicaSample, width: int, height: int, look: Look) -> list[Text]:
    """`height` rows, and the axis below them."""
    forecast = replica.forecast
    if forecast is None:
        return _past_chart(history, replica, width, height, look)
    ahead = curve_of(forecast)
    earlier = history.earlier_forecast(replica.index)
    past = history.past_blocks(replica.index)
    end = ahead.xs[-1] if ahead.xs else 0.0
    if earlier is not None and earlier.curve.xs:
        end = max(end, min(earlier.curve.xs[-1], 2 * end))
    # A third of the chart at most is the past.
    start = past.xs[0] if past.xs else 0.0
    if end > 0:
        start = max(start, -end / 2)
    if end <= start:
        return []
    top = max([float(replica.blocks.total), forecast.limit, *ahead.ys])
    columns = max(1, width - _LABEL - 1)
    rows = area_chart(
        [Area(past, "blue"), Area(ahead, "cyan")],
        None if earlier is None else earlier.curve,
        "bright_yellow",
        start,
        end,
        top,
        columns,
        height,
        look.has_colours,
        look.ascii_only,
    )
    axis = _axis(start, end, columns, replica, None if earlier is None else earlier.seconds_ago)
    return [*_walled(rows, top, height, look), axis]


def _past_chart(history: History, replica: ReplicaSample, width: int, height: int, look: Look) -> list[Text]:
    """While nothing runs there is no forecast, and no step passes: the last 15 minutes, by time."""
    areas = [Area(curve, "blue") for curve in history.used_blocks(replica.index)]
    start = min((area.curve.xs[0] for area in areas), default=0.0)
    top, columns = float(replica.blocks.total), max(1, width - _LABEL - 1)
    if start >= 0 or top <= 0:
        return []
    highest = max(max(area.curve.ys) for area in areas)
    if 0 < highest < _LITTLE * top:
        top = 1.5 * highest
    rows = area_chart(areas, None, "", start, 0.0, top, columns, height, look.has_colours, look.ascii_only)
    first = f"{show_time(-start)} ago"
    axis = first + "now".rjust(columns - len(first)) if columns >= len(first) + 5 else ""
    return [*_walled(rows, top, height, look), Text.assemble(" " * (_LABEL + 1), (axis, "dim"), no_wrap=True)]


def _walled(rows: Sequence[Text], top: float, height: int, look: Look) -> list[Text]:
    """The rows with the axis at their left."""
    labels = {0: f"{top:,.0f}", height // 2: f"{top * (1 - (height // 2) / height):,.0f}"}
    wall = "|" if look.ascii_only else "│"
    return [
        Text.assemble((f"{labels.get(number, ''):>{_LABEL - 1}} ", "dim"), (wall, "dim"), row, no_wrap=True)
        for number, row in enumerate(rows)
    ]


def _axis(start: float, end: float, columns: int, replica: ReplicaSample, seconds_ago: float | None) -> Text:
    """Below the chart: where now is, and how far the chart goes."""
    cells = [" "] * columns
    now = min(columns - 1, round(-start / (end - start) * columns))
    last = "" if end <= 0 else f"+{end:,.0f} steps"
    if last and replica.step_seconds is not None:
        last += f", {_seconds(end * replica.step_seconds)}"
    note = "" if seconds_ago is None else f"dots: {seconds_ago:.0f} s ago"
    for place, text in (
        (now, "now"),
        (columns - len(last), last),
        (now + 3 + (columns - now - 3 - len(last) - len(note)) // 2, note),
        (0, f"{start:,.0f}" if start < 0 else ""),
    ):
        place = max(0, min(place, columns - len(text)))
        if text and all(cell == " " for cell in cells[max(0, place - 1) : place + len(text) + 1]):
            cells[place : place + len(text)] = text
    return Text.assemble(" " * (_LABEL + 1), ("".join(cells), "dim"), no_wrap=True)


def _queue(replica: ReplicaSample, width: int) -> Text:
    facts: list[tuple[str, str] | str] = []
    if replica.next is None:
        facts.append("empty" if not replica.waiting else f"{replica.waiting:,} waiting")
    else:
        facts.append((next_sentence(replica.next, replica.step_seconds), "bold"))
    if replica.oldest_wait_seconds is not None:
        facts.append(f"oldest {_seconds(replica.oldest_wait_seconds)}")
    return _fitting(_labelled("queue"), width, facts)


def next_sentence(waiting: NextInQueue, step_seconds: float | None) -> str:
    """When the first waiting sequence is admitted."""
    needs = f" (+{waiting.blocks:,} blocks)"
    if waiting.blocked_by == "paused":
        return "next in the queue waits until the server resumes"
    if waiting.blocked_by == "":
        return f"next in the queue is admitted with the next steps{needs}"
    what = "gets a slot" if waiting.blocked_by == "slots" else "fits"
    if waiting.fits_in_steps is None:
        return f"next in the queue {what} after all that runs{needs}"
    time_left = "" if step_seconds is None else f", {_seconds(waiting.fits_in_steps * step_seconds)}"
    return f"next in the queue {what} in {waiting.fits_in_steps:,} steps{needs}{time_left}"


def _events(history: History, replica: ReplicaSample, width: int) -> Text:
    sums = history.events(replica.index)
    facts: list[str | tuple[str, str]] = [
        f"{sums.get('admitted', 0):,.0f} admitted",
        f"{sums.get('finished', 0):,.0f} finished",
        (f"{sums.get('preempted', 0):,.0f} preempted", "yellow" if sums.get("preempted") else ""),
        f"{sums.get('evicted', 0):,.0f} blocks evicted",
    ]
    return _fitting(_labelled("last minute"), width, facts, ", ")


def _lengths(history: History, replica: ReplicaSample, width: int) -> Text:
    quotients = history.lengths(replica.index)
    if quotients is None:
        return _labelled("lengths", "none has finished yet")
    facts: list[str | Text] = [
        Text.assemble("actual / predicted: median ", (f"{quotients.median:.2f}", "bold")),
        f"10-90 % {quotients.low:.2f} to {quotients.high:.2f}",
        f"of {quotients.count:,}",
    ]
    return _fitting(_labelled("lengths"), width, facts, ", ")


def _step(history: History, replica: ReplicaSample, width: int) -> list[Text]:
    """What a step takes, and its parts in milliseconds, the longest first."""
    parts = history.parts(replica.index)
    facts: list[str | tuple[str, str]] = []
    facts.append(("–" if replica.step_seconds is None else f"{replica.step_seconds * 1000:.1f} ms", "bold"))
    if parts is None:
        return [_fitting(_labelled("step"), width, facts)]
    device = parts.by_group.get("device", {})
    if device and parts.seconds > 0:
        facts.append(f"device {_percent(device.get('busy', 0.0), parts.seconds)} busy")
        facts.append(f"{_percent(device.get('idle', 0.0), parts.seconds)} idle between steps")
    facts.append(f"{replica.queue_depth} in flight")
    lines = [_fitting(_labelled("step"), width, facts)]
    for group, name in (("phases", "model"), ("manager", "manager")):
        found = sorted(parts.by_group.get(group, {}).items(), key=lambda part: -part[1])
        if found and parts.steps:
            whole = sum(seconds for _, seconds in found) / parts.steps
            listed = [f"{part} {seconds / parts.steps * 1000:.2f}" for part, seconds in found if seconds > 0]
            line = _labelled("", f"{name} {whole * 1000:.2f} ms: ")
            lines.append(_fitting(line, width, listed, ", "))
    return lines


def _stages(history: History, replica: ReplicaSample, width: int) -> list[Text]:
    """One line for all pipeline stages, the first one first; none without."""
    stages = history.stages(replica.index)
    if not stages:
        return []

    def listed(shares: Sequence[float]) -> str:
        return ", ".join(f"{min(1.0, share) * 100:.0f}" for share in shares) + " %"

    facts = [
        f"busy {listed([stage.busy for stage in stages])}",
        f"waiting {listed([stage.waiting for stage in stages])}",
        f"microbatches {', '.join(str(stage.microbatches) for stage in stages)}",
    ]
    return [_fitting(_labelled("stages"), width, facts)]


def _oldest(replica: ReplicaSample, width: int, max_lines: int) -> list[Text]:
    """The oldest requests: as many that wait as run, if there are more than lines."""
    running = [request for request in replica.oldest if request.state != "waiting"]
    waiting = [request for request in replica.oldest if request.state == "waiting"]
    num_waiting = min(len(waiting), max(max_lines // 2, max_lines - len(running)))
    shown = [*running[: max_lines - num_waiting], *waiting[:num_waiting]]
    return [_old_request("" if number else "oldest", request, width) for number, request in enumerate(shown)]


def _old_request(label: str, request: OldRequest, width: int) -> Text:
    client, name = Text(request.client or "unknown"), Text(request.id)
    client.truncate(15, overflow="ellipsis", pad=True)
    name.truncate(16 if width < 100 else 42, overflow="ellipsis", pad=True)
    line = _labelled(label).append_text(client).append(" ").append_text(name).append(" ")
    samples = f", {request.running} of {request.samples} samples" if request.samples > 1 else ""
    facts = [
        f"{request.state} {_seconds(request.age_seconds)}",
        f"{request.prompt_tokens:,} + {request.generated_tokens:,} tokens{samples}",
        f"waited {_seconds(request.wait_seconds)}",
    ]
    return _fitting(line, width, facts[:2] if request.state == "waiting" else facts, ", ")


def _key(label: str, key: KeySample, width: int) -> Text:
    name = Text(key.name or "others")
    name.truncate(15, overflow="ellipsis", pad=True)
    facts = [
        f"{key.running:,} running, {key.waiting:,} waiting",
        f"{key.prompt_tokens:,} + {key.generated_tokens:,} tokens so far",
    ]
    return _fitting(_labelled(label).append_text(name).append(" "), width, facts)


def _job(job: JobSample, now: float, width: int, look: Look) -> Text:
    """now: in Unix seconds."""
    name = Text(job.name or job.id)
    name.truncate(18 if width < 100 else 30, overflow="ellipsis", pad=True)
    line = _labelled(job.kind).append_text(name).append(" ")
    if job.lines_total:
        done = min(job.lines_done + job.lines_failed, job.lines_total)
        cells = 0 if job.reason else max(0, min(40, width - line.cell_len - 60))
        full = round(done / job.lines_total * cells)
        marks = "#." if look.ascii_only else "█░"
        line.append(marks[0] * full, "green").append(marks[1] * (cells - full), "dim")
        line.append(f" {_percent(done, job.lines_total)} of {job.lines_total:,}")
    else:
        line.append(f" {job.lines_done + job.lines_failed:,} lines")
        line.append("" if job.ended is not None else ", of an unknown number")
    facts = [""]
    if job.state == "running":
        facts.append(f"{_rate(job.tokens_per_second)} tokens/s")
        if job.time_left is not None:
            facts.append(f"{show_left(job.time_left)} left")
    else:
        ago = "" if job.ended is None else f" {show_time(max(0.0, now - job.ended))} ago"
        facts.append(f"{job.state}{ago}")
    if job.lines_failed:
        facts.append(f"{job.lines_failed:,} failed")
    if not job.reason:  # which needs the room
        facts += _cost(job)
    line = _fitting(line, width, facts, ", ")
    room = width - line.cell_len - 2
    if job.reason and room > 10:
        reason = Text(job.reason)
        reason.truncate(room, overflow="ellipsis")
        line.append(", ").append_text(reason)
    return line


def _cost(job: JobSample) -> list[str]:
    if job.price is not None:
        return [f"cost {job.price:,.2f}" if job.price >= 0.995 else f"cost {job.price:.2g}"]
    return [] if job.device_seconds is None else [f"device {_seconds(job.device_seconds)}"]


def _sum(replicas: Sequence[ReplicaSample], name: str) -> int:
    return sum(getattr(replica, name) for replica in replicas)


def _rate(per_s: float | None) -> str:
    return "–" if per_s is None else f"{per_s:,.1f}" if per_s < 1000 else f"{per_s:,.0f}"


def _percent(part: float, whole: float) -> str:
    """At most 100 %: parts that were measured apart from the whole may exceed it by a little."""
    return "–" if whole <= 0 else f"{min(1.0, part / whole) * 100:.0f} %"


def _seconds(seconds: float) -> str:
    """A time as `show_time` writes it, but with a decimal below 10 s."""
    return f"{seconds:.1f} s" if seconds < 9.95 else show_time(seconds)
