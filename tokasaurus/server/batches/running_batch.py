"""A batch whose lines run."""

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import BinaryIO

from tokasaurus.server.batches.store.records import BatchRecord, PendingLine

MAX_ATTEMPTS = 12
"""Starts of a line before it fails because the engine or the server never survived it."""

# A line that makes the server die must not do so for ever, and must not make lines beside it fail. So each death lets
# fewer of the lines that were running at it run together, until one of them is alone.
_MOST_TOGETHER = (None, None, None, 1024, 256, 64, 16, 4)
"""By attempts; one line beyond."""


def most_together(attempts: int) -> int | None:
    """Lines of a batch that may run beside a line that was started so often, with it; None: any number."""
    return _MOST_TOGETHER[attempts] if attempts < len(_MOST_TOGETHER) else 1


@dataclass(slots=True)
class LineSize:
    """What a line in the engine takes."""

    number: int
    num_sequences: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch in progress. Its lines are started in order."""

    record: BatchRecord
    content: BinaryIO
    """The input file."""
    first: int = 0
    """Lines before it do not wait, or are in `ahead`."""
    ahead: deque[tuple[PendingLine, bytes | None]] = field(default_factory=deque)
    """Lines that wait, with their content; None if it cannot be read."""
    released: list[tuple[int, bool]] = field(default_factory=list)
    """(number, whether the attempt counts) of lines that have to wait again, which the ledger does not know yet."""
    tasks: dict[asyncio.Task[None], LineSize] = field(default_factory=dict)
    """Lines that run: in the engine, or with a result that is not stored yet."""
    num_sequences: int = 0
    """Of the lines in the engine."""
    num_bytes: int = 0
    """Of the lines in the engine."""
    is_exhausted: bool = False
    """No line waits."""
    is_stopping: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no line waits or runs."""

    @property
    def client(self) -> str:
        """Its name in the engine's queue, which serves the batches by turns."""
        return f"batch:{self.record.id}"

    @property
    def is_done(self) -> bool:
        """No line waits or runs."""
        return self.is_exhausted and not self.tasks and not self.released

    def may_start(self, line: PendingLine, num_others: int) -> bool:
        """Whether the line may run beside those that run, and `num_others` that are about to."""
        most = most_together(line.attempts)
        return most is None or len(self.tasks) + num_others < most

    def read(self, line: PendingLine) -> bytes | None:
        """The line's content; None if it cannot be read. Blocks."""
        try:
            content = os.pread(self.content.fileno(), line.size, line.start)
        except OSError:
            return None
        return content if len(content) == line.size else None

    def add(self, task: "asyncio.Task[None]", size: LineSize) -> None:
        self.tasks[task] = size
        self.num_sequences += size.num_sequences
        self.num_bytes += size.num_bytes

    def leave_engine(self, task: "asyncio.Task[None]") -> None:
        """The line has its result: others may take its share."""
        size = self.tasks[task]
        self.num_sequences -= size.num_sequences
        self.num_bytes -= size.num_bytes
        size.num_sequences = size.num_bytes = 0

    def remove(self, task: "asyncio.Task[None]") -> None:
        self.leave_engine(task)
        del self.tasks[task]

    def run_again(self, number: int) -> None:
        """The line waits again in the ledger."""
        self.first = min(self.first, number)
        self.ahead = deque((line, content) for line, content in self.ahead if line.number < number)
        self.is_exhausted = False
