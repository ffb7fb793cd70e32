"""Memory nodes of simulated machines, and a process that is bound to one of them."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.monitoring.helpers.machines import Machine, write_machine
from tokasaurus.monitoring.memory_nodes import MemoryNode, Place, bound_to, memory_nodes, places, show_cores

GIB = 1 << 30
TWO = Machine(nodes={0: ("0-3", 8), 1: ("4-7", 8)})


def found(root: Path, machine: Machine) -> dict[int, tuple[str, int]]:
    """Node -> its cores and GiB."""
    write_machine(root, machine)
    return {node.number: (show_cores(node.cores), node.num_bytes // GIB) for node in memory_nodes(root)}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param(Machine(nodes={0: ("0-7", 16)}), {0: ("0-7", 16)}, id="one node"),
        pytest.param(TWO, {0: ("0-3", 8), 1: ("4-7", 8)}, id="two nodes"),
        pytest.param(
            Machine(nodes={0: ("0-1,8-9", 8), 1: ("2-3,10-11", 8), 2: ("4-5", 8), 10: ("6,14", 8)}, cores="2-5,14"),
            {1: ("2-3", 8), 2: ("4-5", 8), 10: ("14", 8)},
            id="four nodes, one outside the affinity",
        ),
        pytest.param(
            Machine(nodes={number: (f"{2 * number}-{2 * number + 1}", 8) for number in range(4)}, cores="0-3"),
            {0: ("0-1", 8), 1: ("2-3", 8)},
            id="four nodes, two outside the affinity",
        ),
        pytest.param(
            Machine(
                nodes={0: ("0-3", 8), 1: ("4-7", 0), 2: ("8-11", 8), 3: ("12-15", 0)}, far={(1, 2): 12, (3, 0): 12}
            ),
            {0: ("0-3+12-15", 8), 2: ("4-11", 8)},
            id="nodes without memory",
        ),
        pytest.param(
            Machine(nodes={0: ("0-3", 8), 1: ("4-7", 8), 2: ("8-11", 8)}, memory="0-1"),
            {0: ("0-3+8-11", 8), 1: ("4-7", 8)},
            id="a node whose memory is not allowed",
        ),
        pytest.param(
            Machine(nodes={0: ("0-3", 8), 1: ("", 64)}), {0: ("0-3", 8)}, id="a node without cores, such as CXL"
        ),
        pytest.param(
            Machine(nodes={number: (f"{4 * number}-{4 * number + 3},{32 + 4 * number}", 4) for number in range(8)}),
            {number: (f"{4 * number}-{4 * number + 3}+{32 + 4 * number}", 4) for number in range(8)},
            id="two sockets in clusters of four, with hyper-threads",
        ),
        pytest.param(Machine(nodes={0: ("0-3", 8), 1: ("4-7", 8)}, cores="9"), {}, id="no core of any node"),
        pytest.param(Machine(nodes={}), {}, id="no nodes"),
        pytest.param(Machine(nodes={0: ("0-3", 8), 1: ("nonsense", 8)}), {}, id="a file that cannot be read"),
    ],
)
def test_a_node_has_the_cores_nearest_to_memory_that_may_be_used(
    machine: Machine, expected: dict[int, tuple[str, int]], tmp_path: Path
) -> None:
    assert found(tmp_path, machine) == expected


def test_a_system_without_proc_and_sys_has_no_nodes(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of memory nodes")
def test_this_machines_nodes_have_the_cores_of_this_process_and_no_others() -> None:
    nodes = memory_nodes()
    if nodes:  # a container may hide them
        assert sorted(chain(*(node.cores for node in nodes))) == sorted(os.sched_getaffinity(0))
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < sum(node.num_bytes for node in nodes) < 1.1 * total


def nodes_of(*cores: str) -> list[MemoryNode]:
    return [
        MemoryNode(number, frozenset(map(int, one.split())), (number + 1) * GIB) for number, one in enumerate(cores)
    ]


@pytest.mark.parametrize(
    ("num_nodes", "num_replicas", "expected"),
    [
        (2, 2, [([0], 1), ([1], 1)]),
        (2, 5, [([0], 3), ([1], 2), ([0], 3), ([1], 2), ([0], 3)]),
        (4, 2, [([0, 1], 1), ([2, 3], 1)]),
        (3, 2, [([0], 1), ([1, 2], 1)]),
        (8, 3, [([0, 1], 1), ([2, 3, 4], 1), ([5, 6, 7], 1)]),
        (2, 1, [None]),
        (1, 3, [None, None, None]),
        (0, 2, [None, None]),
    ],
)
def test_replicas_take_nodes_in_turn(num_nodes: int, num_replicas: int, expected: list[object]) -> None:
    found = places(nodes_of(*map(str, range(num_nodes))), num_replicas)
    assert [place and ([node.number for node in place.nodes], place.num_sharing) for place in found] == expected


def test_replicas_share_the_memory_of_their_nodes() -> None:
    one, two = nodes_of("0", "1 2")
    assert (Place((one, two)).num_bytes, Place((two,), num_sharing=2).num_bytes) == (3 * GIB, GIB)
    assert Place((one, two)).cores == {0, 1, 2}


_SHOW = """
import ctypes, os, threading
with open(f"/proc/{os.getpid()}/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("Cpus_allowed_list")))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone pins processes to cores")
def test_a_process_started_inside_has_the_places_cores_and_this_one_gets_its_own_back() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with bound_to(Place((MemoryNode(0, frozenset({core}), GIB),))):
        inside = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, text=True, check=True).stdout
    assert inside.strip() == str(core)
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone pins processes to cores")
def test_cores_that_are_not_there_bind_nothing() -> None:
    before = os.sched_getaffinity(0)
    with bound_to(Place((MemoryNode(0, frozenset({9999}), GIB),))):
        assert os.sched_getaffinity(0) == before
    with bound_to(None):
        assert os.sched_getaffinity(0) == before
