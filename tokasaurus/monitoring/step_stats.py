"""Periodic report about the steps of the last seconds: a log line, and the same figures for a statsd server.

Source of statsd's format: https://github.com/statsd/statsd/blob/master/docs/metric_types.md
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokasaurus.messages.status import EngineStats, TimeLeft

logger = logging.getLogger(__name__)

MAX_LINE_CHARS = 71
"""Most characters of a window's line, which then fits into 80 columns after the time of day."""

_COUNTED = (
    *("total_generation_tokens", "total_asked_prompt_tokens", "total_prefix_cache_hit_tokens"),
    *("total_shared_prompt_tokens", "total_preemptions", "total_recomputed_tokens"),
)
"""Totals of EngineStats whose growth is reported."""


_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIME_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "m"))


def short_number(number: float, num_digits: int = 2) -> str:
    """The number in at most four characters: 862, 9.3k, 12k. num_digits: of numbers from a thousand on, at least."""
    for size, unit in _UNITS:
        if number >= 0.9995 * size:
            value = number / size
            digits = num_digits - 1 if value < 9.95 else 0
            return f"{value:.{digits}f}{unit}"
    return f"{number:.0f}"


def short_time(seconds: float | None) -> str:
    """The time in one unit, rounded: 4s, 12m, 3h; – for what is not known."""
    if seconds is None:
        return "–"
    for size, unit in _TIME_UNITS:
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def short_range(left: TimeLeft | None) -> str:
    """4m, or 2-4m while it is not sure; – for what is not known."""
    if left is None:
        return "–"
    if left.is_sure:
        return short_time(left.middle_s)
    low, high = short_time(left.low_s), short_time(left.high_s)
    return high if low == high else f"{low.removesuffix(high[-1])}-{high}"


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps whose results have arrived."""

    num_steps: int = 0
    num_rows: int = 0
    """Sequences per step, summed over all steps."""
    num_prefill_tokens: int = 0
    busy_seconds: float = 0.0
    """Time of the steps' forwards, as reported by the worker."""
    idle_seconds: float = 0.0
    """Time between two steps, where the first left sequences to compute."""
    num_finished_requests: int = 0
    """Requests whose sequences have all ended; cancelled requests do not count."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Figures of one window; `stats` and the last two are current.

    Prompt tokens count what the workers computed.
    """

    output_tokens_per_second: float
    prompt_tokens_per_second: float
    prefix_cache_hit_fraction: float | None
    """Cached share of the prompt tokens of sequences that started in the window; None if none started."""
    sequences_per_step: float
    milliseconds_per_step: float
    worker_busy_fraction: float
    num_shared: int
    """Prompt tokens newly shared, as the next two in the window."""
    num_preemptions: int
    num_recomputed: int
    """Tokens computed again."""
    stats: EngineStats
    num_finished: int = 0
    """Requests that ended in the window, as StepTotals counts them."""
    time_left: TimeLeft | None = None
    """Until all work at hand is done; None if it is not known."""
    oldest_wait_s: float | None = None
    """Age of the oldest request with a waiting sequence; None if none waits."""

    @property
    def _seconds_left(self) -> float | None:
        return None if self.time_left is None else self.time_left.middle_s

    def line(self) -> str:
        """The window's line for the log: at most MAX_LINE_CHARS."""
        line = self._line(short_range(self.time_left), num_digits=2)
        if len(line) > MAX_LINE_CHARS:
            line = self._line(short_range(self.time_left), num_digits=1)
        if len(line) > MAX_LINE_CHARS:
            line = self._line(short_time(self._seconds_left), num_digits=1)
        return line if len(line) <= MAX_LINE_CHARS else line.replace(", ", ",")

    def _line(self, left: str, num_digits: int) -> str:
        def short(number: float) -> str:
            return short_number(number, num_digits)

        stats = self.stats
        return (
            f"{short(self.output_tokens_per_second)} out/s, {short(self.prompt_tokens_per_second)} in/s, "
            f"{short(stats.num_running)} run, {short(stats.num_waiting)} wait {short_time(self.oldest_wait_s)}, "
            f"KV {stats.num_kv_blocks_used / stats.num_kv_blocks_total:.0%}, {short(self.num_finished)} done, "
            f"ETA {left}"
        )

    def details(self) -> str:
        """What the line leaves out."""
        hits = self.prefix_cache_hit_fraction
        return (
            f"prefix cache hits {'–' if hits is None else f'{hits:.0%}'}, "
            f"{self.sequences_per_step:,.1f} sequences a step, {self.milliseconds_per_step:,.1f} ms a step, "
            f"worker busy {self.worker_busy_fraction:.0%}, manager busy {self.stats.manager_busy_fraction:.0%}, "
            f"prompt tokens newly shared {self.num_shared:,}, preemptions {self.num_preemptions:,}, "
            f"tokens computed again {self.num_recomputed:,}"
        )

    def fields(self) -> dict[str, float | int | None]:
        """The figures by name, for a log that programs read; None for what is not known."""
        fields: dict[str, float | int | None] = {**self._gauges(), **self._counters()}
        fields["prefix_cache_hit_fraction"] = self.prefix_cache_hit_fraction
        fields["oldest_wait_seconds"] = self.oldest_wait_s
        fields["expected_seconds_left"] = self._seconds_left
        return {name: value if value is None else round(value, 4) for name, value in fields.items()}

    def _gauges(self) -> dict[str, float]:
        stats = self.stats
        return {
            "output_tokens_per_second": self.output_tokens_per_second,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "sequences_per_step": self.sequences_per_step,
            "milliseconds_per_step": self.milliseconds_per_step,
            "worker_busy_fraction": self.worker_busy_fraction,
            "manager_busy_fraction": stats.manager_busy_fraction,
            "sequences_running": stats.num_running,
            "sequences_waiting": stats.num_waiting,
            "kv_blocks_used": stats.num_kv_blocks_used,
            "kv_blocks": stats.num_kv_blocks_total,
        }

    def _counters(self) -> dict[str, int]:
        return {
            "shared_prompt_tokens": self.num_shared,
            "preemptions": self.num_preemptions,
            "recomputed_tokens": self.num_recomputed,
            "finished_requests": self.num_finished,
        }

    def statsd_lines(self, prefix: str) -> list[str]:
        """The figures in statsd's format, one line each. prefix: of each name."""
        gauges = self._gauges()
        for name, value in (
            ("prefix_cache_hit_fraction", self.prefix_cache_hit_fraction),
            ("oldest_wait_seconds", self.oldest_wait_s),
            ("expected_seconds_left", self._seconds_left),
        ):
            if value is not None:
                gauges[name] = value
        lines = [f"{prefix}.{name}:{round(value, 4)}|g" for name, value in gauges.items()]
        return lines + [f"{prefix}.{name}:{count}|c" for name, count in self._counters().items()]


class StepStats:
    """Reports every window of `report_seconds` in which a step ran, from running totals.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, report_seconds: float) -> None:
        self._report_seconds = report_seconds
        self._start_s = 0.0
        self._is_empty = True
        self._totals = StepTotals()
        self._counted = dict.fromkeys(_COUNTED, 0)

    def seconds_to_report(self, now_s: float) -> float | None:
        """Seconds until `report` should be called even if nothing happens; None if there is nothing to report."""
        if self._is_empty:
            return None
        return max(0.0, self._start_s + self._report_seconds - now_s)

    def report(
        self,
        now_s: float,
        totals: StepTotals,
        stats: EngineStats,
        find_left: Callable[[], tuple[TimeLeft | None, float | None]] = lambda: (None, None),
    ) -> StepWindow | None:
        """The window that has ended, if any. A new one then begins. find_left: called at the end of a window, for its
        last two figures."""
        num_steps = totals.num_steps - self._totals.num_steps
        if num_steps == 0:
            return None
        busy_seconds = totals.busy_seconds - self._totals.busy_seconds
        if self._is_empty:
            # After a pause the window begins with the first step, so that idle time does not lower the rates.
            self._start_s = max(self._start_s, now_s - busy_seconds)
            self._is_empty = False
        seconds = now_s - self._start_s
        if seconds < self._report_seconds:
            return None
        counted = {name: getattr(stats, name) for name in _COUNTED}
        new = {name: counted[name] - before for name, before in self._counted.items()}
        # Not of stats.total_prompt_tokens: a prompt counts once there, but each of its samples may hit.
        asked, hits = new["total_asked_prompt_tokens"], new["total_prefix_cache_hit_tokens"]
        left, oldest_wait_s = find_left()
        window = StepWindow(
            output_tokens_per_second=new["total_generation_tokens"] / seconds,
            prompt_tokens_per_second=(totals.num_prefill_tokens - self._totals.num_prefill_tokens) / seconds,
            # A sequence preempted during its prefill may hit again in a later window, without asking again.
            prefix_cache_hit_fraction=min(1.0, hits / asked) if asked else None,
            sequences_per_step=(totals.num_rows - self._totals.num_rows) / num_steps,
            milliseconds_per_step=1000 * busy_seconds / num_steps,
            worker_busy_fraction=min(1.0, busy_seconds / seconds),  # a step counts in the window where it ends
            num_shared=new["total_shared_prompt_tokens"],
            num_preemptions=new["total_preemptions"],
            num_recomputed=new["total_recomputed_tokens"],
            stats=stats,
            num_finished=totals.num_finished_requests - self._totals.num_finished_requests,
            time_left=left,
            oldest_wait_s=oldest_wait_s,
        )
        self._start_s, self._is_empty = now_s, True
        self._totals, self._counted = replace(totals), counted
        return window


class StatsdSender:
    """Sends figures over UDP to the statsd server of the flag statsd_server_url=. Never blocks and never raises: what
    cannot be sent is lost."""

    def __init__(self, url: str, prefix: str) -> None:
        """prefix: of each figure's name, before a dot."""
        self._url = url
        self._prefix = prefix
        self._socket: socket.socket | None = None
        """None until the host's address is found."""
        threading.Thread(target=self._connect, name="statsd", daemon=True).start()

    def _connect(self) -> None:
        """Thread: to find the address of a host may take seconds."""
        host, _, port = self._url.removeprefix("udp://").rpartition(":")
        try:
            addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            # By default, a statsd server listens on IPv4 alone, but localhost may be ::1 first.
            addresses.sort(key=lambda found: found[0] != socket.AF_INET)
            family, kind, protocol, _, address = addresses[0]
            found = socket.socket(family, kind, protocol)
            found.setblocking(False)
            found.connect(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host, such as "a..b"
            reason = getattr(error, "strerror", None) or error
            logger.warning("statsd_server_url=%s: %s; nothing is sent", self._url, reason)
        else:
            self._socket = found

    def send(self, window: StepWindow) -> None:
        """Send the lines in one datagram."""
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(window.statsd_lines(self._prefix)).encode())
        except OSError as error:  # the buffer is full, or nobody received the datagram before
            logger.debug("statsd_server_url=%s: %s", self._url, error)
