"""Section timers on a clock that the test advances; busy fractions at explicit times. Nothing sleeps."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.monitoring import timing
from tokasaurus.monitoring.timing import BusyFraction, SectionTimers

NAMES = ["admission", "outputs", "input building"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


# A name enters that section, None leaves the innermost, a number lets that many ticks pass.
EVENTS = st.lists(st.sampled_from(NAMES) | st.none() | st.integers(0, 9), max_size=40)


@given(events=EVENTS)
@examples(500)
def test_each_tick_counts_for_the_innermost_section_alone(events: list[str | int | None]) -> None:
    """Oracle: one tick after the other, each given to the section that is innermost at that time."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "perf_counter", clock)
        timers = SectionTimers()
        expected: dict[str, float] = {}
        names: list[str] = []
        for event in [*events, *[None] * len(events)]:
            if isinstance(event, int):
                for _ in range(event):
                    clock.now_s += 1.0
                    if names:
                        expected[names[-1]] += 1.0
            elif event is not None:
                timers.section(event).__enter__()
                names.append(event)
                expected.setdefault(event, 0.0)
            elif names:
                timers.section(names.pop()).__exit__(None, None, None)
                if not names:
                    assert timers.totals == expected
        assert timers.totals == expected
        assert list(timers.totals) == list(expected), "in order of first use"


def test_a_section_that_raises_is_counted_and_lets_the_error_through(clock: Clock) -> None:
    timers = SectionTimers()

    def fail() -> None:
        with timers.section("outer"):
            clock.now_s += 1.0
            with timers.section("inner"):
                clock.now_s += 4.0
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    with timers.section("outer"):
        clock.now_s += 2.0
    assert timers.totals == {"outer": 3.0, "inner": 4.0}


def test_the_end_of_each_section_is_reported_with_its_times(clock: Clock) -> None:
    ended: list[tuple[str, float, float]] = []
    timers = SectionTimers(lambda *section: ended.append(section))
    with timers.section("outer"):
        clock.now_s += 1.0
        for _ in range(2):
            with timers.section("inner"):
                clock.now_s += 4.0
    assert ended == [("inner", 101.0, 105.0), ("inner", 105.0, 109.0), ("outer", 100.0, 109.0)]


def test_totals_are_a_snapshot(clock: Clock) -> None:
    timers = SectionTimers()
    before = timers.totals
    with timers.section("admission"):
        clock.now_s += 1.0
    assert (before, timers.totals) == ({}, {"admission": 1.0})


TICKS = 8  # a second; eighths are exact in binary


def busy_ticks(lengths: list[int]) -> list[bool]:
    """Idle for the first length, busy for the second, idle for the third, and so on."""
    return [index % 2 == 1 for index, length in enumerate(lengths) for _ in range(length)]


def second_before(ticks: list[bool], now: int) -> Fraction:
    """Oracle: the busy share of the last whole second before tick `now`."""
    end = now // TICKS * TICKS
    return Fraction(sum(ticks[max(0, end - TICKS) : end]), TICKS)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    start_second=st.integers(1, 10**6),
    reads=st.sets(st.integers(0, 400)),
)
@examples(1000)
def test_read_returns_the_fraction_of_the_last_completed_second(
    lengths: list[int], start_second: int, reads: set[int]
) -> None:
    ticks = busy_ticks(lengths) + [False] * 40
    busy = BusyFraction()
    borders = [0, *itertools.accumulate(lengths), len(ticks)]
    for index, (start, end) in enumerate(itertools.pairwise(borders)):
        is_busy = index % 2 == 1 and index < len(lengths)
        # report a busy period in parts, so that it is known up to each read
        edges = [start, *sorted(read for read in reads if start < read < end), end]
        for part_start, part_end in itertools.pairwise(edges):
            if is_busy:
                busy.add_busy(start_second + part_start / TICKS, start_second + part_end / TICKS)
            if part_end in reads:
                assert busy.read(start_second + part_end / TICKS) == second_before(ticks, part_end)
    assert busy.read(start_second + len(ticks) / TICKS) == 0


@given(lengths=st.lists(st.integers(0, 30), max_size=12), start_second=st.integers(1, 10**6))
@examples(500)
def test_reads_after_work_and_after_seconds_to_report_miss_no_change(lengths: list[int], start_second: int) -> None:
    """The last read is right at every tick; after the end of all work it is 0, and no further read is due."""
    ticks = busy_ticks(lengths)
    busy = BusyFraction()
    last_read: Fraction | float = 0.0
    wake_tick: float | None = None
    num_idle_wakes = 0
    for now in range(len(ticks) + 4 * TICKS):
        now_s = start_second + now / TICKS
        was_busy = 0 < now <= len(ticks) and ticks[now - 1]
        if was_busy:
            busy.add_busy(now_s - 1 / TICKS, now_s)
            num_idle_wakes = 0
        if was_busy or wake_tick == now:
            num_idle_wakes += not was_busy
            last_read = busy.read(now_s)
            seconds = busy.seconds_to_report(now_s)
            wake_tick = None if seconds is None else now + seconds * TICKS
        assert last_read == second_before(ticks, now)
        assert num_idle_wakes <= 2
    assert last_read == 0
    assert busy.seconds_to_report(start_second + 10**6) is None


def test_an_idle_process_never_has_to_wake_up() -> None:
    busy = BusyFraction()
    assert busy.seconds_to_report(1234.5) is None
    assert busy.read(1234.5) == 0
    assert busy.seconds_to_report(99_999.0) is None


def test_a_completed_second_that_was_not_read_is_due_at_once() -> None:
    busy = BusyFraction()
    busy.add_busy(10.0, 10.25)
    assert busy.seconds_to_report(10.25) == 0.75
    assert busy.seconds_to_report(11.5) == 0.0
    assert busy.read(11.5) == 0.25
    assert busy.seconds_to_report(11.5) == 0.5
    assert busy.read(12.0) == 0.0
    assert busy.seconds_to_report(12.0) is None


def test_many_short_busy_periods_add_up_to_at_most_one() -> None:
    busy = BusyFraction()
    for number in range(10_000):
        busy.add_busy(5 + number / 9999, 5 + (number + 1) / 9999)
    assert 0.9999 < busy.read(6.5) <= 1.0
