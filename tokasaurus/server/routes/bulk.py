"""POST /v1/bulk, many requests over one connection: lines start as they arrive, results are sent as they finish."""

import asyncio
import codecs
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tokasaurus.server.access import client_of
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.engine_client.pending import JobPace
from tokasaurus.server.errors import (
    ApiError,
    BodyTooLarge,
    ClientGone,
    InvalidRequest,
    QueueFull,
    ServerStopping,
    shorten,
)
from tokasaurus.server.event_stream import HEADERS, run_while_connected
from tokasaurus.server.jobs.line_runner import (
    MAX_BYTES_IN_FLIGHT,
    START_BYTES,
    AfterError,
    Line,
    LineRefused,
    LineRunner,
    error_line,
    first_custom_id,
    parse_line,
    refused,
)
from tokasaurus.server.jobs.objects import seconds_of
from tokasaurus.server.jobs.open_bulk import OpenBulk, OpenBulks, announced
from tokasaurus.server.jobs.store.records import LineResult
from tokasaurus.server.json_values import is_parsed_quickly
from tokasaurus.server.openapi import error_responses
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.protocol.batches import BulkProgress
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.state import ServerState, state_of
from tokasaurus.text.json_lines import write_json

logger = logging.getLogger(__name__)
router = APIRouter(tags=["generation"])

NDJSON = "application/x-ndjson"

# Per connection: enough for a large batch and a queue behind it.
MAX_LINES_IN_FLIGHT = 4096
# Per connection: bytes of the body after the last started line.
MAX_UNREAD_BYTES = 1 << 20
# Per connection: results that the client has not received. Many clients read nothing until they have sent their whole
# body; a limit below the results they have by then would be a deadlock.
MAX_UNSENT_BYTES = 256 << 20
# A line that found the queue full tries again after this time, even if no line of its connection has finished.
QUEUE_RETRY_S = 1.0
# Results that follow within this time go in one write: each write of a few results costs more than they do.
WRITE_PAUSE_S = 0.002
# Short lines that are parsed before they run: what they send to the managers goes in one write.
LINES_PER_PASS = 8
PROGRESS_S = 1.0
"""Time between two reports of progress."""


class IncomingBody:
    """The body of a request, read as it arrives. Buffers at most `MAX_UNREAD_BYTES` and one message."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._unread = bytearray()
        self._is_whole = False
        self._has_news = asyncio.Event()
        self._can_read = asyncio.Event()
        self._can_read.set()

    async def receive(self) -> Message:
        """The next ASGI message, once the buffer has space. The caller must keep calling it for `read` to progress."""
        await self._can_read.wait()
        message = await self._receive()
        if message["type"] == "http.request":
            self._unread += message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
            self._has_news.set()
            if len(self._unread) > MAX_UNREAD_BYTES:
                self._can_read.clear()
        return message

    async def read(self) -> bytes:
        """Waits for unread bytes and returns them all; empty at the end of the body."""
        while not self._unread and not self._is_whole:
            await self._has_news.wait()
            self._has_news.clear()
        content = bytes(self._unread)
        self._unread.clear()
        self._can_read.set()
        return content


@dataclass(frozen=True, slots=True)
class TooLong:
    """In place of a line that was dropped."""

    start: bytes
    """Its first bytes, at most START_BYTES."""


NumberedLine = tuple[int, bytes | TooLong]
"""The number of a line, from 1, and the line."""

_WHITE = re.compile(rb"\s*")


class LineSplitter:
    """Splits chunks of bytes into lines, without line ends and without blank lines, which count nevertheless. A line
    longer than `max_bytes` is dropped: a TooLong replaces it. A byte-order mark at the start is left out.

    Many blank lines cost next to nothing: a compressed body has thousands of them in a byte.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_lines = 0
        """Lines that have ended."""
        self._begun = bytearray()
        self._is_too_long = False
        self._is_blank = True
        """Whether the line that has begun is blank so far."""

    def add(self, chunk: bytes) -> list[NumberedLine]:
        """The lines that end in `chunk`."""
        lines: list[NumberedLine] = []
        position = 0
        while (end := chunk.find(b"\n", position)) >= 0:
            lines += self._end(chunk[position:end])
            position = end + 1
            if chunk.startswith((b"\n", b" ", b"\t", b"\r"), position):
                white = _WHITE.match(chunk, position)
                assert white is not None, "it matches nothing too"
                next_line = chunk.rfind(b"\n", position, white.end()) + 1
                if next_line > 0:
                    self._num_lines += chunk.count(b"\n", position, next_line)
                    position = next_line
        self._continue(chunk[position:])
        return lines

    def finish(self) -> list[NumberedLine]:
        """The last line, if it has no line end."""
        return self._end(b"")

    def _continue(self, part: bytes) -> None:
        self._is_blank = self._is_blank and (not part or part.isspace())
        self._begun += part
        self._is_too_long = self._is_too_long or len(self._begun) > self._max_bytes
        if self._is_too_long:
            del self._begun[START_BYTES:]

    def _end(self, part: bytes) -> list[NumberedLine]:
        self._continue(part)
        self._num_lines += 1
        line = bytes(self._begun)
        if self._num_lines == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            self._is_blank = not line.strip()
        ended: NumberedLine = (self._num_lines, TooLong(line) if self._is_too_long else line)
        is_blank = self._is_blank
        self._begun.clear()
        self._is_too_long, self._is_blank = False, True
        return [] if is_blank else [ended]


class BulkRun:
    """Runs the lines of one body; each gets exactly one result, which is final once it is written.

    read_line: called for one line at a time, in order. max_line_bytes: a longer line gets an error as its result.
    report: writes a line that tells how far the lines are, sent once a second; None sends none. bulk: counts the lines.
    """

    id_prefix = "bulk_req"
    repeats_errors = True

    def __init__(
        self,
        read_line: Callable[[bytes], Awaitable[Line]],
        max_line_bytes: int,
        report: Callable[[], bytes] | None = None,
        bulk: OpenBulk | None = None,
    ) -> None:
        self._read_line = read_line
        self._max_line_bytes = max_line_bytes
        self._report = report
        self._bulk = bulk
        self._custom_ids: set[int] = set()  # their hashes, which take less memory
        self._runner = LineRunner(self)
        self._unanswered: dict[Line, None] = {}
        self._results: list[bytes] = []
        self._queue_waiters: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self._num_unsent_bytes = 0
        self._has_news = asyncio.Event()
        self._can_read = asyncio.Event()
        self.has_read_all = False

    async def run(self, body: IncomingBody, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Returns when the results of all lines have been written; if it ends early, unfinished lines are cancelled.

        write: receives one or more whole results; if it is cancelled, none of them is written."""
        self._notice()
        starting = asyncio.ensure_future(self._start_lines(body))
        starting.add_done_callback(lambda _: self._notice())
        reporting = asyncio.ensure_future(self._tell_progress())
        try:
            is_last = False
            while not is_last:
                await self._has_news.wait()
                self._has_news.clear()
                is_last = starting.done() and not self._unanswered
                if self._results:
                    content = b"".join(self._results)
                    self._results = [content]  # until it is written; those that arrive meanwhile follow it
                    await write(content)
                    del self._results[0]
                    self._num_unsent_bytes -= len(content)
                    self._notice_room()
                    if self._unanswered:
                        await asyncio.sleep(WRITE_PAUSE_S)
            await starting
        finally:
            starting.cancel()
            reporting.cancel()
            await asyncio.gather(starting, reporting, return_exceptions=True)
            await self._runner.cancel()

    def results_of_rest(self, error: ApiError) -> bytes:
        """After `run` ended early: results not yet written, then `error` as the result of each unfinished line."""
        rest = [error_line(self, line.custom_id, error) for line in self._unanswered]
        return b"".join([*self._results, *rest])

    async def _tell_progress(self) -> None:
        while self._report is not None:
            await asyncio.sleep(PROGRESS_S)
            if self._unanswered and not self._results:  # a client that does not read needs no reports either
                self._results.append(self._report())
                self._num_unsent_bytes += len(self._results[-1])
                self._has_news.set()

    # As the sink of its lines

    async def store(self, line: Line, result: LineResult) -> None:
        del self._unanswered[line]
        if self._bulk is not None:
            self._bulk.note(result)
        self._results.append(result.content)
        self._num_unsent_bytes += len(result.content)
        # Wake two, so that the number of lines in flight can grow when the engine accepts many at once.
        for waiter in list(islice(self._queue_waiters, 2)):
            del self._queue_waiters[waiter]
            waiter.set_result(None)
        self._notice()

    async def after_error(self, _line: Line, error: ApiError) -> AfterError:
        """If the queue is full, the line waits and runs again: single requests get QueueFull, lines do not."""
        if not isinstance(error, QueueFull):
            return AfterError.FINAL
        waiter = asyncio.get_running_loop().create_future()
        self._queue_waiters[waiter] = None
        try:
            await asyncio.wait([waiter], timeout=QUEUE_RETRY_S)
        finally:
            self._queue_waiters.pop(waiter, None)
        return AfterError.AGAIN

    async def _start_lines(self, body: IncomingBody) -> None:
        splitter = LineSplitter(self._max_line_bytes)
        while chunk := await body.read():
            for number, content in splitter.add(chunk):
                await self._start_line(number, content)
            await asyncio.sleep(0)
        for number, content in splitter.finish():
            await self._start_line(number, content)
        self.has_read_all = True
        if self._bulk is not None:
            self._bulk.note_read(is_last=True)

    async def _start_line(self, number: int, content: bytes | TooLong) -> None:
        await self._can_read.wait()
        line = await self._checked_line(number, content)
        line.num_bytes = len(content) if isinstance(content, bytes) else 0
        self._unanswered[line] = None
        if self._bulk is not None:
            self._bulk.note_read()
        self._runner.start(line)
        self._notice_room()
        if number % LINES_PER_PASS == 0:
            await asyncio.sleep(0)  # let other tasks run: a chunk may contain thousands of lines

    async def _checked_line(self, number: int, content: bytes | TooLong) -> Line:
        if isinstance(content, TooLong):
            message = f"line {number} has more than {self._max_line_bytes} bytes"
            line = refused(first_custom_id(content.start), BodyTooLarge(message))
            if line.custom_id is None:
                return line
        else:
            line = await self._read_line(content)
        if line.custom_id is None:
            return _with_number(line, number)
        if hash(line.custom_id) in self._custom_ids:
            message = f"line {number}: an earlier line has the custom_id {shorten(line.custom_id)!r}"
            return refused(line.custom_id, InvalidRequest(message, "custom_id"))
        self._custom_ids.add(hash(line.custom_id))
        return line

    def _notice(self) -> None:
        self._has_news.set()
        self._notice_room()

    def _notice_room(self) -> None:
        if (
            len(self._unanswered) < MAX_LINES_IN_FLIGHT
            and self._runner.num_bytes < MAX_BYTES_IN_FLIGHT
            and self._num_unsent_bytes < MAX_UNSENT_BYTES
        ):
            self._can_read.set()
        else:
            self._can_read.clear()


def _with_number(line: Line, number: int) -> Line:
    """A line without custom_id: its error messages start with the line number."""

    async def answer() -> Answer:
        try:
            return await line.answer()
        except ApiError as error:
            error.message = f"line {number}: {error.message}"
            raise

    return Line(None, answer)


class BulkStream(Response):
    """Reads the body while it sends results. If the client disconnects, unfinished lines are cancelled."""

    media_type = NDJSON

    def __init__(self, run: BulkRun, listed: AbstractContextManager[None] | None = None) -> None:
        """listed: entered while the lines run."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._run = run
        self._listed: AbstractContextManager[None] = nullcontext() if listed is None else listed

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def write(content: bytes, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})

        body = IncomingBody(receive)

        async def answer() -> None:
            # Lets the body be requested first: curl may wait for the "100 Continue" that this triggers.
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with self._listed:
                await self._run.run(body, write)

        try:
            await run_while_connected(body.receive, answer())
        except ClientGone:
            return
        except (ServerStopping, InvalidRequest) as error:  # the second: the rest of a compressed body is damaged
            # If lines are still unread, the response is cut off without a final chunk.
            await write(self._run.results_of_rest(error), is_last=self._run.has_read_all)
            return
        await write(b"", is_last=True)


# For the OpenAPI page, which cannot describe newline-separated JSON.
LINE_SCHEMA = {
    "type": "string",
    "description": "Lines, each a JSON object with custom_id, url and body; method may be POST.",
    "example": '{"custom_id": "1", "url": "/v1/completions", "body": {"model": "default", "prompt": "Once"}}\n',
}
_CHAT = ENDPOINTS["/v1/chat/completions"]
LINES = orjson.dumps({"custom_id": "1", "url": "/v1/chat/completions", "body": _CHAT.example}).decode() + "\n"
"""A body that the page offers to send."""
RESULT_SCHEMA = {
    "type": "string",
    "description": "One line per input line: a JSON object with id, custom_id, response (status_code, request_id and "
    "body) and error, which is null if status_code is 200.",
}


@router.post(
    "/v1/bulk",
    response_class=Response,
    responses={200: {"content": {NDJSON: {"schema": RESULT_SCHEMA}}}, **error_responses(415, 503)},
    openapi_extra={"requestBody": {"required": True, "content": {NDJSON: {"schema": LINE_SCHEMA, "example": LINES}}}},
)
async def bulk(request: Request, progress: bool = False) -> Response:
    """Run any number of lines, each a body for a generation route; results are sent as they finish, in any order.

    progress: once a second, also send how far the unfinished lines are."""
    state = state_of(request)
    state.ready_limits()
    open_bulks: OpenBulks = request.app.state.open_bulks
    opened = OpenBulk(client_of(request), state.engine.work_done, *announced(request.headers))

    async def read_line(content: bytes) -> Line:
        if is_parsed_quickly(content):
            return _read_line(content, state, opened)
        return await state.text_threads.run(len(content), _read_line, content, state, opened)

    def report() -> bytes:
        return write_json({"progress": progress_of(opened.pace)}, orjson.OPT_APPEND_NEWLINE)

    @contextmanager
    def listed() -> Iterator[None]:
        with open_bulks.listed(opened), state.engine.running_job(opened.id, opened.pace):
            yield

    run = BulkRun(read_line, state.config.max_line_bytes, report if progress else None, opened)
    return BulkStream(run, listed())


def progress_of(pace: JobPace) -> BulkProgress:
    left = pace.num_tokens_left
    expected = None if left is None else pace.num_running_tokens + left
    return BulkProgress(pace.num_requests, pace.num_running_tokens, expected, seconds_of(pace.time_left))


def _read_line(content: bytes, state: ServerState, bulk: OpenBulk) -> Line:
    try:
        parsed = parse_line(content, state.config.max_json_values)
    except LineRefused as refusal:
        return refused(refusal.custom_id, refusal.error)

    async def answer() -> Answer:
        return await parsed.answer(state, Origin(parsed.num_bytes, bulk.client, job=bulk.id))

    return Line(parsed.custom_id, answer, num_sequences=parsed.body.num_sequences)
