"""The processes of one replica, with stub entries in real processes."""

import socket

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.lifecycle import PhaseDone
from tokasaurus.process_group import ProcessGroup
from tokasaurus.replica_processes import ReplicaProcesses

STUBS = "tests.helpers.launch_stubs"


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
