import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.throughput.compare import main, measure_alternately, medians, read_results, round_orders

LOAD = ["monkeys", "--questions", "2", "--samples", "2", "--max-tokens", "3", "--warmup", "0"]


def test_every_other_round_runs_backwards() -> None:
    assert round_orders(["a", "b", "c"], 3) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_servers_get_the_same_load_in_a_round_and_another_in_the_next(scripted_server: Any, tmp_path: Path) -> None:
    servers = {"plain": scripted_server.base_url, "tagged": f"{scripted_server.base_url} --extra-body '{{\"tag\": 1}}'"}
    summaries = measure_alternately(servers, LOAD, num_rounds=2, first_seed=7, output_dir=tmp_path)
    assert {name: len(runs) for name, runs in summaries.items()} == {"plain": 2, "tagged": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "plain-7.json",
        "plain-8.json",
        "tagged-7.json",
        "tagged-8.json",
    ]
    rounds = [scripted_server.bodies[start : start + 2] for start in range(0, 8, 2)]
    prompts = [{body["prompt"] for body in bodies} for bodies in rounds]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert not prompts[0] & prompts[2]
    assert [["tag" in body for body in bodies] for bodies in rounds] == [
        [False, False],
        [True, True],
        [True, True],
        [False, False],
    ]


def test_output_directory_is_made(scripted_server: Any, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "results"
    argv = ["--rounds", "1", "--output-dir", str(kept), "--server", f"a={scripted_server.base_url}", *LOAD]
    assert main(argv) == 0
    summary = json.loads((kept / "a-0.json").read_text())["summary"]
    assert summary["completion_tokens"] == 2 * 2 * 3


def write_result(path: Path, output_tokens_per_s: float, num_failed: int = 0) -> str:
    counts = dict.fromkeys(("num_requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 1)
    latencies = {f"latency_{name}_s": 1.0 for name in ("mean", "p50", "p90", "p99", "max")}
    rates = {"output_tokens_per_s": output_tokens_per_s, "total_tokens_per_s": 1.0, "requests_per_s": 1.0}
    summary = counts | latencies | rates | {"num_failed": num_failed, "wall_s": 1.0}
    path.write_text(json.dumps({"summary": summary}))
    return str(path)


def test_medians_and_ratio_to_the_first_name_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [("old", write_result(tmp_path / f"old{i}.json", rate)) for i, rate in enumerate((100, 900, 200))]
    files += [("new", write_result(tmp_path / f"new{i}.json", rate)) for i, rate in enumerate((400, 600))]
    assert medians(read_results(files)["old"])["output_tokens_per_s"] == 200
    assert main([arg for name, file in files for arg in ("--result", f"{name}={file}")]) == 0
    shown = capsys.readouterr().out
    assert "200.00 (1.00x)" in shown
    assert "500.00 (2.50x)" in shown
    assert "100.0-900.0" in shown


def test_runs_with_failures_are_not_compared(
    scripted_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--result", f"a={write_result(tmp_path / 'a.json', 5, num_failed=1)}"]) == 1
    scripted_server.status = lambda _: 500
    assert main(["--server", f"a={scripted_server.base_url}", *LOAD]) == 1
    assert capsys.readouterr().err.count("not comparable") == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "either --server or --result"),
        (["--server", "a=http://x"], "--server needs a workload"),
        (["--server", "http://x", "monkeys"], "NAME=VALUE"),
        (["--server", "a=http://x", "--server", "a=http://y", "monkeys"], "a different name"),
    ],
)
def test_wrong_argument_is_named_with_exit_code_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert named in capsys.readouterr().err
