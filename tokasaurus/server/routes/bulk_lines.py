"""Many requests over one connection: lines are answered as they come, results leave as they finish. No HTTP here."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

import orjson
from starlette.types import Message, Receive

from tokasaurus.server.errors import ApiError, BodyTooLarge, InvalidRequest, QueueFull, error_response, shorten

logger = logging.getLogger(__name__)

# Of one connection: enough to fill a large batch and to keep some waiting behind it.
MAX_LINES_IN_FLIGHT = 4096
# Of one connection, of the body beyond the lines that have been started.
MAX_UNREAD_BYTES = 1 << 20
# Of one connection, results that the client has not taken. Many clients read nothing before they have sent their whole
# body: with less than they get by then, they and we would wait for each other.
MAX_UNSENT_BYTES = 256 << 20
# After this long a line that met a full queue tries again, even if no line of its connection has finished.
QUEUE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """custom_id: None where none can be read. answer: makes the answer's JSON; it raises ApiError."""

    custom_id: str | None
    answer: Callable[[], Awaitable[bytes]]


def refused(custom_id: str | None, error: ApiError) -> Line:
    async def answer() -> bytes:
        raise error

    return Line(custom_id, answer)


class IncomingBody:
    """The body of a request, read while it comes. At most `MAX_UNREAD_BYTES` and one message of it are held."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._unread = bytearray()
        self._is_whole = False
        self._has_news = asyncio.Event()
        self._can_read = asyncio.Event()
        self._can_read.set()

    async def receive(self) -> Message:
        """The next ASGI message, once there is room for one. Somebody has to call it all the time."""
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
        """All that has come and has not been read; nothing at the end of the body."""
        while not self._unread and not self._is_whole:
            await self._has_news.wait()
            self._has_news.clear()
        content = bytes(self._unread)
        self._unread.clear()
        self._can_read.set()
        return content


class LineSplitter:
    """Pieces of text → its lines, without their ends. None stands for a line of more than `max_bytes`, which is not
    kept."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._begun = bytearray()
        self._is_too_long = False

    def add(self, piece: bytes) -> list[bytes | None]:
        """The lines that end in the piece."""
        *ends, rest = piece.split(b"\n")
        lines = [self._end(end) for end in ends]
        self._continue(rest)
        return lines

    def finish(self) -> list[bytes | None]:
        """The last line, if it lacks an end."""
        return [self._end(b"")] if self._begun or self._is_too_long else []

    def _continue(self, part: bytes) -> None:
        if self._max_bytes is not None and len(self._begun) + len(part) > self._max_bytes:
            self._is_too_long = True
        if self._is_too_long:
            self._begun.clear()
        else:
            self._begun += part

    def _end(self, part: bytes) -> bytes | None:
        self._continue(part)
        line = None if self._is_too_long else bytes(self._begun)
        self._begun.clear()
        self._is_too_long = False
        return line


class BulkRun:
    """The lines of one body, each of which gets exactly one result.

    read_line: is called for one line after the other, in their order. max_line_bytes: None: any number.
    """

    def __init__(self, read_line: Callable[[bytes], Awaitable[Line]], max_line_bytes: int | None) -> None:
        self._read_line = read_line
        self._max_line_bytes = max_line_bytes
        self._num_lines = 0
        self._custom_ids: set[str] = set()
        self._unanswered: dict[asyncio.Task[bytes], str | None] = {}
        self._results: list[bytes] = []
        self._queue_waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._num_unsent_bytes = 0
        self._has_news = asyncio.Event()
        self._can_read = asyncio.Event()
        self.has_read_all = False

    async def run(self, body: IncomingBody, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Returns when the results of all lines have been written; what is unanswered is cancelled if it is left
        before. write: takes whole results, one or more."""
        self._notice()
        starting = asyncio.ensure_future(self._start_lines(body))
        starting.add_done_callback(lambda _: self._notice())
        try:
            is_last = False
            while not is_last:
                await self._has_news.wait()
                self._has_news.clear()
                is_last = starting.done() and not self._unanswered
                results, self._results = self._results, []
                if results:
                    content = b"".join(results)
                    await write(content)
                    self._num_unsent_bytes -= len(content)
                    self._notice_room()
            await starting
        finally:
            left = [starting, *self._unanswered]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def results_of_rest(self, error: ApiError) -> bytes:
        """After `run` was left: the results that it did not write, the error for all lines that have none."""
        rest = [_error_result(custom_id, error) for custom_id in self._unanswered.values()]
        return b"".join([*self._results, *rest])

    async def _start_lines(self, body: IncomingBody) -> None:
        splitter = LineSplitter(self._max_line_bytes)
        while piece := await body.read():
            for content in splitter.add(piece):
                await self._start_line(content)
        for content in splitter.finish():
            await self._start_line(content)
        self.has_read_all = True

    async def _start_line(self, content: bytes | None) -> None:
        self._num_lines += 1
        if content is not None and not content.strip():
            return
        await self._can_read.wait()
        line = await self._checked_line(content)
        task = asyncio.ensure_future(self._answer(line))
        self._unanswered[task] = line.custom_id
        task.add_done_callback(self._finish)
        self._notice_room()
        await asyncio.sleep(0)  # a piece may hold thousands, and others want their turn

    async def _checked_line(self, content: bytes | None) -> Line:
        if content is None:
            message = f"line {self._num_lines} has more than {self._max_line_bytes} bytes (max_request_bytes)"
            return refused(None, BodyTooLarge(message))
        line = await self._read_line(content)
        if line.custom_id is None:
            return _with_number(line, self._num_lines)
        if line.custom_id in self._custom_ids:
            message = f"line {self._num_lines}: an earlier line has the custom_id {shorten(line.custom_id)!r}"
            return refused(line.custom_id, InvalidRequest(message, "custom_id"))
        self._custom_ids.add(line.custom_id)
        return line

    def _finish(self, task: asyncio.Task[bytes]) -> None:
        if task.cancelled():  # by `run`, and then `results_of_rest` may be asked for it
            return
        del self._unanswered[task]
        result = task.result()
        self._results.append(result)
        self._num_unsent_bytes += len(result)
        # Two, so that a run catches up with an engine that takes many at once.
        for waiter in list(islice(self._queue_waiters, 2)):
            del self._queue_waiters[waiter]
            waiter.set_result(None)
        self._notice()

    async def _answer(self, line: Line) -> bytes:
        """The line's result."""
        try:
            return _result(line.custom_id, 200, await self._answer_when_room(line), None)
        except ApiError as known:
            error = known
        except Exception:
            logger.exception("a line of a bulk request")
            error = ApiError("internal error; the server's log has the details")
        return _error_result(line.custom_id, error)

    async def _answer_when_room(self, line: Line) -> bytes:
        """A full queue is no answer to a line: it waits and tries again, as the client of a live request is told to."""
        while True:
            try:
                return await line.answer()
            except QueueFull:
                waiter = asyncio.get_running_loop().create_future()
                self._queue_waiters[waiter] = None
                try:
                    await asyncio.wait([waiter], timeout=QUEUE_RETRY_S)
                finally:
                    self._queue_waiters.pop(waiter, None)

    def _notice(self) -> None:
        self._has_news.set()
        self._notice_room()

    def _notice_room(self) -> None:
        if len(self._unanswered) < MAX_LINES_IN_FLIGHT and self._num_unsent_bytes < MAX_UNSENT_BYTES:
            self._can_read.set()
        else:
            self._can_read.clear()


def _with_number(line: Line, number: int) -> Line:
    """Where there is no custom_id, the message tells which line it is."""

    async def answer() -> bytes:
        try:
            return await line.answer()
        except ApiError as error:
            error.message = f"line {number}: {error.message}"
            raise

    return Line(None, answer)


def _error_result(custom_id: str | None, error: ApiError) -> bytes:
    return _result(custom_id, error.status, bytes(error_response(error).body), error)


def _result(custom_id: str | None, status: int, body: bytes, error: ApiError | None) -> bytes:
    """A line of OpenAI's batch output, with its end."""
    unique = uuid.uuid4().hex
    response = {"status_code": status, "request_id": f"req_{unique}", "body": orjson.Fragment(body)}
    shown = None if error is None else error.as_object()
    line = {"id": f"bulk_req_{unique}", "custom_id": custom_id, "response": response, "error": shown}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
