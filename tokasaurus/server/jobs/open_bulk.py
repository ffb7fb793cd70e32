"""Open bulk requests and recently ended ones, for whoever watches the server."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from starlette.datastructures import Headers

from tokasaurus.random_ids import random_id
from tokasaurus.server.engine_client.client import WorkDone
from tokasaurus.server.engine_client.pending import JobPace
from tokasaurus.server.jobs.store.records import LineResult

NAME_HEADER, LINES_HEADER = "x-toka-job-name", "x-toka-job-lines"
"""What a client says of its bulk request: a name, percent-encoded, and how many lines the body will have."""
MAX_NAME_CHARS = 200
MAX_ENDED = 20
"""Jobs that are remembered after their end."""
_MAX_LINES_DIGITS = 12

BulkState = Literal["running", "finished", "cancelled"]


@dataclass(slots=True, eq=False)
class OpenBulk:
    """One bulk request."""

    client: str
    work_before: WorkDone
    """Work that the server had done when the request began."""
    name: str = ""
    num_expected: int | None = None
    """Lines that the client has announced; None if it has not."""
    id: str = field(default_factory=lambda: f"bulk_{random_id()}")
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    ended: float | None = None
    """Seconds since 1970."""
    state: BulkState = "running"
    num_read: int = 0
    """Lines read so far."""
    has_read_all: bool = False
    num_completed: int = 0
    num_failed: int = 0
    pace: JobPace = field(default_factory=JobPace)
    input_tokens: int = 0
    """Input tokens of completed lines; output_tokens are theirs, too."""
    output_tokens: int = 0

    @property
    def num_lines(self) -> int | None:
        """None while it is not known."""
        if self.has_read_all or self.num_expected is None:
            return self.num_read if self.has_read_all else None
        return max(self.num_read, self.num_expected)

    def note_read(self, is_last: bool = False) -> None:
        """A line was read, or the body has ended."""
        self.num_read += not is_last
        self.has_read_all |= is_last
        self.pace.num_lines = self.num_lines

    def note(self, result: LineResult) -> None:
        """A line has its result."""
        self.pace.num_done += 1
        self.num_failed += result.has_failed
        self.num_completed += not result.has_failed
        self.input_tokens += result.input_tokens
        self.output_tokens += result.output_tokens


def announced(headers: Headers) -> tuple[str, int | None]:
    """(name, number of lines) as the headers say; "" and None without them."""
    name = unquote(headers.get(NAME_HEADER, ""))
    lines = headers.get(LINES_HEADER, "")
    is_number = lines.isascii() and lines.isdecimal() and len(lines) <= _MAX_LINES_DIGITS
    printable = "".join(char for char in name if char.isprintable())
    return printable[:MAX_NAME_CHARS], int(lines) if is_number else None


class OpenBulks:
    """The bulk requests of one server that are open, in the order of their starts."""

    def __init__(self) -> None:
        self._bulks: dict[OpenBulk, None] = {}
        self.ended: deque[OpenBulk] = deque(maxlen=MAX_ENDED)
        """The newest that have ended, in the order of their ends."""

    def __iter__(self) -> Iterator[OpenBulk]:
        return iter(self._bulks)

    @contextmanager
    def listed(self, bulk: OpenBulk) -> Iterator[None]:
        """`bulk` is open within the context."""
        self._bulks[bulk] = None
        try:
            yield
            bulk.state = "finished"
        except BaseException:
            bulk.state = "cancelled"
            raise
        finally:
            del self._bulks[bulk]
            bulk.ended = time.time()
            self.ended.append(bulk)
