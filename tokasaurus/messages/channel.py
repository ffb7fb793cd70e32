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
"""Pipe capacity of a channel, in bytes. The system's default fits only 28 prompts of 500 tokens, or one step
of 8,000 sequences; a reader that drains the pipe once per step would receive no more than that at a time."""


class Channel(Generic[Message]):
    """A multiprocessing queue of frozen dataclasses. The parent creates it and passes it to both ends at spawn.

    Create new channels for each start of a replica: a queue whose reader was killed may stay locked forever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._queue = context.Queue()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the user's pipe memory limit is reached
                fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def reader(self) -> Connection:
        """For `wait` or an event loop's `add_reader`: readable when a message is waiting."""
        return cast(Connection, self._queue._reader)  # type: ignore[attr-defined]

    def send(self, message: Message) -> None:
        """Never blocks: the queue's own thread writes to the pipe."""
        self._queue.put(message)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError after `timeout_s` seconds without one."""
        try:
            return cast(Message, self._queue.get(timeout=timeout_s))
        except queue.Empty:
            raise TimeoutError from None

    def drain(self, max_messages: int = sys.maxsize) -> list[Message]:
        """All messages received so far, oldest first, but at most `max_messages`; never blocks."""
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            while len(messages) < max_messages:
                messages.append(self._queue.get_nowait())
        return messages

    def abandon(self) -> None:
        """Let this process exit without delivering unsent messages: the reader may be dead."""
        self._queue.cancel_join_thread()

    def close(self, timeout_s: float) -> None:
        """Send nothing more: end the queue's thread once it has written all unsent messages, or after `timeout_s`.

        Otherwise the end of the process may stop that thread while it releases the queue's locks.
        """
        self._queue.close()
        thread = self._queue._thread  # type: ignore[attr-defined]
        if thread is not None:
            thread.join(timeout_s)


def wait(waitables: Sequence[Connection | int], timeout_s: float | None = None) -> list[Connection | int]:
    """The channel readers and process sentinels that are ready; empty after `timeout_s` seconds."""
    return cast("list[Connection | int]", multiprocessing.connection.wait(waitables, timeout_s))
