"""The benchmark of the store runs, and its input file is what it says."""

import re
from pathlib import Path

import pytest

from benchmarks.batch_store import INPUT_FILE, main, write_input
from tokasaurus.server.batches.store.data_dir import DataDir


@pytest.mark.parametrize(("num_lines", "num_bytes"), [(100, 100_000), (1000, 4_000_000)])
def test_the_input_file_has_its_size(tmp_path: Path, num_lines: int, num_bytes: int) -> None:
    data_dir = DataDir(tmp_path)
    data_dir.open("a test")
    write_input(data_dir, num_lines, num_bytes)
    content = data_dir.content_path(INPUT_FILE).read_bytes()
    data_dir.close()
    assert content.count(b"\n") == num_lines
    assert 0.95 < len(content) / num_bytes < 1.05


def test_each_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lines", "3000", "--file-mb", "1", "--result-bytes", "200", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"│ (\w+) +│ +(\d+) │ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │", printed)
    assert [(part, lines) for part, lines, *_ in rows] == [
        ("validate", "3000"),
        ("record", "3000"),
        ("finalize", "3000"),
    ]
    assert all(0 < float(us_per_line) < 10_000 for *_, us_per_line in rows)
    assert "process that reads the file: CPU" in printed
    assert list(tmp_path.iterdir()) == []
