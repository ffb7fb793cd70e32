"""Handing a replica's channels to a process that runs already."""

import multiprocessing
import os
import signal
import socket

import pytest

from tokasaurus.messages.channel import (
    ChannelClosed,
    ReplicaConnection,
    make_channel,
    receive_connection,
    send_connection,
    wait,
)
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.messages.status import Ready


def serve_two_connections(launcher: socket.socket) -> None:
    launcher.setblocking(False)
    for _ in range(2):
        wait([launcher], 60)
        accepted = receive_connection(launcher)
        assert accepted is not None
        replica, connection = accepted
        assert isinstance(connection.updates.receive(60), Ready)
        connection.requests.send(CancelRequest(f"from {replica}"))
    connection.updates.receive(60)


def test_a_running_process_receives_connections_that_end_with_it() -> None:
    launcher_end, server_end = socket.socketpair()
    server = multiprocessing.get_context("spawn").Process(target=serve_two_connections, args=(server_end,))
    server.start()
    server_end.close()
    managers = []
    for replica in (7, 200):
        requests_in, requests = make_channel()
        updates, updates_out = make_channel()
        send_connection(launcher_end, replica, ReplicaConnection(requests, updates))
        updates_out.send(Ready("manager"))
        assert requests_in.receive(60) == CancelRequest(f"from {replica}")
        managers.append((requests_in, updates_out))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.join(60)
    for requests_in, _ in managers:
        with pytest.raises(ChannelClosed):
            requests_in.receive(60)


def test_without_a_connection_there_is_none_and_without_a_launcher_an_error() -> None:
    launcher_end, server_end = socket.socketpair()
    server_end.setblocking(False)
    assert receive_connection(server_end) is None
    launcher_end.close()
    with pytest.raises(ChannelClosed):
        receive_connection(server_end)
