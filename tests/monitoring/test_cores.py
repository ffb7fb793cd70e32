"""Cores that a process may use."""

import math
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.helpers.examples import seeds
from tokasaurus.monitoring.cores import available_cores, cgroup_cores

OLD = "cpu.cfs_quota_us"


def write_groups(root: Path, entry: str, quotas: dict[str, str]) -> None:
    """entry: lines of /proc/self/cgroup. quotas: path of a file under /sys/fs/cgroup -> its content."""
    for path, text in {
        "proc/self/cgroup": entry + "\n",
        **{f"sys/fs/cgroup/{p}": t for p, t in quotas.items()},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        if path.endswith(OLD):
            (root / path).with_name("cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("entry", "quotas", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/", {"cpu.max": "nonsense"}, math.inf),
        ("0::/", {"cpu.max": "1 0"}, math.inf),
        ("0::/", {}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a/b", {"a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "max 100000\n", "cpu.max": "9 1"}, 1.0),
        ("0::/a/b", {"a/c/cpu.max": "100000 100000\n"}, math.inf),
        ("0::/host/path", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../../a", {"cpu.max": "50000 100000\n"}, 0.5),
        ("4:cpu,cpuacct:/", {f"cpu/{OLD}": "400000\n"}, 4.0),
        ("4:cpu,cpuacct:/a", {f"cpu,cpuacct/a/{OLD}": "400000\n", f"cpu,cpuacct/{OLD}": "-1\n"}, 4.0),
        ("4:cpu:/a/b", {f"cpu/a/{OLD}": "100000\n", f"cpu/a/b/{OLD}": "400000\n"}, 1.0),
        ("4:cpu:/docker/1", {f"cpu/{OLD}": "400000\n"}, 4.0),
        ("4:cpu:/", {f"cpu/{OLD}": "-1\n"}, math.inf),
        ("4:memory:/\n3:cpuset:/", {f"cpu/{OLD}": "400000\n"}, math.inf),
        ("4:cpu:/a\n0::/a", {f"cpu/a/{OLD}": "400000\n", "unified/a/cpu.max": "300000 100000"}, 3.0),
    ],
)
def test_the_smallest_quota_of_the_control_groups_counts(
    entry: str, quotas: dict[str, str], expected: float, tmp_path: Path
) -> None:
    write_groups(tmp_path, entry, quotas)
    assert cgroup_cores(tmp_path) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path) == math.inf


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", seeds(10))
def test_nested_quotas_equal_a_search_of_every_level(seed: int, version: int, tmp_path: Path) -> None:
    random = Random(seed)
    names = [f"g{level}" for level in range(random.randrange(6))]
    quotas: dict[str, str] = {}
    expected = math.inf
    for depth in range(len(names) + 1):
        if random.random() < 0.6:
            quota = random.randrange(10_000, 3_200_000)
            group = "/".join(names[:depth])
            quotas[f"cpu/{group}/{OLD}" if version == 1 else f"{group}/cpu.max"] = (
                str(quota) if version == 1 else f"{quota} 100000"
            )
            expected = min(expected, quota / 100_000)
    path = "/" + "/".join(names)
    write_groups(tmp_path, f"4:cpu,cpuacct:{path}" if version == 1 else f"0::{path}", quotas)
    assert cgroup_cores(tmp_path) == expected


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
