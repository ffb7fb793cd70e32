"""A script that is killed at any time: every key exactly once, files whole at every moment, no finished row twice."""

import json
import subprocess
import sys
from pathlib import Path

import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from tests.library.map.helpers.calls import expected_rows, without_messages
from tests.library.map.helpers.finished import read_output
from tests.library.map.helpers.killed_job import SHARD_ROWS

NUM_ROWS = 4_000


def read_by_others(output: Path, format_name: str) -> int:
    """Rows that pyarrow and Polars find in the directory, of which all files must be whole."""
    if not output.exists() or not list(output.iterdir()):
        return 0
    if format_name == "parquet":
        frame = polars.read_parquet(output)
        assert frame.height <= pa.dataset.dataset(output).count_rows()
    else:
        frame = polars.read_ndjson(output)
        assert frame.height <= pa.dataset.dataset(output, format="json").count_rows()
    assert frame["id"].is_unique().all()
    return int(frame.height)


def check_log(log: Path) -> int:
    """Attempts; fails if a row was sent after its answer had been stored, or twice by one attempt."""
    stored: set[str] = set()
    sent: set[str] = set()
    attempts = 0
    for line in log.read_text().splitlines():
        what, _, number = line.partition(" ")
        if what == "attempt":
            attempts += 1
            sent = set()
        elif what == "sent":
            assert number not in stored, "computed twice"
            assert number not in sent
            sent.add(number)
        else:
            stored.add(number)
    return attempts


@pytest.mark.parametrize(
    ("format_name", "seed", "num_kills"),
    [
        ("parquet", 0, 4),
        ("jsonl", 1, 3),
        *[pytest.param("parquet", seed, 60, marks=pytest.mark.long) for seed in range(2, 7)],
    ],
)
def test_jobs_that_are_killed_go_on_where_they_were(
    tmp_path: Path, format_name: str, seed: int, num_kills: int
) -> None:
    rows = [{"id": f"k{number}", "q": f"question {number}"} for number in range(NUM_ROWS)]
    for number in range(0, NUM_ROWS, 97):
        rows[number]["q"] = f"too long {number}"
    if format_name == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(tmp_path), format_name, str(seed), str(num_kills)]
    job = subprocess.Popen([sys.executable, "-m", "tests.library.map.helpers.killed_job", *arguments])
    seen = [0]
    try:
        while job.poll() is None:
            seen.append(read_by_others(tmp_path / "out", format_name))
            assert seen[-1] >= seen[-2], "rows of the output never vanish"
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0
    assert len({*seen}) > 3, "the output was read while it grew"
    assert check_log(tmp_path / "log") > num_kills // 2, "the others were killed before they had begun"
    written = sorted(read_output(tmp_path / "out"), key=lambda row: int(row["id"][1:]))
    assert without_messages(written) == expected_rows(rows, [row["q"] for row in rows])
    assert len(list((tmp_path / "out").iterdir())) >= NUM_ROWS // SHARD_ROWS
    assert read_by_others(tmp_path / "out", format_name) == NUM_ROWS
    left = {path.name for path in (tmp_path / "out.toka").iterdir()}
    assert not {name for name in left if name.startswith("journal") or name.endswith(".part")}
