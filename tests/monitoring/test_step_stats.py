"""The log line of a window, from totals whose rates are easy to see."""

from dataclasses import replace

from tokasaurus.messages.status import EngineStats
from tokasaurus.monitoring.step_stats import StepStats, StepTotals


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
        lines.append(step_stats.report(2000.0 + second, totals, make_stats(30 * second)))
        if second == 3:
            assert step_stats.seconds_to_report(2003.0) == 2.5, "the window began with the first step, at 2000.5"
    assert [line is not None for line in lines] == [False] * 5 + [True] + [False] * 4
    assert lines[5] == (
        "33 output tokens/s, 1,091 prompt tokens/s, prefix cache hits –, 40.0 sequences a step, 500.0 ms a step, "
        "worker busy 55%, manager busy 0% | "
        "3 running, 1,200 waiting, KV 50 of 200 blocks (25%)"
    )
    assert step_stats.seconds_to_report(2010.0) == 1.5
    last = step_stats.report(2016.0, totals, make_stats(300))
    assert last is not None
    assert last.startswith("13 output tokens/s, 421 prompt tokens/s, prefix cache hits –, 40.0 sequences a step")
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
        ("25%", "25%", ""),
        ("100%", "100%", ", 2,000 prompt tokens newly shared, 1,500 preemptions, 12,000 tokens computed again"),
        ("–", "0%", ", 1 token computed again"),
        ("–", "0%", ", 1 token computed again"),
        ("0%", "0%", ", 1 prompt token newly shared, 1 preemption"),
    ]
    step_stats = StepStats(report_seconds=5.0)
    totals, stats = StepTotals(), make_stats(0)
    for number, (window, (hits, busy, preemptions)) in enumerate(zip(windows, shown, strict=True), start=1):
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
        line = step_stats.report(1000.0 + 5 * number, totals, stats)
        assert line is not None
        assert f" prefix cache hits {hits}," in line
        assert f" manager busy {busy} |" in line
        assert line.endswith(f"KV 50 of 200 blocks (25%){preemptions}")
        assert "\n" not in line
