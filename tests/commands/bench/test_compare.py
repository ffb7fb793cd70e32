"""Runs beside each other: ratios by hand, and `toka bench compare` on files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokasaurus.cli import bench_main
from tokasaurus.commands.bench.compare import Measured, compare_measured

FIGURES = {"kv_peak": 0.5, "preemptions": 3.0, "cached_share": None, "idle_share": 0.0}


def measured(name: str, seed: int, rate: float, p99_s: float | None = None) -> Measured:
    return Measured(name, seed, "load", summary(rate, p99_s), FIGURES)


def summary(rate: float, p99_s: float | None = None, num_failed: int = 0) -> dict[str, Any]:
    times = dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2el_s", "goodput_per_s", "cost_per_million_tokens"))
    ttft = None if p99_s is None else {"percentiles": {"p50": p99_s / 2, "p99": p99_s}}
    rates = {"output_tokens_per_s": rate, "requests_per_s": rate / 10, "full_load": None}
    return {**times, **rates, "ttft_s": ttft, "num_failed": num_failed}


def test_ratios_are_taken_within_the_rounds() -> None:
    runs = [measured("old", 1, 100), measured("new", 1, 150), measured("new", 2, 300), measured("old", 2, 150)]
    runs += [measured("old", 3, 50), measured("new", 3, 60), measured("new", 4, 1000)]
    compared = compare_measured(runs)
    assert compared.names == ["old", "new"]
    row = compared.rows["output_tokens_per_s"]["new"]
    assert (row.median, row.low, row.high) == (225, 60, 1000)
    assert (row.ratio, row.ratio_low, row.ratio_high) == (1.5, 1.2, 2.0)
    assert compared.rows["output_tokens_per_s"]["old"].ratio == 1


def test_without_a_common_round_the_medians_are_compared() -> None:
    row = compare_measured([measured("old", 1, 100), measured("new", 2, 150)]).rows["requests_per_s"]["new"]
    assert (row.ratio, row.ratio_low) == (1.5, None)


def test_a_figure_that_one_server_lacks_is_left_out_for_it() -> None:
    compared = compare_measured([measured("old", 1, 100), measured("new", 1, 150, p99_s=0.5)])
    assert list(compared.rows["ttft_s p99"]) == ["new"]
    assert compared.rows["ttft_s p99"]["new"].median == 500
    assert compared.rows["ttft_s p99"]["new"].ratio is None
    assert "itl_s p50" not in compared.rows


def test_figures_of_the_server_are_compared_too() -> None:
    rows = compare_measured([measured("old", 1, 100), measured("new", 1, 150)]).rows
    assert rows["server kv_peak"]["new"].median == 50
    assert rows["server preemptions"]["new"].median == 3
    assert rows["server idle_share"]["new"].ratio is None
    assert "server cached_share" not in rows


def write(
    path: Path, name: str, *rates: float, workload: str = "monkeys", num_failed: int = 0, questions: int = 16
) -> str:
    runs = [
        {
            "name": name,
            "seed": seed,
            "workload": workload,
            "config": {"workload": workload, "questions": questions, "model": name},
            "requests": [],
            "server": {"model": "m"},
            "machine": {"cpu_model": "c"},
            "summary": summary(rate, num_failed=num_failed),
            "server_figures": FIGURES,
        }
        for seed, rate in enumerate(rates)
    ]
    path.write_text(json.dumps({"runs": runs}))
    return str(path)


def test_files_are_compared_by_their_servers_or_else_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write(tmp_path / "before.json", "toka", 100, 200), write(tmp_path / "after.json", "toka", 300, 400)
    output = tmp_path / "compared.json"
    assert bench_main(["compare", before, after, f"output={output}"]) == 0
    shown = capsys.readouterr().out
    assert "before: toka, 2" in shown.replace("\n", " ")
    assert "2.50 (2.00–3.00)" in shown
    assert json.loads(output.read_text())["rows"]["output_tokens_per_s"]["after: toka"]["ratio"] == 2.5
    vllm = write(tmp_path / "vllm.json", "vllm", 50, 100)
    assert bench_main(["compare", vllm, before]) == 0
    assert "over vllm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["absent.json"], "absent.json: No such file"),
        (["other.json"], "is no result of toka bench"),
        (["failed.json"], "1 runs with failed requests are left out"),
        (["empty.json"], "has no runs"),
        (["one.json", "chats.json"], "different workloads"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, files: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"summary": {}}')
    (tmp_path / "empty.json").write_text('{"runs": []}')
    write(tmp_path / "failed.json", "toka", 5, num_failed=1)
    write(tmp_path / "one.json", "toka", 5)
    write(tmp_path / "chats.json", "vllm", 5, workload="prefix-chat")
    assert bench_main(["compare", *(str(tmp_path / file) for file in files)]) == 1
    captured = capsys.readouterr().err
    assert named in captured
    assert "Traceback" not in captured


def test_files_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    files = []
    for folder, rate in (("a", 100.0), ("b", 300.0)):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "run.json", "toka", rate))
    assert bench_main(["compare", *files, f"output={tmp_path / 'c.json'}"]) == 0
    compared = json.loads((tmp_path / "c.json").read_text())
    assert compared["names"] == [f"{file}: toka" for file in files]
    assert compared["rows"]["output_tokens_per_s"][f"{files[1]}: toka"]["ratio"] == 3


def test_runs_of_another_load_form_no_round(tmp_path: Path) -> None:
    files = [write(tmp_path / "few.json", "few", 100), write(tmp_path / "many.json", "many", 300, questions=32)]
    assert bench_main(["compare", *files, f"output={tmp_path / 'c.json'}"]) == 0
    row = json.loads((tmp_path / "c.json").read_text())["rows"]["output_tokens_per_s"]["many"]
    assert (row["ratio"], row["ratio_low"]) == (3, None)


def test_a_run_with_failures_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / "good.json", "good", 100), write(tmp_path / "bad.json", "bad", 300, num_failed=1)]
    assert bench_main(["compare", *files]) == 0
    captured = capsys.readouterr()
    assert "left out" in captured.err
    assert "bad" not in captured.out


def test_compare_needs_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["compare"]) == 2
    assert "needs files" in capsys.readouterr().err
