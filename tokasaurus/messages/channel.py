"""One-way typed channels between processes: pipes with one writing and one reading process, and one wait over many.

The channel ends when its writing end is closed, also by the death of the process. Neither end ever blocks on the other.

The launcher makes the channels between the server and each manager, and hands both their ends: also new ones when
either of them is started again. File descriptors reach a running process only over a Unix socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

if TYPE_CHECKING:  # these import NumPy, which would delay the launcher
    from tokasaurus.messages.commands import EngineCommand
    from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest
    from tokasaurus.messages.live import JobsLeft, LiveSample, TakeSample
    from tokasaurus.messages.status import Ready


Message = TypeVar("Message")

PIPE_BYTES = 1 << 20
"""Pipe capacity of a channel, in bytes. The system's default fits only 28 prompts of 500 tokens, or one step
of 8,000 sequences; a reader that drains the pipe once per step would receive no more than that at a time."""

MAX_DRAIN_BYTES = 8 << 20
"""Most bytes that one `drain` reads, so that a large message does not hold up the reader's other work."""

_LENGTH = struct.Struct("<Q")
"""Each message is its pickle, after the pickle's length in bytes."""

_END_POLL_S = 0.05
"""Interval at which `flush` looks whether all has been written, in seconds."""


class ChannelClosed(EOFError):
    """The channel's writing end is closed, and every whole message has been received."""


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Sender(Generic[Message]):
    """The writing end. Messages are frozen dataclasses. Thread-safe.

    It can be passed to a process when that is spawned. Then it belongs to that process: close this process's copy.
    """

    def __init__(self, connection: Connection) -> None:
        self.__setstate__(connection)

    def __getstate__(self) -> Connection:
        return self._connection

    def __setstate__(self, connection: Connection) -> None:
        self._connection = connection
        self._unwritten: deque[memoryview] = deque()
        self._lock = threading.Condition()
        self._writer: threading.Thread | None = None
        os.set_blocking(connection.fileno(), False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Never blocks: what does not fit into the pipe is written by a thread. Nothing happens if nobody reads."""
        self._send_bytes(_framed(message))

    def send_many(self, messages: Iterable[Message]) -> None:
        """Send each message, in order, with fewer system calls than single `send` calls."""
        self._send_bytes(b"".join(map(_framed, messages)))

    def _send_bytes(self, framed: bytes) -> None:
        with self._lock:
            if self._connection.closed:
                return
            self._unwritten.append(memoryview(framed))
            if len(self._unwritten) > 1 or self._write():
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_rest, name="channel", daemon=True)
                self._writer.start()
            self._lock.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages are written, but at most `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._unwritten and time.monotonic() < deadline_s:
                self._lock.wait(_END_POLL_S)

    def close(self) -> None:
        """End the channel. Messages that are not written yet are lost."""
        with self._lock:
            self._unwritten.clear()
            self._connection.close()
            self._lock.notify_all()

    def _write(self) -> bool:
        """Write what fits into the pipe; whether that was all. The caller holds the lock."""
        while self._unwritten:
            first = self._unwritten[0]
            try:
                num_written = os.write(self._connection.fileno(), first)
            except BlockingIOError:
                return False
            except BrokenPipeError:  # the reading process has ended
                self._unwritten.clear()
                return True
            if num_written == len(first):
                self._unwritten.popleft()
            else:
                self._unwritten[0] = first[num_written:]
        return True

    def _write_rest(self) -> None:
        """Thread: write what `send` could not, for as long as the channel is open."""
        poll = select.poll()
        with self._lock:
            if self._connection.closed:
                return
            poll.register(self._connection.fileno(), select.POLLOUT)
        while True:
            with self._lock:
                while not self._unwritten and not self._connection.closed:
                    self._lock.wait()
                if self._connection.closed:
                    return
            poll.poll(1000 * _END_POLL_S)
            with self._lock:
                if not self._connection.closed:
                    self._write()


class Receiver(Generic[Message]):
    """The reading end. It can be passed to a process when that is spawned, as a Sender can."""

    def __init__(self, connection: Connection) -> None:
        self.__setstate__(connection)

    def __getstate__(self) -> Connection:
        return self._connection

    def __setstate__(self, connection: Connection) -> None:
        self._connection = connection
        self._unread = bytearray()
        self._num_taken = 0  # bytes at the start of `_unread` whose messages have been returned
        self.is_closed = False
        """The writing end is closed. The message that was being written then, if any, is lost."""
        os.set_blocking(connection.fileno(), False)

    def fileno(self) -> int:
        """The descriptor for `wait` or an event loop's `add_reader`: readable when a message, or a part of one, has
        arrived."""
        return self._connection.fileno()

    @property
    def has_whole_message(self) -> bool:
        """Whether `drain` would return a message without reading any further."""
        return self._whole_length() is not None

    def drain(self, max_messages: int = sys.maxsize) -> list[Message]:
        """Messages received so far, oldest first; never blocks, not even on a half-written message.

        Not all of them if there are more than `max_messages`, or MAX_DRAIN_BYTES: see `has_whole_message`.
        """
        if not self.has_whole_message:
            self._read()
        messages: list[Message] = []
        while len(messages) < max_messages and (message := self._take()) is not None:
            messages.append(message)
        return messages

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError after `timeout_s` seconds without one, and ChannelClosed."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._take()) is None:
            if self.is_closed:
                raise ChannelClosed
            if not wait([self], None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            self._read()
        return message

    def close(self) -> None:
        self.is_closed = True
        self._connection.close()

    def _read(self) -> None:
        """Read what the pipe has, but not much more than MAX_DRAIN_BYTES."""
        if self._num_taken:
            del self._unread[: self._num_taken]
            self._num_taken = 0
        num_read = 0
        while not self.is_closed and num_read < MAX_DRAIN_BYTES:
            try:
                content = os.read(self._connection.fileno(), PIPE_BYTES)
            except BlockingIOError:
                break
            num_read += len(content)
            self._unread += content
            self.is_closed = not content

    def _whole_length(self) -> int | None:
        """Bytes of the next message, if all of it has been read."""
        start = self._num_taken + _LENGTH.size
        if start > len(self._unread):
            return None
        length: int
        (length,) = _LENGTH.unpack_from(self._unread, self._num_taken)
        return length if start + length <= len(self._unread) else None

    def _take(self) -> Message | None:
        """Remove and return the next message; None if it has not been read as a whole."""
        length = self._whole_length()
        if length is None:
            return None
        start = self._num_taken + _LENGTH.size
        self._num_taken = start + length
        with memoryview(self._unread) as unread, unread[start : self._num_taken] as pickled:
            return cast(Message, pickle.loads(pickled))


def send_to_all(senders: Sequence[Sender[Message]], message: Message) -> None:
    """`Sender.send` on each of `senders`, but pickle the message only once."""
    framed = _framed(message)
    for sender in senders:
        sender._send_bytes(framed)


def _framed(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def make_channel() -> tuple[Receiver[Message], Sender[Message]]:
    """A new channel. Each end belongs into one process; the channel ends when no process has the Sender any more."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the user's pipe memory limit is reached
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return Receiver(reader), Sender(writer)


def wait(waitables: Sequence[HasFileno | int], timeout_s: float | None = None) -> list[HasFileno | int]:
    """The receivers, descriptors and process sentinels that are ready; empty after `timeout_s` seconds."""
    return cast("list[HasFileno | int]", multiprocessing.connection.wait(waitables, timeout_s))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ReplicaConnection:
    """The server's ends of the channels between the server and one manager."""

    requests: Sender[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand]
    updates: Receiver[EngineUpdate | LiveSample | Ready]
    """Its end says that the replica has died."""

    def close(self) -> None:
        self.requests.close()
        self.updates.close()


@dataclass(frozen=True, slots=True)
class ServerConnection:
    """The manager's ends of the same channels."""

    requests: Receiver[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand]
    """Its end says that the server has died."""
    updates: Sender[EngineUpdate | LiveSample | Ready]

    def close(self) -> None:
        self.requests.close()
        self.updates.close()


def make_connection() -> tuple[ReplicaConnection, ServerConnection]:
    """New channels between the server and a manager."""
    requests: tuple[
        Receiver[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand],
        Sender[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand],
    ] = make_channel()
    updates: tuple[Receiver[EngineUpdate | LiveSample | Ready], Sender[EngineUpdate | LiveSample | Ready]] = (
        make_channel()
    )
    return ReplicaConnection(requests[1], updates[0]), ServerConnection(requests[0], updates[1])


def send_connection(process: socket.socket, replica: int, connection: ReplicaConnection | ServerConnection) -> None:
    """Hand the connection of `replica` to the server, or to its manager, and close this process's copies.

    process: the launcher's end of a stream socket pair. Raises OSError if the process has ended.
    """
    socket.send_fds(process, [bytes([replica])], [connection.requests.fileno(), connection.updates.fileno()])
    connection.close()


def receive_connection(launcher: socket.socket) -> tuple[int, ReplicaConnection] | None:
    """For the server: the next replica and its connection; None if nothing has arrived.

    launcher: a socket that does not block. Raises ChannelClosed if the launcher has closed its end, and OSError if this
    process may not open more files.
    """
    if (received := _receive_descriptors(launcher)) is None:
        return None
    replica, requests, updates = received
    return replica, ReplicaConnection(
        Sender(Connection(requests, readable=False)), Receiver(Connection(updates, writable=False))
    )


def receive_server(launcher: socket.socket) -> ServerConnection | None:
    """For a manager: the next connection, as `receive_connection`."""
    if (received := _receive_descriptors(launcher)) is None:
        return None
    _, requests, updates = received
    return ServerConnection(Receiver(Connection(requests, writable=False)), Sender(Connection(updates, readable=False)))


def _receive_descriptors(launcher: socket.socket) -> tuple[int, int, int] | None:
    """The replica, and the descriptors of its channels of requests and of updates."""
    try:
        content, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
    except BlockingIOError:
        return None
    if not content:
        raise ChannelClosed
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "too many open files to take over the channels between server and engine")
    requests, updates = descriptors
    return content[0], requests, updates
