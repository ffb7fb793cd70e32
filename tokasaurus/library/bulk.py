"""A bulk request that stays open while its caller sends lines and takes answers; it survives lost connections."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from tokasaurus.library.connection import Server, ServerError, error_reason
from tokasaurus.library.requests import Answer, RequestLine, line_number
from tokasaurus.library.results import row_error
from tokasaurus.messages.status import TimeLeft

MAX_CONCURRENCY = 4096
"""Lines of one connection that the server runs at once: the running batch, and a queue that the scheduler looks ahead
over."""
MAX_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of the lines without an answer, as the server allows; one line more may be sent."""
MAX_BYTES_HELD = 64 << 20
"""While the caller has left answers of this size untaken, no more are read from the connection. What has been read
before, up to 2 MiB, is added to them."""
MAX_ATTEMPTS = 5
"""How often a line is sent that the server could not serve for a reason that may pass."""
MAX_SILENCE_S = 300.0
"""Longest time without a connection to a server that has answered before, in seconds."""

_MAX_BYTES_PER_WRITE = 256 << 10
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_QUIET_S = 60.0
"""Longest time in which a server neither takes nor sends a byte. It sends its progress once a second while it has whole
lines in flight, but nothing while it receives the first of them."""
_MAX_KERNEL_BYTES = 4 << 20
"""Most of the written bytes that may still wait in this machine's network buffers."""
_SLOW_BYTES_PER_S = 64 << 10
"""Slowest upload that is no silence: the bytes in those buffers may take this long beside _MAX_QUIET_S."""
_GATHER_S = 0.05
"""Longest time that an answer waits for others."""
_OPEN_PER_ANSWER = 4
"""It waits while there are more open lines than these for each answer."""
_MIN_QUEUED = 256
"""Open lines that no answer keeps waiting, while there are others to send: they may be all that the server runs."""
_MAX_BYTES_PER_PART = 256 << 10
"""A longer line is written in parts of this size, as the server takes them: each part shows that it is not silent."""
# Statuses of a line or a connection that may change later; 502 and 504 come from proxies.
_TRANSIENT = (429, 502, 503, 504)
_TRANSIENT_CODES = ("engine_died",)


class ClientClosed(ServerError):
    """The user does not want any more answers."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the lines are that the server has not answered, as it tells."""

    num_generated: int
    """Tokens that they have."""
    num_expected: int | None
    """Tokens that they and all lines to come are expected to have at their ends; None until there is a basis."""
    time_left: TimeLeft | None
    """Until all have ended; None until there is a basis."""


class AsyncBulkSession:
    """The lines of one call. All methods run on the event loop."""

    def __init__(self, server: Server, concurrency: int | None = None, name: str = "") -> None:
        """concurrency: most lines without an answer; None: as many as the server takes. name: what the server's live
        page calls the job."""
        self._server = server
        self._concurrency = concurrency or MAX_CONCURRENCY
        self._name = name
        self._lines: dict[int, RequestLine] = {}
        """Lines without an answer, in the order in which they were sent first."""
        self._unsent: deque[RequestLine] = deque()
        self._attempts: dict[int, int] = {}
        """Attempts so far, by line number, of lines that are sent again because the reason of their failure may
        pass."""
        self._pausing: dict[int, asyncio.TimerHandle] = {}
        """Lines that will be sent again after a pause."""
        self._answers: list[Answer] = []
        self._num_held_bytes = 0
        """Bytes of the answers that the caller has not taken."""
        self._were_taken = asyncio.Event()
        self._num_answered = 0
        self._num_open = 0
        """Lines whose answers the caller does not have."""
        self._num_bytes = 0
        """Bytes of the lines whose answers the caller does not have."""
        self._is_last = False
        self._has_news = asyncio.Event()
        self._has_enough = asyncio.Event()
        """Answers for a call to return, or a reason not to wait for more."""
        self._can_send = asyncio.Event()
        self._failure: ServerError | None = None
        self.num_lines: int | None = None
        """How many lines there will be in all; None if that is not known. The server is told when a connection begins:
        the time left on its live page depends on it."""
        self.progress: Progress | None = None
        """The server's latest report, which it sends once a second; None before the first one."""
        self._task: asyncio.Task[None] | None = None

    def room(self) -> int:
        """Lines that may be sent now."""
        return max(0, self._concurrency - self._num_open) if self._num_bytes < MAX_BYTES_IN_FLIGHT else 0

    async def exchange(
        self, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """Send lines, at most `room()`, and return the answers that have arrived.

        Waits until there is an answer, or room for more lines unless `is_last`, or until the timeout; a moment longer
        while nearly all lines are open, since each call costs more than an answer. Without a timeout, an empty list
        after is_last=True means that every line has been answered. Raises ServerError if the
        server is lost; the lines without an answer are then in `unanswered`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        for line in lines:
            self._lines[line.number] = line
            self._num_bytes += len(line.body)
        self._unsent.extend(lines)
        self._num_open += len(lines)
        self._is_last = is_last
        self._can_send.set()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._answers:
            if self._failure is not None:
                raise self._failure
            if is_last and not self._num_open:
                await self._task
                break
            if not is_last and self.room():
                break
            self._has_news.clear()
            try:
                seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
                await asyncio.wait_for(self._has_news.wait(), seconds)
            except asyncio.TimeoutError:
                break
        if self._answers and self._has_few_answers() and (is_last or not self.room()):
            self._has_enough.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_enough.wait(), _GATHER_S)
        answers, self._answers = self._answers, []
        self._num_held_bytes = 0
        self._were_taken.set()
        self._num_open -= len(answers)
        self._num_bytes -= sum(len(answer.line.body) for answer in answers)
        return answers

    def _has_few_answers(self) -> bool:
        num_lines = len(self._lines) - (0 if self._is_last else _MIN_QUEUED)
        return len(self._answers) < num_lines // _OPEN_PER_ANSWER

    @property
    def unanswered(self) -> list[RequestLine]:
        return list(self._lines.values())

    def fail(self, error: ServerError) -> None:
        """Cancels what is in flight; `exchange` raises the error once the answers that have arrived are taken."""
        self._failure = error
        if self._task is not None:
            self._task.cancel()
        self._has_news.set()
        self._has_enough.set()

    async def close(self) -> None:
        """Cancels what is in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Sends and receives until all lines have been answered; over several connections if one is lost."""
        failed_at_s: float | None = None
        num_failures = 0
        try:
            while not (self._is_last and not self._lines):
                if not self._lines:
                    self._can_send.clear()
                    await self._can_send.wait()
                    continue
                num_before = self._num_answered
                reason = await self._stream()
                if reason is None:
                    continue
                if self._num_answered > num_before:  # it has worked meanwhile
                    failed_at_s, num_failures = None, 0
                now_s = time.monotonic()
                failed_at_s = now_s if failed_at_s is None else failed_at_s
                if now_s - failed_at_s > MAX_SILENCE_S:
                    raise ServerError(reason)
                await asyncio.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
                num_failures += 1
                if self._server.wait_until_up is not None:
                    await self._server.wait_until_up()
        except ServerError as error:
            self._failure = error
        except Exception as error:  # our own fault: the caller must not wait for ever
            self._failure = ServerError(f"internal error: {type(error).__name__}: {error}")
            raise
        finally:
            self._has_news.set()
            self._has_enough.set()

    async def _stream(self) -> str | None:
        """One connection: None after its regular end, or if no line was in flight at its end, else why it was lost.
        Raises ServerError."""
        for pause in self._pausing.values():
            pause.cancel()
        self._pausing.clear()
        self._unsent = deque(self._lines.values())
        is_open = True
        quiet = _QuietTimer()

        async def body() -> AsyncIterator[bytes]:
            while is_open:
                while self._unsent:
                    content = self._next_write()
                    for start in range(0, len(content), _MAX_BYTES_PER_PART):
                        part = content[start : start + _MAX_BYTES_PER_PART]
                        yield part
                        quiet.note_sent(len(part))
                if self._is_last and not self._lines:
                    return
                self._can_send.clear()
                await self._can_send.wait()

        url = f"{self._server.url}/v1/bulk?progress=true"
        headers = {"Content-Type": "application/x-ndjson", "X-Toka-Job-Name": quote(self._name)}
        num_lines = self._num_lines_to_come()
        if num_lines is not None:
            headers["X-Toka-Job-Lines"] = str(num_lines)
        try:
            async with self._server.http.post(url, data=body(), headers=headers) as response:
                if response.status in _TRANSIENT:
                    return f"{self._server.url} answered {response.status}: {error_reason(await response.read())}"
                if response.status != 200:
                    raise ServerError(
                        f"{self._server.url} answered {response.status}: {error_reason(await response.read())}"
                    )
                begun = bytearray()
                async for chunk in response.content.iter_any():
                    quiet.note_received()
                    *ends, rest = chunk.split(b"\n")
                    if ends:
                        ends[0] = bytes(begun) + ends[0]
                        begun.clear()
                        for end in ends:
                            self._receive(end)
                    begun += rest
                    if self._num_held_bytes >= MAX_BYTES_HELD:
                        quiet.pause()
                        self._were_taken.clear()
                        await self._were_taken.wait()
                        quiet.note_received()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            # A server is quiet while it has no line.
            lost = f"the connection to {self._server.url} was lost: {error or type(error).__name__}"
            return lost if self._lines else None
        except asyncio.CancelledError:
            if not quiet.has_cancelled():
                raise
            return f"{self._server.url} was silent for {_MAX_QUIET_S:g} s" if self._lines else None
        finally:
            quiet.stop()
            is_open = False
            self._can_send.set()
        if self._lines:
            return f"{self._server.url} ended its answer early"
        return None

    def _num_lines_to_come(self) -> int | None:
        """Lines of the next connection; None if that is not known."""
        if self._is_last:
            return len(self._lines)
        return None if self.num_lines is None else max(len(self._lines), self.num_lines - self._num_answered)

    def _next_write(self) -> bytes:
        parts = []
        num_bytes = 0
        while self._unsent and num_bytes < _MAX_BYTES_PER_WRITE:
            line = self._unsent.popleft()
            parts.append(line.encode(self._attempts.get(line.number, 1)))
            num_bytes += len(parts[-1])
        return b"".join(parts)

    def _receive(self, content: bytes) -> None:
        """Take one result line."""
        if not content.strip():
            return
        result: dict[str, Any] = orjson.loads(content)
        if "progress" in result:
            told = result["progress"]
            seconds = told.get("seconds_left")  # an older server has no such field
            left = None if seconds is None else TimeLeft(*seconds)
            self.progress = Progress(told["generated_tokens"], told["expected_tokens"], left)
            return
        response = result["response"]
        status: int = response["status_code"]
        body: dict[str, Any] = response["body"]
        line = self._lines.get(line_number(result["custom_id"]))
        if line is None:
            reason = f": {row_error(status, body)}" if status != 200 else ""
            raise ServerError(f"{self._server.url} answered a line that was not sent{reason}")
        if status != 200 and self._may_pass(line, status, body):
            loop = asyncio.get_running_loop()
            self._pausing[line.number] = loop.call_later(self._pause_s(line), self._send_again, line)
            return
        del self._lines[line.number]
        self._attempts.pop(line.number, None)
        self._num_answered += 1
        self._answers.append(Answer(line, status, body))
        self._num_held_bytes += len(content)
        self._has_news.set()
        if not self._has_few_answers() or self._num_held_bytes >= MAX_BYTES_HELD:
            self._has_enough.set()
        if self._is_last and not self._lines:
            self._can_send.set()

    def _may_pass(self, line: RequestLine, status: int, body: dict[str, Any]) -> bool:
        """Whether the line is to be sent again; counts the attempt."""
        error = body.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        if status not in _TRANSIENT and code not in _TRANSIENT_CODES:
            return False
        self._attempts[line.number] = self._attempts.get(line.number, 1) + 1
        return self._attempts[line.number] <= MAX_ATTEMPTS

    def _pause_s(self, line: RequestLine) -> float:
        return _PAUSES_S[min(self._attempts[line.number] - 1, len(_PAUSES_S) - 1)]

    def _send_again(self, line: RequestLine) -> None:
        del self._pausing[line.number]
        self._unsent.append(line)
        self._can_send.set()


class _QuietTimer:
    """Cancels the task that made it once nothing has been sent or received for a while."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._num_sent = 0
        """Bytes since the last one from the server."""
        self._last_s = self._loop.time()
        self._is_over = False
        self._handle = self._loop.call_later(_MAX_QUIET_S, self._look)

    def note_received(self) -> None:
        self._last_s = self._loop.time()
        self._num_sent = 0

    def note_sent(self, num_bytes: int) -> None:
        self._last_s = self._loop.time()
        self._num_sent += num_bytes

    def pause(self) -> None:
        """Until the next byte."""
        self._last_s = float("inf")

    def stop(self) -> None:
        self._handle.cancel()

    def has_cancelled(self) -> bool:
        """Whether only this timer has cancelled the task, which then may go on."""
        if not self._is_over:
            return False
        return sys.version_info < (3, 11) or self._task.uncancel() == 0

    def _look(self) -> None:
        allowed_s = _MAX_QUIET_S + min(self._num_sent, _MAX_KERNEL_BYTES) / _SLOW_BYTES_PER_S
        left_s = self._last_s + allowed_s - self._loop.time()
        if left_s > 0:
            self._handle = self._loop.call_later(min(left_s, _MAX_QUIET_S), self._look)
        else:
            self._is_over = True
            self._task.cancel()
