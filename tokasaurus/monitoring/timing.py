"""Seconds per named section of code, and the share of wall time in which a process was busy."""

from collections.abc import Callable
from time import perf_counter
from types import TracebackType


class SectionTimers:
    """`with timers.section("admission"): ...` adds the seconds spent inside to the section's total.

    Sections may be nested, but not in themselves; time counts only for the innermost section, so totals never count it
    twice. For one thread. Costs about 0.3 microseconds per entry.

    on_end: called at the end of each section, with its name and the times of its start and end, by perf_counter().
    """

    __slots__ = ("_on_end", "_open", "_sections", "_since_s")

    def __init__(self, on_end: Callable[[str, float, float], None] | None = None) -> None:
        self._on_end = on_end
        self._sections: dict[str, _Section] = {}
        self._open: list[_Section] = []
        self._since_s = 0.0  # when the innermost open section started or resumed

    def section(self, name: str) -> "_Section":
        try:
            return self._sections[name]
        except KeyError:
            section = self._sections[name] = _Section(self, name)
            return section

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by section, in order of first use; excludes time of the open section since it started or resumed."""
        return {name: section.total_s for name, section in self._sections.items()}


class _Section:
    """One object per name, reused each time the section is entered."""

    __slots__ = ("_began_s", "_name", "_timers", "total_s")

    def __init__(self, timers: SectionTimers, name: str) -> None:
        self._timers = timers
        self._name = name
        self._began_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        now_s = perf_counter()
        timers = self._timers
        if timers._open:
            timers._open[-1].total_s += now_s - timers._since_s
        timers._open.append(self)
        timers._since_s = self._began_s = now_s

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        now_s = perf_counter()
        timers = self._timers
        self.total_s += now_s - timers._since_s
        timers._since_s = now_s
        timers._open.pop()
        if timers._on_end is not None:
            timers._on_end(self._name, self._began_s, now_s)


class BusyFraction:
    """Share of wall time in which a process was busy, over consecutive windows of one second.

    Call add_busy() for all work before t, then read(t). Times are in seconds and never decrease.
    """

    def __init__(self) -> None:
        self._window = 0  # of the latest time seen; window i covers [i, i + 1) s
        self._busy_s = 0.0  # within that window
        self._fraction = 0.0  # of the previous window
        self._reported = 0.0

    def add_busy(self, start_s: float, end_s: float) -> None:
        """The process was busy from start_s to end_s."""
        self._advance(start_s, 0.0)
        window_end_s = self._window + 1
        if end_s < window_end_s:
            self._busy_s += end_s - start_s
            return
        self._busy_s += window_end_s - start_s
        self._advance(end_s, 1.0)
        self._busy_s = end_s - self._window

    def read(self, now_s: float) -> float:
        """The busy share of the last complete window, 0 to 1."""
        self._advance(now_s, 0.0)
        self._reported = self._fraction
        return self._fraction

    def seconds_to_report(self, now_s: float) -> float | None:
        """Seconds until `read` may return a new value even if nothing runs; None once it has returned 0 for an idle
        process.

        A process that sleeps no longer than this reads 0 soon after its last work, and may then sleep indefinitely.
        """
        self._advance(now_s, 0.0)
        if self._fraction != self._reported:
            return 0.0
        if self._fraction == 0.0 and self._busy_s == 0.0:
            return None
        return self._window + 1 - now_s

    def _advance(self, now_s: float, skipped_fraction: float) -> None:
        """Move to the window of now_s. skipped_fraction: busy share of any windows in between."""
        window = int(now_s)
        if window > self._window:
            self._fraction = self._busy_s if window == self._window + 1 else skipped_fraction
            self._window = window
            self._busy_s = 0.0
