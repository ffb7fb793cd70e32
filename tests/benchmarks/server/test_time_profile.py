"""Parts of the wall time, from counters read before and after a run."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.server import time_profile
from benchmarks.server.time_profile import OVERHEAD, WAITING, make_profile
from tests.end_to_end.helpers.toka_process import running_toka
from tokasaurus.commands.bench.client import ServerError

BEFORE = {
    ("toka_forward_seconds_total", ""): 100.0,
    ("toka_manager_cpu_seconds_total", ""): 1.0,
    ("toka_server_cpu_seconds_total", ""): 2.0,
    ("toka_forward_phase_seconds_total", "gemm"): 70.0,
}
AFTER = {
    ("toka_forward_seconds_total", ""): 109.0,
    ("toka_manager_cpu_seconds_total", ""): 1.5,
    ("toka_server_cpu_seconds_total", ""): 2.25,
    ("toka_forward_phase_seconds_total", "gemm"): 74.0,
    ("toka_forward_phase_seconds_total", "prefix_attention"): 2.0,
    ("toka_forward_phase_seconds_total", "attention"): 1.0,
    ("toka_forward_phase_seconds_total", "heads"): 0.5,
    ("toka_forward_phase_seconds_total", "sampling"): 0.5,
}


def test_parts_are_differences_and_add_up_to_the_wall_time() -> None:
    profile = make_profile(BEFORE, AFTER, wall_s=10.0, client_cpu_s=0.125)
    assert list(profile.seconds.values()) == [4.0, 2.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    assert (profile.seconds[OVERHEAD], profile.seconds[WAITING]) == (1.0, 1.0)
    assert sum(profile.seconds.values()) == profile.wall_s == 10.0
    assert profile.share_outside_kernels == 0.2
    assert profile.beside_cpu_s == {"manager": 0.5, "server": 0.25, "this client": 0.125}


def test_a_server_that_does_not_count_phases_is_an_error() -> None:
    without = {key: value for key, value in AFTER.items() if key[1] != "attention"}
    with pytest.raises(ServerError, match="no counter toka_forward_phase_seconds_total of phase attention"):
        make_profile(BEFORE, without, wall_s=10.0, client_cpu_s=0.0)


def test_no_server_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_profile.main(["workload=monkeys", "base_url=http://127.0.0.1:9/v1"]) == 1
    assert "http://127.0.0.1:9/metrics" in capsys.readouterr().err


@pytest.mark.long
def test_parts_of_a_real_run_add_up(tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    prompt = " ".join(f"word {number}" for number in range(120))
    line = {"prompt": prompt, "n": 24, "max_tokens": 24, "ignore_eos": True}
    load.write_text(json.dumps(line) + "\n", encoding="utf-8")
    groups = ("use_hydragen=T", "hydragen_min_group_size=8", "hydragen_min_prefix_len=16")
    with running_toka("kv_cache_num_tokens=20000", *groups) as toka:
        words = ["workload=file", f"input={load}", f"base_url={toka.url}/v1"]
        report, profile = asyncio.run(time_profile.measure_profile(words))
        assert toka.stop() == 0
    assert report.summary.num_failed == 0
    assert sum(profile.seconds.values()) == pytest.approx(report.summary.wall_s)
    assert all(seconds > 0 for seconds in profile.seconds.values())
    assert all(seconds > 0 for seconds in profile.beside_cpu_s.values())
