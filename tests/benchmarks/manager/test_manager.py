"""The manager's benchmark: its worker and counts are right, it runs from end to end, and it reports missed limits."""

import json
import os
import time
from collections import deque
from types import SimpleNamespace

import pytest

from benchmarks.manager import __main__ as manager_cpu
from benchmarks.manager import report as manager_report
from benchmarks.manager.load import InlineEngine, InstantWorker, Load, engine_options
from benchmarks.manager.occupancy import completion_lengths, measure_occupancy, run
from benchmarks.manager.parts import measure_shares, measure_simulation
from benchmarks.manager.process import ProcessCost, cpu_seconds, measure_process
from benchmarks.manager.report import check_costs
from tokasaurus.manager.engine import engine
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.state.engine_state import make_state


def lengths_asked(load: Load, num: int) -> dict[str, int]:
    """Completion lengths of the load's first requests: the seed minus the prompt length."""
    requests = [load.next() for _ in range(num)]
    return {request.request_id: request.seed - len(request.prompt_ids) for request in requests}


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("init_mean", [0.01, 1.0])
def test_completions_end_at_their_length_preempted_or_not(is_known: bool, init_mean: float) -> None:
    """With an initial mean of 0.01 far too many sequences are admitted, and preemption is constant."""

    def make_load() -> Load:
        return Load(range(1, 60), range(1, 81), None if is_known else 80, seed=5)

    options = engine_options(1600, 32, 200)
    options.config.early_stopping_initial_wait, options.config.early_stopping_init_mean = 10**6, init_mean
    state, load = make_state(options), make_load()
    sent, lengths, reasons = deque(), {}, {}
    engine, worker = Engine(state, sent.append), InstantWorker(options.num_slots, 0.01)
    engine.step([load.next() for _ in range(120)], [])
    while sent:
        engine.step([], [worker.forward(sent.popleft())])
        for delta in state.deltas:
            lengths[delta.request_id] = len(delta.token_ids)
            reasons[delta.request_id] = delta.finish_reason
            assert (delta.token_ids[-1] == 0) == (0 in delta.token_ids), "eos is the last token"
        state.deltas = []
    asked = lengths_asked(make_load(), 120)
    assert lengths == asked
    assert max(asked.values()) > 70
    assert set(reasons.values()) == {"length" if is_known else "stop"}
    assert (state.totals.preemptions > 0) == (init_mean == 0.01 and not is_known)


def test_counts_equal_the_totals_of_the_requests() -> None:
    def make_load() -> Load:
        return Load(range(20, 40), range(1, 50), None, seed=1)

    engine = InlineEngine(engine_options(100_000, 64, 512), make_load(), 0.01)
    engine.step(50)
    middle = None
    while not engine.is_idle:
        engine.step(0)
        if engine.counts.num_finished >= 25 and middle is None:
            middle = engine.counts
    end, other = engine.counts, make_load()
    requests = [other.next() for _ in range(50)]
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    num_tokens = sum(request.max_new_tokens for request in requests)
    assert (end.num_finished, end.num_prefill_tokens) == (50, num_prompt_tokens)
    assert end.num_prompt_bytes_sent == 4 * num_prompt_tokens
    assert end.num_generated_tokens == num_tokens
    assert end.num_decode_tokens == num_tokens - 50, "the first token of each is sampled by its prefill"
    assert end.num_bytes_sent > end.num_prompt_bytes_sent + 8 * end.num_decode_tokens
    assert end.num_steps >= 50
    assert end.cpu_s > 0
    assert {"receiving", "requests", "results", "admission", "steps", "sending", "updates"} <= set(end.section_s)
    assert middle is not None
    later = end.since(middle)
    assert later.num_finished == 50 - middle.num_finished
    assert later.num_generated_tokens == num_tokens - middle.num_generated_tokens
    assert later.section_s["steps"] == pytest.approx(end.section_s["steps"] - middle.section_s["steps"])


def test_all_wanted_sequences_run_if_the_cache_is_large() -> None:
    occupancy = run([30], False, num_wanted=20, num_kv_tokens=100_000, num_sequences=200, seed=0, advance=int)
    assert 19 < occupancy.mean_running_warm <= 20
    assert occupancy.num_preemptions == 0
    # Ten times 30 tokens; a replacement starts three steps after the last token of the sequence that it replaces.
    assert 300 <= occupancy.num_steps <= 350


@pytest.mark.long
def test_occupancy_is_the_same_in_every_run_and_known_lengths_fill_the_cache(monkeypatch) -> None:
    # A stalled machine makes a deferred task look slow; the engine would then send steps before running it.
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: 0.0))
    first, second = (measure_occupancy("gsm8k", 100, 600, 3, int) for _ in range(2))
    assert first == second
    assert first.num_kv_tokens == round(0.1 * 100 * (200 + 1024))
    assert first.ratio <= first.predicted.mean_running_warm / first.known.mean_running_warm
    assert first.ratio <= first.predicted.mean_running / first.known.mean_running
    assert 0.5 < first.ratio < 1
    # KV tokens of a running sequence: 200 of the prompt, E[L^2] / 2 E[L] sampled so far, and half a block of 16.
    lengths = completion_lengths("gsm8k", 0)
    kv_tokens = 200 + sum(length**2 for length in lengths) / 2 / sum(lengths) + 8
    assert 0.8 * first.num_kv_tokens / kv_tokens < first.known.mean_running_warm < first.num_kv_tokens / kv_tokens


def test_there_is_one_answer_length_per_question() -> None:
    lengths = completion_lengths("gsm8k", 0)
    assert len(lengths) == 200
    assert 20 < min(lengths) < max(lengths) < 400
    assert max(completion_lengths("lognormal", 0)) == 1024


def test_shares_sum_to_the_whole_and_bytes_are_few() -> None:
    shares = measure_shares(64, False, 40, 40, int)
    assert sum(shares.sections.values()) == pytest.approx(shares.us_per_token)
    assert shares.bytes_per_row > 8
    assert shares.prompt_bytes_per_row < shares.bytes_per_row
    assert shares.us_per_step > shares.us_per_token


def test_simulation_runs_with_as_many_sequences_as_asked() -> None:
    timings = measure_simulation(64, 3, int)
    assert [timing.num_calls for timing in timings] == [3, 3]
    assert [int(timing.name.split()[0]) for timing in timings] == pytest.approx([64, 64], abs=16)
    assert all(0 < timing.median_ms <= timing.slowest_ms for timing in timings)


def test_cpu_seconds_include_all_threads() -> None:
    before = cpu_seconds(os.getpid()), time.process_time()
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    found, expected = cpu_seconds(os.getpid()) - before[0], time.process_time() - before[1]
    assert found == pytest.approx(expected, abs=0.03)


def test_a_real_manager_is_measured_without_torch() -> None:
    shares: list[float] = []
    cost = measure_process(64, False, 40, 2, 1.0, shares.append)  # a busy machine gives the manager little of a window
    assert not cost.torch_imported
    assert 0 < cost.min_us_per_token <= cost.manager_us_per_token <= cost.max_us_per_token
    assert cost.worker_us_per_token > 0
    assert cost.tokens_per_s > 0
    assert 8 < cost.bytes_per_row < 200
    assert 10 < cost.mean_running <= 64 + 256
    assert len(cost.windows) == 2
    assert shares[-1] == 1


def test_cost_limits_apply_only_to_eos_at_random_and_growth_is_of_the_largest_batch() -> None:
    def cost(num_sequences: int, is_known: bool, us_per_token: float, torch_imported: bool = False) -> ProcessCost:
        return ProcessCost(
            num_sequences,
            is_known,
            us_per_token,
            0,
            0,
            0,
            0,
            num_sequences / 2,
            0,
            num_sequences / 1000,
            0,
            torch_imported,
            [],
        )

    costs = [cost(1024, False, 1.0), cost(8192, False, 1.3), cost(16384, False, 1.1), cost(16384, True, 9.0, True)]
    checks = check_costs(costs, [])
    assert [(check.value, check.is_met) for check in checks] == [
        (1.3, False),
        (1.1, True),
        (0.5, False),
        (16.384, True),
        (1, False),
    ]
    assert len(check_costs(costs[:1], [])) == 3, "no cost at 8,192 sequences and no second size to compare with"


def test_a_missed_limit_makes_the_exit_code_1_only_with_check(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(manager_report, "MAX_MATCH_MS", 1e6)  # however busy the machine is
    assert manager_cpu.main(["prefix", "--calls", "2", "--check", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [timing["num_calls"] for timing in found["prefix"]] == [2, 2]
    assert [check["is_met"] for check in found["checks"]] == [True, True]
    monkeypatch.setattr(manager_report, "MAX_MATCH_MS", 0)
    assert manager_cpu.main(["prefix", "--calls", "2", "--check"]) == 1
    assert manager_cpu.main(["prefix", "--calls", "2"]) == 0
    assert "not met" in capsys.readouterr().out
