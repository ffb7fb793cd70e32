"""The server's ends of the channels to one replica's manager, and how the launcher hands them to the server.

A replica that is started again has new channels. File descriptors reach a running process only over a Unix socket.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tokasaurus.messages.channel import ChannelClosed, Receiver, Sender

if TYPE_CHECKING:  # these import NumPy, which would delay the launcher
    from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest
    from tokasaurus.messages.lifecycle import Ready


@dataclass(frozen=True, slots=True)
class ReplicaConnection:
    """The channels between the server and one manager."""

    requests: Sender[GenerateRequest | CancelRequest]
    updates: Receiver[EngineUpdate | Ready]
    """Its end says that the replica has died."""

    def close(self) -> None:
        self.requests.close()
        self.updates.close()


def send_connection(server: socket.socket, replica: int, connection: ReplicaConnection) -> None:
    """Hand the connection of `replica` to the server, and close this process's copies.

    server: the launcher's end of a stream socket pair. Raises OSError if the server has ended.
    """
    socket.send_fds(server, [bytes([replica])], [connection.requests.fileno(), connection.updates.fileno()])
    connection.close()


def receive_connection(launcher: socket.socket) -> tuple[int, ReplicaConnection] | None:
    """The next replica and its connection; None if nothing has arrived.

    launcher: a socket that does not block. Raises ChannelClosed if the launcher has ended, and OSError if this process
    may not open more files.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
    except BlockingIOError:
        return None
    if not content:
        raise ChannelClosed
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "too many open files to take over the channels of the engine")
    requests, updates = descriptors
    connection = ReplicaConnection(
        Sender(Connection(requests, readable=False)), Receiver(Connection(updates, writable=False))
    )
    return content[0], connection
