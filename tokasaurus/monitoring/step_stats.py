"""Periodic log line about the steps of the last seconds."""

from dataclasses import dataclass, replace

from tokasaurus.messages.status import EngineStats


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps whose results have arrived."""

    num_steps: int = 0
    num_rows: int = 0
    """Sequences per step, summed over all steps."""
    num_prefill_tokens: int = 0
    busy_seconds: float = 0.0
    """As reported by the worker."""
    idle_seconds: float = 0.0
    """Between two steps, of which the first left sequences to compute."""


class StepStats:
    """Makes a log line for every window of `report_seconds` in which a step ran, from running totals.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, report_seconds: float) -> None:
        self._report_seconds = report_seconds
        self._start_s = 0.0
        self._is_empty = True
        self._totals = StepTotals()
        self._num_generated = 0
        self._num_asked = 0
        self._num_cache_hit_tokens = 0
        self._num_preemptions = 0
        self._num_recomputed = 0
        self._num_shared = 0

    def seconds_to_report(self, now_s: float) -> float | None:
        """Seconds until `report` should be called even if nothing happens; None if there is nothing to report."""
        if self._is_empty:
            return None
        return max(0.0, self._start_s + self._report_seconds - now_s)

    def report(self, now_s: float, totals: StepTotals, stats: EngineStats) -> str | None:
        """The log line if a window has ended, else None. A new window then begins.

        Prompt tokens count what the workers computed. The cache hit rate is that of all prompt tokens of the sequences
        that started in the window, "–" if none did. The manager's busy fraction covers the last second, as in `stats`.
        """
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
        num_prefill_tokens = totals.num_prefill_tokens - self._totals.num_prefill_tokens
        busy_fraction = min(1.0, busy_seconds / seconds)  # a step counts entirely in the window where it ends
        num_cache_hit_tokens = stats.total_prefix_cache_hit_tokens - self._num_cache_hit_tokens
        # Not a share of stats.total_prompt_tokens: a prompt counts once there, but each of its samples may hit.
        num_asked = stats.total_asked_prompt_tokens - self._num_asked
        # A sequence preempted during its prefill may hit again in a later window, without asking again.
        cache_hits = f"{min(1.0, num_cache_hit_tokens / num_asked):.0%}" if num_asked else "–"
        num_preemptions = stats.total_preemptions - self._num_preemptions
        num_recomputed = stats.total_recomputed_tokens - self._num_recomputed
        num_shared = stats.total_shared_prompt_tokens - self._num_shared
        line = (
            f"{(stats.total_generation_tokens - self._num_generated) / seconds:,.0f} output tokens/s, "
            f"{num_prefill_tokens / seconds:,.0f} prompt tokens/s, prefix cache hits {cache_hits}, "
            f"{(totals.num_rows - self._totals.num_rows) / num_steps:,.1f} sequences a step, "
            f"{1000 * busy_seconds / num_steps:,.1f} ms a step, worker busy {busy_fraction:.0%}, "
            f"manager busy {stats.manager_busy_fraction:.0%} | "
            f"{stats.num_running:,} running, {stats.num_waiting:,} waiting, "
            f"KV {stats.num_kv_blocks_used:,} of {stats.num_kv_blocks_total:,} blocks "
            f"({stats.num_kv_blocks_used / stats.num_kv_blocks_total:.0%})"
        )
        if num_shared > 0:
            line += f", {num_shared:,} prompt token{'s' if num_shared > 1 else ''} newly shared"
        if num_preemptions > 0:
            line += f", {num_preemptions:,} preemption{'s' if num_preemptions > 1 else ''}"
        if num_recomputed > 0:
            line += f", {num_recomputed:,} token{'s' if num_recomputed > 1 else ''} computed again"
        self._start_s, self._is_empty = now_s, True
        self._totals, self._num_generated = replace(totals), stats.total_generation_tokens
        self._num_asked = stats.total_asked_prompt_tokens
        self._num_cache_hit_tokens = stats.total_prefix_cache_hit_tokens
        self._num_preemptions = stats.total_preemptions
        self._num_recomputed = stats.total_recomputed_tokens
        self._num_shared = stats.total_shared_prompt_tokens
        return line
