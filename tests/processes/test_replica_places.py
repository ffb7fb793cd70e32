"""How many replicas a simulated machine gets, where they stay, and processes that really stay there."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.tiny_model import save_tiny_model
from tests.monitoring.helpers.machines import Machine, write_machine
from tokasaurus.checkpoint import Checkpoint, resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.cuda_devices import CudaDevices
from tokasaurus.monitoring.memory_nodes import show_cores
from tokasaurus.processes import replica_places
from tokasaurus.processes.replica_places import place_replicas

TWO = Machine(nodes={0: ("0-3", 8), 1: ("4-7", 8)})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_tiny_model(tmp_path / "model", "llama")
    return resolve_checkpoint(str(tmp_path / "model"))


@pytest.fixture
def placed(tmp_path: Path, checkpoint: Checkpoint) -> Callable[..., tuple[list[str | None], str]]:
    """Flags, and what the machine is -> each replica's cores, and the line for the user."""

    def place(words: str, machine: Machine, **changes: int) -> tuple[list[str | None], str]:
        write_machine(tmp_path, machine)
        changed = replace(checkpoint, info=replace(checkpoint.info, **changes))
        config = ServerConfig.parse(["device=cpu", *words.split()])
        found = place_replicas(config, changed, None, root=tmp_path)
        return [None if place is None else show_cores(place.cores) for place in found.places], found.note

    return place


def test_a_machine_with_several_nodes_gets_a_replica_on_each(placed) -> None:
    assert placed("", TWO) == (["0-3", "4-7"], "2 replicas, one for each memory node (cores 0-3, 4-7)")
    assert placed("dp_size=auto max_seqs_per_forward=8", TWO)[0] == ["0-3", "4-7"]
    four = Machine(nodes={number: (f"{number},{number + 4}", 8) for number in range(4)})
    assert placed("", four)[1] == "4 replicas, one for each memory node (cores 0+4, 1+5, 2+6, 3+7)"


@pytest.mark.parametrize("machine", [Machine(nodes={}), Machine(nodes={0: ("0-7", 16)}), replace(TWO, cores="0-3")])
def test_one_node_changes_nothing(placed, machine: Machine) -> None:
    for words, number in (("", 1), ("dp_size=1", 1), ("dp_size=3", 3), ("tp_size=2", 1)):
        assert placed(words, machine) == ([None] * number, "")


def test_a_number_stays_what_it_is(placed) -> None:
    assert placed("dp_size=1", TWO) == ([None], "1 replica over 2 memory nodes")
    over = "3 replicas, over 2 memory nodes (cores 0-3, 4-7, 0-3)"
    assert placed("dp_size=3", TWO) == (["0-3", "4-7", "0-3"], over)
    assert placed("dp_size=2 tp_size=2", TWO, context_length=1 << 40)[0] == ["0-3", "4-7"], "fit or not"


@pytest.mark.parametrize(
    ("words", "machine", "changes", "why"),
    [
        ("tp_size=2", TWO, {}, "tp_size= or pp_size= divides the model"),
        ("pp_size=2", TWO, {}, "tp_size= or pp_size= divides the model"),
        ("", replace(TWO, cores="0-3,7"), {}, "one has 1 of the cores that may be used, and another 4"),
        (
            "",
            TWO,
            {"context_length": 1 << 30},
            "a replica needs .* GiB, and 1536 GiB with which .* 1,073,741,824 tokens, but",
        ),
        ("kv_cache_num_tokens=1G", TWO, {}, "a replica needs .* holds 1,073,741,824 tokens, but has only .* GiB"),
    ],
)
def test_one_line_says_why_there_is_one_replica_for_several_nodes(
    placed, words: str, machine: Machine, changes: dict[str, int], why: str
) -> None:
    places, note = placed(words, machine, **changes)
    assert places == [None]
    assert re.fullmatch(f"1 replica over 2 memory nodes, since {why}.*; dp_size=2 starts one on each", note), note


def test_the_memory_and_the_cores_of_a_container_count(placed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{1 << 40}\n",
        "sys/fs/cgroup/memory.current": f"{(1 << 40) - (1 << 20)}\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert "but has only 512 KiB" in placed("", TWO)[1]
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("400000 100000\n")
    assert "since the CPU quota of 4 cores is no more than one has" in placed("", TWO)[1]
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("500000 100000\n")
    assert placed("", TWO)[0] == ["0-3", "4-7"]
    monkeypatch.setattr(replica_places, "has_memory_policy", lambda: True)
    assert "started with a policy for its memory, as by numactl" in placed("", TWO)[1]


def test_gpus_have_one_replica(tmp_path: Path, checkpoint: Checkpoint) -> None:
    write_machine(tmp_path, TWO)
    for words, found in (([], CudaDevices(8, 1 << 36)), ([], None), (["device=cuda"], CudaDevices(8, 1 << 36))):
        assert place_replicas(ServerConfig.parse(words), checkpoint, found, root=tmp_path).places == [None]
    assert len(place_replicas(ServerConfig(), checkpoint, CudaDevices(0, 0), root=tmp_path).places) == 2
