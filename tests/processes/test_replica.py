"""The processes of one replica, with stub entries in real processes; when a dead one is started again."""

import socket

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import PhaseDone
from tokasaurus.processes.group import ProcessGroup
from tokasaurus.processes.replica import HEALTHY_SECONDS, MAX_PAUSE_SECONDS, ReplicaProcesses, RestartPolicy

STUBS = "tests.processes.helpers.launch_stubs"


def test_the_workers_of_all_replicas_have_consecutive_indices() -> None:
    config = ServerConfig.parse([])
    config.pp_size, config.tp_size = 1, 2
    checkpoint: Checkpoint | None = None  # the stubs read none
    indices = []
    ours, servers = socket.socketpair()
    with ours, servers, ProcessGroup() as group:
        for replica_index in range(2):
            replica = ReplicaProcesses(
                *(replica_index, group, config, checkpoint),
                *(f"{STUBS}:run_manager", f"{STUBS}:run_worker_that_reports_its_index", ours),
            )
            replica.start()
            for worker in replica.children[:2]:
                message = worker.status.receive(timeout_s=60)
                while not (isinstance(message, PhaseDone) and message.phase == "index"):
                    message = worker.status.receive(timeout_s=60)
                indices.append(int(message.detail))
    assert indices == [0, 1, 2, 3]


def test_pauses_grow_until_restarts_end() -> None:
    policy = RestartPolicy(max_restarts=8)
    assert [policy.note_failure(float(n)) for n in range(9)] == [0, 1, 2, 4, 8, 16, 30, MAX_PAUSE_SECONDS, None]


def test_a_healthy_time_forgets_earlier_failures() -> None:
    policy = RestartPolicy(max_restarts=2)
    now_s = 100.0
    for _ in range(10):
        assert policy.note_failure(now_s) == 0
        policy.note_ready(now_s + 5)
        now_s += 5 + HEALTHY_SECONDS


def test_a_short_time_between_start_and_failure_forgets_nothing() -> None:
    policy = RestartPolicy(max_restarts=2)
    pauses = []
    for n in range(3):
        pauses.append(policy.note_failure(100.0 * n))
        policy.note_ready(100.0 * n + 100 - 0.9 * HEALTHY_SECONDS)
    assert pauses == [0, 1, None]


def test_without_restarts_the_first_failure_is_final() -> None:
    assert RestartPolicy(max_restarts=0).note_failure(1.0) is None
