"""Files with which Linux describes a machine's memory nodes, of simulated machines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What the files say."""

    nodes: Mapping[int, tuple[str, int]]
    """Number -> list of its cores, and its GiB."""
    cores: str = "0-1023"
    """Cores that the process may run on."""
    memory: str = "0-63"
    """Nodes whose memory it may use."""
    far: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Distances of nodes, where they are not 10 of a node to itself and 20 between others."""


def write_machine(root: Path, machine: Machine) -> None:
    """Write /proc and /sys below `root`."""
    files = {
        "proc/self/status": f"Name:\ttoka\nCpus_allowed:\tf\nCpus_allowed_list:\t{machine.cores}\n"
        f"Mems_allowed:\t1\nMems_allowed_list:\t{machine.memory}\nvoluntary_ctxt_switches:\t1\n",
        "sys/devices/system/node/online": "0\n",
    }
    for number, (cores, num_gib) in machine.nodes.items():
        distances = (machine.far.get((number, other), 10 if other == number else 20) for other in sorted(machine.nodes))
        directory = f"sys/devices/system/node/node{number}"
        total = f"Node {number} MemTotal:       {num_gib << 20} kB\n"
        files |= {
            f"{directory}/cpulist": f"{cores}\n",
            f"{directory}/meminfo": f"{total}Node {number} MemFree:        {num_gib << 19} kB\n",
            f"{directory}/distance": " ".join(map(str, distances)) + "\n",
        }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
