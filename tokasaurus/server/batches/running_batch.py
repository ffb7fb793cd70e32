"""A batch whose lines run."""

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import BinaryIO

import apsw

from tokasaurus.server.batches.store.database import Database, explain
from tokasaurus.server.batches.store.ledger import pending_lines
from tokasaurus.server.batches.store.records import BatchRecord, PendingLine

_LINES_PER_READ = 256
_TASKS_PER_CANCEL = 64
MAX_ATTEMPTS = 12
"""Starts of a line before it fails because the engine or the server never survived it."""

# A line that makes the server die must not do so for ever, and must not make lines beside it fail. So each death lets
# fewer of the lines that were running at it run together, of all batches, until one of them is alone.
_MOST_TOGETHER = (None, None, None, 1024, 256, 64, 16, 4)
"""Indexed by attempts; a line with more attempts runs alone."""


def most_together(attempts: int) -> int | None:
    """Lines that may run together, if one of them was started so often before; None: any number."""
    return _MOST_TOGETHER[attempts] if attempts < len(_MOST_TOGETHER) else 1


def client_of(batch: BatchRecord) -> str:
    """The batch's name in the engine's queue, which serves the batches by turns."""
    return f"batch:{batch.id}"


@dataclass(slots=True)
class LineSize:
    """What a line in the engine takes."""

    number: int
    num_sequences: int
    num_bytes: int
    attempts: int = 0
    """How often it had been started before."""


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
    """Sequences of its lines in the engine."""
    num_bytes: int = 0
    """Bytes of its lines in the engine."""
    is_exhausted: bool = False
    """No line waits."""
    is_stopping: bool = False
    waits_to_be_alone: bool = False
    """Its next line may have made the server die, and waits until fewer lines run; no others start meanwhile."""
    is_pausing: bool = False
    """No line starts now, because the last start failed."""
    problem: str = ""
    """Why lines cannot be started now; "" if they can."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no line waits or runs."""

    @property
    def client(self) -> str:
        return client_of(self.record)

    @property
    def is_done(self) -> bool:
        """No line waits or runs."""
        return self.is_exhausted and not self.tasks and not self.released

    @property
    def has_waiting_lines(self) -> bool:
        return not self.is_exhausted or bool(self.released)

    def read(self, line: PendingLine) -> bytes | None:
        """The line's content; None if the file has been cut. Blocks. Raises OSError."""
        content = os.pread(self.content.fileno(), line.size, line.start)
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

    def remove(self, task: "asyncio.Task[None]") -> LineSize:
        self.leave_engine(task)
        return self.tasks.pop(task)

    def run_again(self, number: int) -> None:
        """The line waits again in the ledger."""
        self.first = min(self.first, number)
        self.ahead = deque((line, content) for line, content in self.ahead if line.number < number)
        self.is_exhausted = False

    async def read_ahead(self, database: Database, max_bytes: int) -> None:
        """Fill `ahead` with the next lines that wait; one line may exceed `max_bytes`. Raises StoreError."""

        def read(connection: apsw.Connection) -> list[tuple[PendingLine, bytes | None]]:
            lines: list[tuple[PendingLine, bytes | None]] = []
            num_bytes = 0
            for line in pending_lines(connection, self.record.number, self.first, _LINES_PER_READ):
                lines.append((line, self.read(line)))
                num_bytes += line.size
                if num_bytes >= max_bytes:
                    break
            return lines

        try:
            self.ahead.extend(await database.read(read))
        except OSError as error:
            raise explain(error) from None
        if self.ahead:
            self.first = self.ahead[-1][0].number + 1
        self.is_exhausted = not self.ahead

    async def cancel_tasks(self) -> None:
        """Returns when no line runs. Not all at once, since the event loop serves nobody else meanwhile."""
        tasks = list(self.tasks)
        for first in range(0, len(tasks), _TASKS_PER_CANCEL):
            some = tasks[first : first + _TASKS_PER_CANCEL]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
