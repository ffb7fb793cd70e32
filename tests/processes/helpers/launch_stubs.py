"""Process entries without a model, for test_launch: they only start, wait and end as the real entries do."""

# ruff: noqa: ARG001  # the signatures match the real entries

import contextlib
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

from tokasaurus.messages.channel import (
    ChannelClosed,
    Receiver,
    Sender,
    make_channel,
    receive_connection,
    receive_server,
    wait,
)
from tokasaurus.messages.status import Alive, EngineLimits, FlagRefused, PhaseDone, PhaseProgress, Ready, UserError

_READY = Ready("worker", EngineLimits(num_kv_blocks=100, page_size=16, max_tokens_per_sequence=64))


@dataclass
class _Given:
    """What a worker's entry is called with."""

    config: Any
    checkpoint: Any
    index: int
    place: Any
    rendezvous: Any
    inputs: Receiver[Any]
    outputs: Sender[Any]
    stages: Any
    status: Sender[Any]


def run_server(
    config: Any,
    checkpoint: Any,
    listener: socket.socket,
    launcher: socket.socket,
    predecessors: Any,
    status: Sender[Any],
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener.listen()
    received = receive_connection(launcher)
    assert received is not None
    with contextlib.suppress(ChannelClosed):  # the engine may die while it starts
        received[1].updates.receive()
    status.send(Ready("server"))
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the client may be gone
            connection.sendall(checkpoint.name.encode())


def run_manager(
    config: Any,
    checkpoint: Any,
    index: int,
    launcher: socket.socket,
    inputs: list[Sender[Any]],
    outputs: Receiver[Any],
    stages: Any,
    status: Sender[Any],
) -> None:
    launcher.setblocking(False)
    servers = []
    with contextlib.suppress(ChannelClosed):
        limits = outputs.receive()
        status.send(Ready("manager", limits.limits))
        for worker in inputs:
            worker.send("ready")
        while True:
            status.send(Alive())
            wait([launcher], 0.5)
            if (server := receive_server(launcher)) is not None:
                servers.append(server)
                server.updates.send(limits)


def wait_for_end(inputs: Receiver[Any]) -> None:
    """Until the manager has ended."""
    with contextlib.suppress(ChannelClosed):
        while True:
            inputs.receive()


def run_worker(*given: Any) -> None:
    worker = _Given(*given)
    worker.status.send(PhaseDone("worker", "load weights", 1.25, "7 of [7] layers"))
    worker.outputs.send(_READY)
    worker.status.send(_READY)
    wait_for_end(worker.inputs)


def run_worker_that_reports_its_index(*given: Any) -> None:
    worker = _Given(*given)
    worker.status.send(PhaseDone("worker", "index", 0.0, str(worker.index)))
    wait_for_end(worker.inputs)


def run_worker_that_raises(*_given: Any) -> None:
    raise RuntimeError("tensor broke\nsecond line")


def run_worker_with_user_error(*_given: Any) -> None:
    # A full pipe that nobody reads must not keep a failing process alive.
    channel: tuple[Receiver[bytes], Sender[bytes]] = make_channel()
    _unread, sender = channel
    for _ in range(100):
        sender.send(bytes(100_000))
    raise UserError("kv_cache_num_tokens=7 does not fit")


def run_worker_that_refuses_a_flag(*_given: Any) -> None:
    raise FlagRefused("device=cuda: there is none")


def run_worker_that_is_killed(*_given: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_worker_that_returns(*_given: Any) -> None:
    pass


def run_worker_that_returns_in_replica_1(*given: Any) -> None:
    worker = _Given(*given)
    worker.outputs.send(_READY)
    worker.status.send(_READY)
    worker.inputs.receive()  # the manager is ready, and the launcher has been told
    if worker.index == 0:
        wait_for_end(worker.inputs)


def run_worker_that_never_starts(*given: Any) -> None:
    worker = _Given(*given)
    worker.status.send(PhaseDone("worker", "stuck", 0.0))
    threading.Event().wait()


def run_worker_that_loads_for_ever(*given: Any) -> None:
    worker = _Given(*given)
    worker.status.send(PhaseDone("worker", "device", 0.5, "a detail of many words " * 9))
    worker.status.send(PhaseProgress("worker", "weights", 30_000_000, 120_000_000, "bytes"))
    threading.Event().wait()


def run_worker_that_will_not_end(*given: Any) -> None:
    worker = _Given(*given)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker.outputs.send(_READY)
    worker.status.send(_READY)
    threading.Event().wait()


def run_worker_that_returns_after_ready(*given: Any) -> None:
    worker = _Given(*given)
    worker.outputs.send(_READY)
    worker.inputs.receive()  # the manager is ready, and the launcher has been told
