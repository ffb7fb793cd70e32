"""The processes of one replica, with stub entries in real processes."""

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import FileState, UpdateWeights
from tokasaurus.messages.status import PhaseDone
from tokasaurus.processes.group import ProcessGroup
from tokasaurus.processes.replica import ReplicaProcesses, WeightHistory

STUBS = "tests.processes.helpers.launch_stubs"


def test_the_workers_of_all_replicas_have_consecutive_indices() -> None:
    config = ServerConfig.parse([])
    config.pp_size, config.tp_size = 1, 2
    checkpoint: Checkpoint | None = None  # the stubs read none
    indices = []
    with ProcessGroup() as group:
        for replica_index in range(2):
            replica = ReplicaProcesses(
                *(replica_index, group, config, checkpoint),
                *(f"{STUBS}:run_manager", f"{STUBS}:run_worker_that_reports_its_index", WeightHistory()),
            )
            replica.start()
            for worker in replica.children[:2]:
                message = worker.status.receive(timeout_s=60)
                while not (isinstance(message, PhaseDone) and message.phase == "index"):
                    message = worker.status.receive(timeout_s=60)
                indices.append(int(message.detail))
    assert indices == [0, 1, 2, 3]


def test_replicas_get_the_last_whole_update_and_the_parts_since() -> None:
    def update(number: int, is_partial: bool) -> UpdateWeights:
        return UpdateWeights(number, f"step-{number // 10}", str(number // 10), is_partial, number=number // 10)

    history = WeightHistory()
    for number, is_partial in ((10, False), (20, True), (21, True), (30, False), (31, False), (40, True), (50, True)):
        history.note(update(number, is_partial))  # the second digit: of another replica
    assert [one.version for one in history.updates] == ["3", "4", "5"]
    assert [one.command_id for one in history.updates] == [0, 0, 0]


def test_a_replica_that_tells_late_of_earlier_weights_does_not_bring_them_back() -> None:
    history = WeightHistory()
    for number in (1, 2, 1):
        history.note(UpdateWeights(0, "step", "same name", number=number))
    assert [one.number for one in history.updates] == [2]


def test_parts_that_a_later_part_of_the_same_files_replaces_are_not_kept() -> None:
    def part(number: int, directory: str, header: str) -> UpdateWeights:
        files = (FileState("a.safetensors", header, number),)
        return UpdateWeights(0, directory, "1", is_partial=True, number=number, files=files)

    history = WeightHistory()
    history.note(UpdateWeights(0, "all", "1", number=1))
    for number, case in enumerate((("a", "x"), ("b", "x"), ("a", "x"), ("b", "y"), ("a", "x")), start=2):
        history.note(part(number, *case))
    assert [one.number for one in history.updates] == [1, 3, 5, 6]
