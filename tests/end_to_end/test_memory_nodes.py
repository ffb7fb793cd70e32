"""A server on a simulated machine of two memory nodes with one core each: the cores are real."""

import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.helpers.replica_kills import engine_processes
from tests.end_to_end.helpers.toka_process import free_port, starting_toka
from tests.helpers.tiny_model import save_tiny_model
from tests.monitoring.helpers.machines import Machine, write_machine

_ON_MACHINE = """
import sys
from functools import partial
from pathlib import Path
from tokasaurus.cli import main
from tokasaurus.processes import launch

launch.place_replicas = partial(launch.place_replicas, root=Path({root!r}))
sys.exit(main())
"""


def cores_of_threads(pid: int) -> set[str]:
    """What each thread may run on, as the system lists it."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return {status.partition("Cpus_allowed_list:")[2].split()[0] for status in statuses}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of memory nodes")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each node")
def test_every_thread_of_a_replica_stays_at_its_node(tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    write_machine(tmp_path, Machine(nodes={0: (str(first), 8), 1: (str(second), 8)}))
    save_tiny_model(tmp_path / "model", "llama")
    flags = (f"model={tmp_path / 'model'}", "device=cpu", "log_level=debug", "max_tokens_per_forward=64")
    with starting_toka(free_port(), *flags, program=("-c", _ON_MACHINE.format(root=str(tmp_path)))) as toka:
        toka.wait_until_ready()
        note = f"2 replicas, one for each memory node (cores {first}, {second})"
        assert any(note in line for line in toka.lines), toka.lines
        assert sum("device" in line and "1 threads" in line for line in toka.lines) == 2, toka.lines
        engine = engine_processes(toka)
        found = {process.name(): cores_of_threads(process.pid) for process in engine}
        assert min(process.num_threads() for process in engine) > 1
        assert found == {
            **{"toka-worker0-0": {str(first)}, "toka-manager0": {str(first)}},
            **{"toka-worker1-0": {str(second)}, "toka-manager1": {str(second)}},
        }
        for process in engine:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "model.safetensors" not in maps, "weights are the replica's own, not the pages of a file"
        assert os.sched_getaffinity(toka.process.pid) == os.sched_getaffinity(0), "the launcher stays free"
        assert toka.stop() == 0
