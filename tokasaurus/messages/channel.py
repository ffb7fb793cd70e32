"""One-way typed channels between processes, and one wait over channels and process deaths."""

import contextlib
import fcntl
import multiprocessing.connection
import queue
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Generic, TypeVar, cast

Message = TypeVar("Message")

PIPE_BYTES = 1 << 20
"""What a channel holds between two processes; the system's 64 KiB are 28 prompts of 500 tokens, or a step of 8,000
sequences, and a reader that comes by once a turn would find no more than that."""


class Channel(Generic[Message]):
    """A multiprocessing queue of frozen dataclasses. Made by the parent, given to both ends when they are spawned.

    Make new channels for each start of a replica: a queue whose reader was killed may stay locked for ever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._queue = context.Queue()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # where the user's share of pipe memory is used up
                fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def reader(self) -> Connection:
        """For `wait`, or an event loop's `add_reader`: readable when a message is there."""
        return cast(Connection, self._queue._reader)  # type: ignore[attr-defined]

    def send(self, message: Message) -> None:
        """Never blocks: a thread of the queue writes to the pipe."""
        self._queue.put(message)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError."""
        try:
            return cast(Message, self._queue.get(timeout=timeout_s))
        except queue.Empty:
            raise TimeoutError from None

    def drain(self) -> list[Message]:
        """All messages that are there now, oldest first, without waiting."""
        messages: list[Message] = []
        while True:
            try:
                messages.append(self._queue.get_nowait())
            except queue.Empty:
                return messages

    def abandon(self) -> None:
        """Let this process exit without delivering what is unsent: the reader may be dead."""
        self._queue.cancel_join_thread()

    def close(self, timeout_s: float) -> None:
        """Send no more from this process: end the queue's thread, after it has written what is unsent or `timeout_s`.

        Else that thread may be the last to hold the queue's locks, and be stopped by the end of the process halfway
        through freeing them.
        """
        self._queue.close()
        thread = self._queue._thread  # type: ignore[attr-defined]
        if thread is not None:
            thread.join(timeout_s)


def wait(waitables: Sequence[Connection | int], timeout_s: float | None = None) -> list[Connection | int]:
    """Those of channel readers and process sentinels that are ready; empty after `timeout_s`."""
    return cast("list[Connection | int]", multiprocessing.connection.wait(waitables, timeout_s))
