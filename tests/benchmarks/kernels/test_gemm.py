"""The gemm benchmark: its limits, and that it runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.kernels import gemm
from benchmarks.kernels.gemm import (
    OURS_BFLOAT16,
    OURS_FLOAT32,
    ROWS,
    TORCH_BFLOAT16,
    TORCH_FLOAT32,
    Level,
    check_level,
    machine_levels,
    measure,
)


def make_level(**changes: dict[int, float]) -> Level:
    """Figures just above every limit. changes: other figures for an implementation, such as torch_float32."""
    gflops = {
        OURS_FLOAT32: {1: 13.1, 8: 18.1, 64: 120.1, 512: 100.1},
        OURS_BFLOAT16: {1: 21.1, 8: 20.0, 64: 102.2, 512: 85.2},
        TORCH_FLOAT32: dict.fromkeys(ROWS, 10.0) | {64: 100.0, 512: 100.0},
        TORCH_BFLOAT16: dict.fromkeys(ROWS, 1.0),
    }
    return Level("avx2", gflops | {name.replace("_", " "): by_rows for name, by_rows in changes.items()}, read=50.0)


def missed(level: Level) -> list[str]:
    return [check.name for check in check_level(level) if not check.is_met]


def test_figures_above_every_limit_miss_none() -> None:
    assert missed(make_level()) == []


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
def test_a_slower_gemm_misses_the_limit_for_its_rows(rows: int) -> None:
    level = make_level()
    level.gflops[OURS_FLOAT32][rows] *= 0.9
    level.gflops[OURS_BFLOAT16][rows] *= 0.9  # keeps the ratio to float32
    (name,) = missed(level)
    assert f" {rows} row" in name


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_slower_bfloat16_weights_miss_their_own_limit(rows: int) -> None:
    level = make_level()
    level.gflops[OURS_BFLOAT16][rows] *= 0.9
    (name,) = missed(level)
    assert "bfloat16" in name
    assert f" {rows} row" in name


def test_one_row_may_reach_the_read_bandwidth_instead_of_beating_torch() -> None:
    level = make_level(torch_float32=dict.fromkeys(ROWS, 10.0) | {1: 100.0, 64: 100.0, 512: 100.0})
    assert len(missed(level)) == 1
    assert missed(dataclasses.replace(level, read=2 * 13.1 / 0.86)) == []


def test_every_level_of_this_machine_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "ROWS", (1, 2, 8, 64, 512))
    monkeypatch.setattr(gemm, "NUM_WEIGHTS", 2 * 32 * 48)
    file = tmp_path / "gemm.json"
    monkeypatch.setattr(gemm, "measure_in_child", lambda cpu_isa, args: measure(cpu_isa, 2, *args.weights))
    assert gemm.main(["--weights", "32", "48", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [level["cpu_isa"] for level in found["levels"]] == machine_levels()
    assert len(found["levels"]) > 0
    for level in found["levels"]:
        assert level["read"] > 0
        assert all(len(by_rows) == 5 and min(by_rows.values()) > 0 for by_rows in level["gflops"].values())
