"""A report of runs as one HTML file: tables and plots by plotly, whose script is within it."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokasaurus.commands.bench.client import RequestResult
from tokasaurus.commands.bench.compare import COMPARED, Comparison, compare_measured, of_json, shown, shown_ratio
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.figures import TIMES, time_per_token_s
from tokasaurus.commands.bench.measure import Run
from tokasaurus.files import replace_text

_COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
_MAX_POINTS = 2000
"""Most points of a curve."""
_NUM_BINS = 120
_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem; color: #1f2937; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; } code { overflow-wrap: anywhere; }"""


def write_html(path: Path, runs: Sequence[Run]) -> None:
    """Raises OSError."""
    write_html_of(path, [dataclasses.asdict(run) for run in runs])


def write_html_of(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """runs: as in the JSON file of `toka bench`, without those with failures. Raises OSError."""
    from plotly.offline import get_plotlyjs

    comparison = compare_measured([of_json(run) for run in runs])
    title = f"{runs[0]['workload']}: {', '.join(comparison.names)}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _facts(runs),
        _table(comparison),
        *_plots(runs, comparison.names),
        "</body></html>\n",
    ]
    replace_text(path, "\n".join(parts))


def _facts(runs: Sequence[dict[str, Any]]) -> str:
    machine = runs[0]["machine"]
    facts = {
        "Measured": f"{runs[0]['started_at']} to {runs[-1]['started_at']}",
        "Machine of the client": f"{machine['cpu_model']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB",
    }
    for run in {run["name"]: run for run in runs}.values():
        server = run["server"]
        version = server["version"]
        version = version.get("version", "") if isinstance(version, dict) else ""
        words = [server["command"] or server["url"], *([f"version {version}"] if version else [])]
        facts[run["name"]] = ", ".join([*words, f"model {server['model']}"])
    changed = {name: value for name, value in runs[0]["config"].items() if value != getattr(BenchConfig, name, None)}
    facts["Flags"] = " ".join(f"{name}={value}" for name, value in changed.items()) or "defaults"
    rows = (f"<li>{html.escape(name)}: <code>{html.escape(str(text))}</code></li>" for name, text in facts.items())
    return f"<ul>{''.join(rows)}</ul>"


def _table(comparison: Comparison) -> str:
    first, *others = comparison.names
    heads = ["median (range)", first, *(cell for name in others for cell in (name, f"over {first}"))]
    lines = [f"<tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>"]
    for figure, rows in comparison.rows.items():
        cells = [COMPARED[figure]]
        for name in comparison.names:
            cells.append(shown(rows.get(name)))
            if name != first:
                cells.append(shown_ratio(rows.get(name)))
        lines.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _plots(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    import plotly.graph_objects as go

    color = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    results = [[_result(fields) for fields in run["requests"]] for run in runs]

    def figure(
        heading: str, x: str, y: str, curves: Sequence[tuple[str, list[float], list[float]]], shape: str = "linear"
    ) -> str:
        """curves: (server, x, y). shape: of the line between two points."""
        plot = go.Figure()
        shown = set[str]()
        for name, xs, ys in curves:
            plot.add_scatter(
                x=xs,
                y=ys,
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=name not in shown,
                line={"color": color[name], "width": 1.5, "shape": shape},
            )
            shown.add(name)
        plot.update_layout(
            template="plotly_white",
            height=380,
            xaxis_title=x,
            yaxis_title=y,
            margin={"t": 40, "b": 40, "l": 60, "r": 10},
            legend={"orientation": "h", "y": 1.12},
        )
        plot.update_xaxes(rangemode="tozero")
        plot.update_yaxes(rangemode="tozero")
        drawn = plot.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
        return f"<h2>{html.escape(heading)}</h2>{drawn}"

    in_flight = [(run["name"], *_in_flight(of_run)) for run, of_run in zip(runs, results, strict=True)]
    yield figure("Requests in flight", "seconds", "requests", in_flight, "hv")
    rates = [(run["name"], *_token_rate(of_run)) for run, of_run in zip(runs, results, strict=True)]
    yield figure("Output tokens per second", "seconds", "tokens/s", rates)
    values: dict[str, Callable[[RequestResult], Sequence[float | None]]] = {
        "ttft_s": lambda result: (result.first_token_s,),
        "tpot_s": lambda result: (time_per_token_s(result),),
        "itl_s": lambda result: result.gaps_s,
        "e2el_s": lambda result: (result.latency_s,),
    }
    for field, of_result in values.items():
        curves = []
        for run, of_run in zip(runs, results, strict=True):
            found = [value for result in of_run for value in of_result(result) if value is not None]
            if found:
                curves.append((run["name"], *_distribution(found)))
        if not curves:
            continue
        yield figure(f"{TIMES[field]}: share that took at most so long", "milliseconds", "percent", curves)


def _result(fields: dict[str, Any]) -> RequestResult:
    return RequestResult(**{**fields, "events_s": tuple(fields["events_s"]), "gaps_s": tuple(fields["gaps_s"])})


def _in_flight(results: Sequence[RequestResult]) -> tuple[list[float], list[float]]:
    changes = sorted([(one.sent_s, 1) for one in results] + [(one.finished_s, -1) for one in results])
    counts = list(accumulate(change for _, change in changes))
    return _thinned([time_s for time_s, _ in changes]), _thinned([float(count) for count in counts])


def _token_rate(results: Sequence[RequestResult]) -> tuple[list[float], list[float]]:
    """Tokens per second in intervals of equal length."""
    succeeded = [one for one in results if one.error is None]
    end_s = max((one.finished_s for one in succeeded), default=1.0)
    width_s = end_s / _NUM_BINS
    tokens = [0.0] * _NUM_BINS

    def bin_of(time_s: float) -> int:
        return min(_NUM_BINS - 1, int(time_s / width_s))

    for one in succeeded:
        if not one.events_s:  # spread evenly, as in figures.tokens_within
            first, last = bin_of(one.sent_s), bin_of(one.finished_s)
            for index in range(first, last + 1):
                tokens[index] += one.completion_tokens / (last - first + 1)
        else:
            for event_s in one.events_s:
                tokens[bin_of(one.sent_s + event_s)] += one.completion_tokens / len(one.events_s)
    return [(index + 0.5) * width_s for index in range(_NUM_BINS)], [count / width_s for count in tokens]


def _distribution(values_s: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(values_s)
    percents = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
    return _thinned([1000 * value for value in ordered]), _thinned(percents)


def _thinned(values: list[float]) -> list[float]:
    """Some of the values, at most about _MAX_POINTS, the last among them."""
    step = max(1, len(values) // _MAX_POINTS)
    return values[::step] + ([values[-1]] if values and (len(values) - 1) % step else [])
