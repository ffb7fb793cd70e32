"""The log line of a window, from totals whose rates are easy to see."""

import itertools
import socket
import time
from dataclasses import replace

import pytest

from tokasaurus.messages.status import EngineStats, TimeLeft
from tokasaurus.monitoring.step_stats import (
    MAX_LINE_CHARS,
    StatsdSender,
    StepStats,
    StepTotals,
    StepWindow,
    short_number,
    short_range,
    short_time,
)


def make_stats(total_generation_tokens: int) -> EngineStats:
    return EngineStats(3, 1200, 50, 200, 0, total_generation_tokens, 2)


def test_each_window_ends_with_a_line_of_the_rates_in_that_window():
    step_stats = StepStats(report_seconds=5.0)
    totals = StepTotals()
    assert step_stats.report(1000.0, totals, make_stats(0)) is None
    assert step_stats.seconds_to_report(1000.0) is None, "nothing ran: no report is due"
    lines = []
    for second in range(1, 11):  # a step of 0.5 s every second after a pause
        totals.num_steps += 1
        totals.num_rows += 40
        totals.num_prefill_tokens += 1000
        totals.busy_seconds += 0.5
        totals.num_finished_requests = second - 1
        stats = make_stats(30 * second)
        window = step_stats.report(2000.0 + second, totals, stats, lambda: (TimeLeft(230.0, 240.0), 61.2))
        lines.append(None if window is None else window.line())
        if second == 3:
            assert step_stats.seconds_to_report(2003.0) == 2.5, "the window began with the first step, at 2000.5"
    assert [line is not None for line in lines] == [False] * 5 + [True] + [False] * 4
    assert lines[5] == "33 out/s, 1.1k in/s, 3 run, 1.2k wait 61s, KV 25%, 5 done, ETA 4m"
    assert step_stats.seconds_to_report(2010.0) == 1.5
    last = step_stats.report(2016.0, totals, make_stats(300))
    assert last is not None
    assert last.line() == "13 out/s, 421 in/s, 3 run, 1.2k wait –, KV 25%, 4 done, ETA –"
    assert step_stats.report(2030.0, totals, make_stats(300)) is None


def test_cache_hits_sharing_and_preemptions_are_counted_per_window():
    """Per window: prompt tokens of the sequences that started, of these read from the cache, prompt tokens computed for
    sequences that started then or earlier, shared, preemptions, tokens computed again, busy share of the manager."""
    windows = [
        (400, 100, 100, 0, 0, 0, 0.25),
        (50, 50, 200, 2000, 1500, 12000, 1.0),
        (0, 0, 1000, 0, 0, 1, 0.004),
        (0, 0, 0, 0, 0, 1, 0.004),
        (1000, 0, 0, 1, 1, 0, 0.0),
    ]
    shown = [
        ("25%", "25%", (0, 0, 0)),
        ("100%", "100%", ("2,000", "1,500", "12,000")),
        ("–", "0%", (0, 0, 1)),
        ("–", "0%", (0, 0, 1)),
        ("0%", "0%", (1, 1, 0)),
    ]
    step_stats = StepStats(report_seconds=5.0)
    totals, stats = StepTotals(), make_stats(0)
    for number, (window, (hits, busy, counts)) in enumerate(zip(windows, shown, strict=True), start=1):
        num_asked, num_cached, num_computed, num_shared, num_preemptions, num_recomputed, busy_fraction = window
        totals.num_steps += 1
        totals.num_prefill_tokens += num_computed
        totals.busy_seconds += 5.0
        stats = replace(
            stats,
            total_asked_prompt_tokens=stats.total_asked_prompt_tokens + num_asked,
            total_prefix_cache_hit_tokens=stats.total_prefix_cache_hit_tokens + num_cached,
            total_shared_prompt_tokens=stats.total_shared_prompt_tokens + num_shared,
            total_preemptions=stats.total_preemptions + num_preemptions,
            total_recomputed_tokens=stats.total_recomputed_tokens + num_recomputed,
            manager_busy_fraction=busy_fraction,
        )
        found = step_stats.report(1000.0 + 5 * number, totals, stats)
        assert found is not None
        details = found.details()
        assert details.startswith(f"prefix cache hits {hits}, ")
        assert f" manager busy {busy}, " in details
        num_shared, num_preempted, num_again = counts
        assert details.endswith(
            f"newly shared {num_shared}, preemptions {num_preempted}, tokens computed again {num_again}"
        )


def test_a_line_is_short_whatever_its_figures() -> None:
    numbers = [0, 7, 999, 1000, 9949, 9951, 12_345, 999_499, 999_500, 4_567_890, 2_000_000_000]
    seconds = [None, 0.2, 59.0, 89.9, 91.0, 3599.0, 86_399.0, 1e7]
    for number, wait_s in itertools.product(numbers, seconds):
        stats = replace(make_stats(0), num_running=min(number, 9999), num_waiting=number, num_kv_blocks_used=200)
        left = None if wait_s is None else TimeLeft(wait_s / 2, wait_s)
        window = StepWindow(number, number, None, 1, 1, 1, 0, 0, 0, stats, number, left, wait_s)
        assert len(window.line()) <= MAX_LINE_CHARS
        assert window.fields()["oldest_wait_seconds"] == wait_s
    assert all(len(short_number(number)) <= 4 for number in range(0, 2_000_000, 37))


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        *((0.4, "0"), (862.25, "862"), (999.4, "999"), (999.6, "1.0k"), (1049, "1.0k"), (9949, "9.9k"), (9960, "10k")),
        *((12_345, "12k"), (999_600, "1.0M"), (2e9, "2.0G")),
    ],
)
def test_short_numbers(number: float, shown: str) -> None:
    assert short_number(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (0.3, "0s"), (89, "89s"), (90, "2m"), (5399, "90m"), (5400, "2h"), (172_800, "2d")],
)
def test_short_times(seconds: float | None, shown: str) -> None:
    assert short_time(seconds) == shown


@pytest.mark.parametrize(
    ("left", "shown"),
    [
        (None, "–"),
        ((230, 250), "4m"),
        ((120, 240), "2-4m"),
        ((30, 240), "30s-4m"),
        ((31, 62), "31-62s"),
        ((5401, 9000), "2h"),
    ],
)
def test_short_ranges(left: tuple[float, float] | None, shown: str) -> None:
    assert short_range(None if left is None else TimeLeft(*left)) == shown


WINDOW = StepWindow(862.25, 715.0, 0.125, 63.4, 73.04, 0.99, 18_432, 3, 0, replace(make_stats(0), worker_queue_depth=4))
FIGURES = """\
toka.output_tokens_per_second:862.25|g
toka.prompt_tokens_per_second:715.0|g
toka.sequences_per_step:63.4|g
toka.milliseconds_per_step:73.04|g
toka.worker_busy_fraction:0.99|g
toka.manager_busy_fraction:0.0|g
toka.sequences_running:3|g
toka.sequences_waiting:1200|g
toka.kv_blocks_used:50|g
toka.kv_blocks:200|g
toka.prefix_cache_hit_fraction:0.125|g
toka.shared_prompt_tokens:18432|c
toka.preemptions:3|c
toka.recomputed_tokens:0|c
toka.finished_requests:0|c"""


def connected(sender: StatsdSender) -> StatsdSender:
    deadline_s = time.monotonic() + 30
    while sender._socket is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert sender._socket is not None
    return sender


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_statsd_server_receives_the_figures_of_a_window(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as server:
        server.bind((host, 0))
        server.settimeout(30)
        shown = f"[{host}]" if ":" in host else host
        sender = connected(StatsdSender(f"udp://{shown}:{server.getsockname()[1]}", "toka"))
        sender.send(WINDOW)
        assert server.recv(65_536).decode() == FIGURES
        sender.send(replace(WINDOW, prefix_cache_hit_fraction=None))
        assert "prefix_cache_hit_fraction" not in server.recv(65_536).decode()


def test_a_statsd_server_that_is_absent_slow_or_unknown_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unread:
        unread.bind(("127.0.0.1", 0))
        port = unread.getsockname()[1]
        slow = connected(StatsdSender(f"127.0.0.1:{port}", "toka"))
        for _ in range(2000):  # more than its buffer holds
            slow.send(WINDOW)
    for _ in range(3):
        slow.send(WINDOW)  # refused: nobody listens any more
    wrong = ["no-such-host.invalid:8125", "no..host:8125"]
    for url in wrong:
        StatsdSender(url, "toka").send(WINDOW)
    deadline_s = time.monotonic() + 60
    while caplog.text.count("nothing is sent") < len(wrong) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for url in wrong:
        assert f"statsd_server_url={url}: " in caplog.text


def test_of_a_name_with_several_addresses_the_figures_go_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, a statsd server listens there alone, but localhost may be ::1 first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(30)
        port = server.getsockname()[1]
        kind = socket.SOCK_DGRAM, socket.IPPROTO_UDP, ""
        addresses = [
            (socket.AF_INET6, *kind, ("::1", port, 0, 0)),
            (socket.AF_INET, *kind, ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(addresses))
        connected(StatsdSender(f"localhost:{port}", "toka")).send(WINDOW)
        assert server.recv(65_536).decode() == FIGURES
