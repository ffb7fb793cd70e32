"""Cores that a process may use."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokasaurus.monitoring.cores import available_cores, cgroup_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
    ],
)
def test_the_number_of_cores_that_a_cgroup_allows(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_cores(tmp_path / "cpu.max", tmp_path / "cpu.cfs_quota_us") == expected


def test_available_cores_are_between_one_and_the_cpu_count() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone pins processes to cores")
def test_a_process_pinned_to_one_core_has_one() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from tokasaurus.monitoring.cores import available_cores; print(available_cores())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
@pytest.mark.parametrize(("niceness", "expected"), [(0, 10), (15, 15)])
def test_a_background_thread_lowers_its_priority_to_at_least_niceness_10(niceness: int, expected: int) -> None:
    """In processes started with `nice` or without; an ordinary user may not raise a priority again."""
    code = (
        "import os; from tokasaurus.monitoring.cores import lower_thread_priority\n"
        f"os.nice({niceness} - os.nice(0))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "lower_thread_priority(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == expected
