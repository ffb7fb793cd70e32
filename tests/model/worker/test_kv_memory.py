"""Sizing of the KV cache."""

import math
import os
import re
from pathlib import Path

import psutil
import pytest

from tokasaurus.messages.status import UserError
from tokasaurus.model.worker.kv_memory import BlockBytes, available_cpu_bytes, plan_auto, plan_fixed

MIB = 1024**2
GIB = 1024**3


ALONE = BlockBytes(own=1000, total=1000)
"""A block of a model on one worker."""

STAGES = BlockBytes(own=700, total=2000, num_workers=4)
"""A block on one of two workers with 7 of 10 layers, beside two with 3."""


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 1), (17, 2), (4096, 256)])
def test_a_requested_size_is_rounded_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    plan = plan_fixed(num_tokens, page_size=16, block=ALONE, available_bytes=(num_blocks + 1) * 1000)
    assert plan.num_blocks == num_blocks


def test_a_size_that_does_not_fit_is_refused_with_the_largest_size_that_fits() -> None:
    with pytest.raises(UserError, match=r"kv_cache_num_tokens=200: .* at most 144$"):
        plan_fixed(200, page_size=16, block=ALONE, available_bytes=10_500)
    assert plan_fixed(144, page_size=16, block=ALONE, available_bytes=10_500).num_blocks == 9


def test_a_requested_size_must_fit_all_workers_together() -> None:
    plan = plan_fixed(144, page_size=16, block=STAGES, available_bytes=20_000)
    assert plan.num_blocks == 9
    assert "9 blocks of 700 B = 6.152 KiB" in plan.arithmetic
    with pytest.raises(UserError, match=r"needs .* on 4 workers together, but only .* are available, .* at most 128$"):
        plan_fixed(144, page_size=16, block=STAGES, available_bytes=19_999)


def test_the_automatic_size_is_the_share_of_memory_less_the_padding_block() -> None:
    plan = plan_auto(16 * GIB, "of memory available", 0.25, page_size=16, block=BlockBytes(2**20, 2**21, 2))
    assert plan.num_blocks == 2 * GIB // 2**20 - 1
    # The arithmetic shown to the user gives the result.
    assert re.search(
        r"16 GiB .* x 0.25 / 2 MiB a block of 2 workers = 2,047 blocks of 16 = 32,752 tokens", plan.arithmetic
    )


@pytest.mark.parametrize("layers", [(19, 11), (13, 12, 5), (1, 1)])
def test_stages_that_share_memory_get_equally_many_blocks(
    layers: tuple[int, ...],
) -> None:
    """So that no stage takes memory for blocks that another one lacks."""
    blocks = [BlockBytes(count * 1000, sum(layers) * 1000, len(layers)) for count in layers]
    plans = [plan_auto(GIB, "of memory available", 0.25, page_size=16, block=block) for block in blocks]
    (num_blocks,) = {plan.num_blocks for plan in plans}
    assert num_blocks + 1 == GIB // 4 // (sum(layers) * 1000)


def test_memory_for_less_than_one_block_is_refused() -> None:
    with pytest.raises(UserError, match="kv_cache_num_tokens"):
        plan_auto(GIB, "of memory available", 0.25, 16, BlockBytes(GIB, GIB))


def test_available_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_cpu_bytes() <= total


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def is_available_on_the_machine(num_bytes: int) -> bool:
    """About equal, since other processes allocate and free memory between two measurements."""
    return math.isclose(num_bytes, psutil.virtual_memory().available, rel_tol=0.1, abs_tol=GIB)


def test_without_cgroups_the_memory_of_the_machine_is_available(tmp_path: Path) -> None:
    assert is_available_on_the_machine(available_cpu_bytes(tmp_path))


@pytest.mark.parametrize(
    ("entry", "directory", "limit", "usage", "prefix"),
    [
        # A service's own group; a group above it; a container, which sees its group as the root.
        ("0::/system.slice/toka", "sys/fs/cgroup/system.slice/toka", "memory.max", "memory.current", ""),
        ("0::/system.slice/toka", "sys/fs/cgroup/system.slice", "memory.max", "memory.current", ""),
        ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("0::/../toka", "sys/fs/cgroup", "memory.max", "memory.current", ""),
        # Version 1, and a container in which /proc shows the host's path.
        *(
            (entry, directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for entry, directory in (
                ("3:cpu:/\n4:hugetlb,memory:/a/b", "sys/fs/cgroup/memory/a/b"),
                ("4:memory:/docker/123", "sys/fs/cgroup/memory"),
            )
        ),
    ],
)
def test_a_cgroup_makes_available_its_limit_minus_usage_outside_the_page_cache(
    entry: str, directory: str, limit: str, usage: str, prefix: str, tmp_path: Path
) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": f"{entry}\n",
            f"{directory}/{limit}": f"{10 * MIB}\n",
            f"{directory}/{usage}": f"{9 * MIB}\n",
            f"{directory}/memory.stat": f"anon 5\n{prefix}inactive_file {4 * MIB}\n{prefix}active_file {MIB}\n",
        },
    )
    assert available_cpu_bytes(tmp_path) == 6 * MIB
    (tmp_path / directory / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    assert is_available_on_the_machine(available_cpu_bytes(tmp_path))


def test_a_cgroup_over_its_limit_makes_nothing_available(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/\n", f"{group}/memory.max": "100\n", f"{group}/memory.current": "300\n"}
    write_files(tmp_path, {**files, f"{group}/memory.stat": "inactive_file 50\n"})
    assert available_cpu_bytes(tmp_path) == 0
