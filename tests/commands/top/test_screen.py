"""What is on the screen, and what stays where there is little room."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from tests.commands.top.helpers.scripted_samples import START_S, job, line, replica, sample
from tokasaurus.commands.top.run import LIVE_KEYS
from tokasaurus.commands.top.samples import History, read_sample
from tokasaurus.commands.top.screen import HELP, Screen, compact_line, next_sentence
from tokasaurus.messages.live import LiveNext


def shown(history: History, width: int, height: int, **choices) -> str:
    """As a terminal of this size shows it."""
    console = Console(width=width, height=height, color_system=None)
    lines = Screen(keys=choices.pop("keys", "q quit"), history=history, **choices).lines(width, height)
    rendered = console.render_lines(Group(*lines), console.options.update(no_wrap=None), pad=False)
    assert len(rendered) == height
    return "\n".join("".join(segment.text for segment in row).rstrip() for row in rendered)


@pytest.fixture(scope="module")
def history() -> History:
    found = History()
    for second in range(120):
        replicas = [
            replica(second),
            replica(second, 1, state="starting", running=7, forecast=None, next=None, waiting=0),
        ]
        jobs = [job(second, id=f"batch_{number}", name=f"job {number}") for number in range(8)]
        found.add(read_sample(line(sample(second, replicas=replicas, jobs=jobs))))
    return found


def waiting(fits_in_steps: int | None, blocks: int, blocked_by: Any) -> LiveNext:
    return LiveNext(
        fits_in_steps=fits_in_steps, blocks=blocks, prompt_tokens=9, wait_seconds=0.1, blocked_by=blocked_by
    )


@pytest.mark.parametrize(
    ("first", "step_seconds", "expected"),
    [
        (waiting(61, 310, "blocks"), None, "next in the queue fits in 61 steps (+310 blocks)"),
        (waiting(61, 310, "blocks"), 0.1, "next in the queue fits in 61 steps (+310 blocks), 6.1 s"),
        (waiting(None, 310, "blocks"), 0.1, "next in the queue fits after all that runs (+310 blocks)"),
        (
            waiting(1000, 3, "slots"),
            0.1,
            "next in the queue gets a slot in 1,000 steps (+3 blocks), 1 min 40 s",
        ),
        (waiting(None, 3, None), 0.1, "next in the queue is admitted with the next steps (+3 blocks)"),
        (waiting(None, 3, "paused"), 0.1, "next in the queue waits until the server resumes"),
    ],
)
def test_the_sentence_about_the_next_in_the_queue(first: LiveNext, step_seconds: float | None, expected: str) -> None:
    assert next_sentence(first, step_seconds) == expected


def test_pipeline_stages_have_a_line() -> None:
    stages = [{"busy": 0.625, "waiting": 0.25, "microbatches": 2}, {"busy": 0.5, "waiting": 0.0, "microbatches": 1}]
    history = History()
    for second in range(20):
        history.add(read_sample(line(sample(second, replicas=[replica(second, stages=stages)]))))
    assert "stages      busy 62, 50 %; waiting 25, 0 %; microbatches 2, 1" in shown(history, 100, 30)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=64))
def test_lengths_have_numpys_quantiles(pairs: list[tuple[int, int]]) -> None:
    history = History()
    history.add(read_sample(line(sample(0, replicas=[replica(0, lengths=pairs)]))))
    low, median, high = np.quantile([actual / predicted for predicted, actual in pairs], [0.1, 0.5, 0.9])
    row = next(row for row in shown(history, 120, 50).splitlines() if row.startswith("lengths"))
    found = re.fullmatch(r"lengths +actual / predicted: median ([\d.]+), 10-90 % ([\d.]+) to ([\d.]+), of (\d+)", row)
    assert found is not None, row
    assert [float(value) for value in found.groups()[:3]] == pytest.approx([median, low, high], abs=0.0051)
    assert int(found[4]) == len(pairs)


def test_what_a_step_takes_is_summed_over_the_last_ten_seconds() -> None:
    history = History()
    for second in range(100):
        one = replica(
            second, steps=80 if second > 89 else 1, parts={"device": {"busy": 0.9, "idle": 0.02 * (second > 89)}}
        )
        one["parts"]["manager"] = {"results": 0.04, "admission": 0.08}
        history.add(read_sample(line(sample(second, replicas=[one]))))
    text = shown(history, 120, 50)
    assert "device 90 % busy; 2 % idle between steps; 2 in flight" in text
    assert "manager 1.50 ms: admission 1.00, results 0.50" in text


def test_a_job_whose_number_of_lines_is_not_known_says_so() -> None:
    history = History()
    unknown = job(0, lines={"total": None, "done": 40, "failed": 2, "running": 64}, eta_seconds=None)
    history.add(read_sample(line(sample(0, jobs=[unknown]))))
    assert "42 lines, of an unknown number, 900.0 tokens/s" in shown(history, 100, 30)


def test_a_job_that_has_ended_says_how_and_when_for_a_quarter_of_an_hour() -> None:
    history = History()
    ended = [
        job(0, id="a", name="bad", state="failed", ended=START_S - 120, reason="line 3: is not JSON"),
        job(0, id="b", name="late", state="finished", ended=START_S - 899),
        job(0, id="c", name="old", state="finished", ended=START_S - 901),
    ]
    history.add(read_sample(line(sample(0, jobs=ended))))
    text = shown(history, 140, 40)
    assert "failed 2 min 0 s ago, 2 failed, line 3: is not JSON" in text
    assert "failed 2 min 0 s ago" in shown(history, 80, 24)
    assert "finished 14 min 59 s ago" in text
    invalid = job(0, name="bad.jsonl", lines={"total": None}, state="failed", ended=START_S - 620)
    history.add(read_sample(line(sample(1, jobs=[invalid | {"reason": "line 3: is not JSON"}]))))
    assert "0 lines, failed 10 min 21 s ago, line 3: is not JSON" in shown(history, 100, 24)
    assert "0 lines, failed 10 min 21 s ago, line 3: is n" in shown(history, 80, 24), "at least how and when"
    assert "  old " not in text, "longer ago"


@pytest.mark.parametrize(("used", "top"), [(3_000, "6,000"), (200, "300")])
def test_ten_minutes_after_its_last_request_a_server_still_shows_it(used: int, top: str) -> None:
    """To who has just come: the server remembers. A pool of which little was used is enlarged."""
    past = []
    for second in range(0, 900, 5):
        blocks = {"total": 6_000, "used": used if second < 300 else 0, "cached": 0, "free": 0}
        one = {"index": 0, "restarts": 0, "tokens": {"generated": 40 * min(second, 300)}, "blocks": blocks}
        past.append({"time": START_S + second, "replicas": [one]})
    free = {"total": 6_000, "own": 0, "shared": 0, "cached": 0, "free": 6_000}
    now = replica(899, forecast=None, running=0, tokens={"generated": 12_000}, blocks=free)
    failed = job(0, name="in.jsonl", state="failed", ended=START_S + 299, reason="line 3: is not JSON")
    history = History()
    history.add(read_sample(line(sample(899, replicas=[now], jobs=[failed], past=past))))
    text = shown(history, 100, 30)
    row = next(row for row in text.splitlines() if row.startswith("15 minutes"))
    assert re.fullmatch(r"15 minutes  max   40\.0 tokens/s  █{22}[▁-█]▁{43}", row), row
    rows = [row[13:] for row in text.splitlines() if row[12:13] == "│"]
    assert [row[:29] for row in rows[-2:]] == ["█" * 29] * 2
    assert re.search(rf"\n +{top} │", text)
    assert [row[30:].strip("▁") for row in rows] == [""] * len(rows)
    assert re.search(r"\n {13}14 min 59 s ago +now\n", text)
    assert "failed 10 min 0 s ago, 2 failed" in text


def test_keys_have_a_line_each() -> None:
    tokens = {"prompt": 1_200, "generated": 34}
    keys = [{"name": "alice", "running": 3, "waiting": 1_000, "tokens": tokens}, {"name": None, "running": 1}]
    history = History()
    history.add(read_sample(line(sample(0, keys=keys))))
    text = shown(history, 120, 50)
    assert re.search(r"\nkeys        alice +3 running, 1,000 waiting; 1,200 \+ 34 tokens so far\n", text), text
    assert re.search(r"\n            others +1 running, 0 waiting; 0 \+ 0 tokens", text)
    history = History()
    history.add(read_sample(line(sample(0, keys=[{"name": None}]))))
    assert "\nkeys" not in shown(history, 120, 50)


def test_figures_without_a_connection_are_paler(history: History) -> None:
    def is_pale(is_old: bool) -> list[bool]:
        lines = Screen("", history, is_old=is_old).lines(100, 30)
        return [
            any(span.style == "dim" and span.end - span.start == len(text) for span in text.spans) for text in lines
        ]

    assert is_pale(True)[1:-1] == [True] * 28
    assert not is_pale(True)[0]
    assert not any(is_pale(False))


def test_no_share_is_above_100_percent() -> None:
    history = History()
    for second in range(20):
        forecast = {"steps": [0, 10], "blocks": [5, 1_150], "limit": 1_000}
        history.add(read_sample(line(sample(second, replicas=[replica(second, forecast=forecast)]))))
    text = shown(history, 120, 40)
    assert "peak above the limit" in text
    assert not [found for found in re.findall(r"(\d+) %", text) if int(found) > 100]


def test_a_high_terminal_names_the_oldest_requests(history: History) -> None:
    text = shown(history, 120, 50)
    rows = [row[12:].split() for row in text.splitlines() if "cmpl-" in row]
    assert [row[2] for row in rows] == ["running"] * 6 + ["waiting"] * 3
    assert " ".join(rows[1]) == f"alice cmpl-{1:032d}-0 running 39 s, 900 + 100 tokens, waited 0.3 s"
    assert "cmpl-" not in shown(history, 120, 30)


def test_no_peak_of_the_forecast_is_lost() -> None:
    forecast = {"step": 2, "steps": [0, 4000, 4001, 4002, 9000], "blocks": [100, 100, 6000, 100, 0], "limit": 6000}
    history = History()
    for second in range(3):
        history.add(read_sample(line(sample(second, replicas=[replica(second, forecast=forecast)]))))
    rows = [row[13:] for row in shown(history, 80, 30).splitlines() if row[12:13] == "│"]
    assert len(rows) > 5
    assert {(row.count("█"), row.index("█")) for row in rows[: len(rows) // 2 - 1]} == {(1, rows[0].index("█"))}


def test_a_usual_terminal_has_all_of_it(history: History) -> None:
    text = shown(history, 80, 24)
    for words in (
        "SmolLM2-135M-Instruct",
        "16,800 tokens/s",
        "210 running, 3 prefilling; 33 waiting; all done in 40 s",
        "70 % of 6,000 blocks in use",
        "█ 3,580 own   ▓ 600 shared   ▒ 1,200 cached   ░ 620 free",
        "all that runs ends in 9,000 steps (1 min 52 s); peak 80 %",
        "dots: 60 s ago",
        "+1 min 52 s",
        "next in the queue fits in 61 steps (+310 blocks), 0.8 s",
        "240 admitted, 180 finished, 0 preempted, 720 blocks evicted",
        "median 0.92, 10-90 % 0.75 to 1.09",
        "> replica 0 up",
        "  replica 1 starting",
        "and 5 more",
    ):
        assert words in text, f"{words}\n{text}"


def test_another_replica_has_figures_of_its_own(history: History) -> None:
    text = shown(history, 100, 40, replica=1)
    assert "> replica 1 starting" in text
    assert "7 running" in text
    assert "nothing runs" in text
    assert "queue       empty" in text


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10, 15])
def test_a_low_terminal_keeps_the_most_important_lines(history: History, height: int) -> None:
    text = shown(history, 60, height)
    assert "live" in text
    assert ("tokens/s" in text) == (height > 2)
    assert ("210 running" in text) == (height >= 6)


def test_help_and_a_screen_without_samples(history: History) -> None:
    shown_help = shown(history, 80, 24, shows_help=True)
    assert all(row in shown_help for row in HELP.splitlines()), "80 columns have room for all of it"
    assert "no sample yet" in shown(History(), 80, 24)


def test_the_line_for_pipes(history: History) -> None:
    text = compact_line(history)
    assert text.endswith("  70 % of 12,000 blocks  40 s left  replica 1 starting")
    assert "217 running, 6 prefilling, 33 waiting" in text
    assert "33,600 generated, 1,800 prompt tokens/s" in text


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A copy with one of its inner values replaced, or left out if `new` is missing."""
    if not isinstance(value, dict | list) or not value:
        return new
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    place = path[0] % len(items)
    inner = changed(items[place][1], path[1:], new) if len(path) > 1 else new
    kept = [(key, inner if number == place else own) for number, (key, own) in enumerate(items)]
    kept = [(key, own) for key, own in kept if own is not ...]
    return dict(kept) if isinstance(value, dict) else [own for _, own in kept]


WRONG = st.sampled_from(
    [..., None, True, "x\x1b[2J", -1, 0, 2.5, 10**30, [], {}, [[]], [None], {"a": {"b": 1}}, {"steps": [1]}]
)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), WRONG, st.integers(1, 130), st.integers(1, 45))
def test_a_wrong_or_absent_value_never_hinders_the_rest(path: list[int], new: Any, width: int, height: int) -> None:
    """Nor does it reach the terminal with a character that moves the cursor."""
    history = History()
    for second in range(8):
        value = changed(sample(second, replicas=[replica(second), replica(second, 1)]), path, new)
        value = {**value, "format": 1, "time": sample(second)["time"], "unknown": [1]}
        history.add(read_sample(json.dumps(value).encode()))
    for row in [*shown(history, width, height).splitlines(), compact_line(history)]:
        assert row.isprintable(), row


def test_the_docs_show_what_is_drawn() -> None:
    """Of a pool whose use grows for a minute, and then begins anew."""
    history = History()
    for second in range(150):
        one = replica(second)
        one["tokens"]["generated"] += sum(500 * (number * number % 23) for number in range(second))
        one["tokens"]["prompt"] += sum(90 * (number * number % 17) for number in range(second))
        history.add(read_sample(line(sample(second, replicas=[one]))))
    text = shown(history, 80, 24, keys=LIVE_KEYS)
    page = Path(__file__).parents[3] / "docs" / "live.md"
    assert f"```\n{text}\n```" in page.read_text(), text
