"""A bulk request that stays open while its caller sends lines and takes answers; it survives lost connections."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from tokasaurus.addresses import leads_here
from tokasaurus.library.requests import Answer, RequestLine, line_number
from tokasaurus.library.results import row_error

MAX_CONCURRENCY = 4096
"""Lines of one connection that the server runs at once: the running batch, and a queue that the scheduler looks ahead
over."""
MAX_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of the lines without an answer, as the server allows; one line more may be sent."""
MAX_ATTEMPTS = 5
"""How often a line is sent that the server could not serve for a reason that may pass."""
MAX_SILENCE_S = 300.0
"""Longest time without a connection to a server that has answered before, in seconds."""

_MAX_BYTES_PER_WRITE = 256 << 10
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_CONNECT_S = 30.0
_MAX_QUIET_S = 60.0
"""Longest time without a byte from a server, which sends its progress once a second while lines are in flight."""
# Statuses of a line or a connection that may be another one later; 502 and 504 are those of proxies.
_TRANSIENT = (429, 502, 503, 504)
_TRANSIENT_CODES = ("engine_died",)


class ServerError(Exception):
    """The server cannot be reached, is not a tokasaurus server, or refuses to serve this client. One line says why."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the lines are that the server has not answered, by its scheduler's prediction."""

    num_requests: int
    num_generated: int
    """Tokens that they have."""
    num_expected: int | None
    """Tokens that they are expected to have at their ends; None until there is a basis."""


class Server:
    """How a server is reached. Create and use it on one event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        socket_path: str | None = None,
        wait_until_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """base_url: with or without /v1. socket_path: of the Unix socket that is used in place of the URL's host.
        wait_until_up: waits, after a lost connection, until the server is there again; raises ServerError if it will
        not be. By default, connecting is tried again for `MAX_SILENCE_S`."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.wait_until_up = wait_until_up
        key = api_key if api_key is not None else os.environ.get("TOKA_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.UnixConnector(socket_path, limit=0) if socket_path else aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_MAX_QUIET_S),
            trust_env=socket_path is None and not leads_here(self.url),  # proxies
            read_bufsize=1 << 20,
        )

    async def find_model(self) -> str:
        """The name of the model that it serves. Raises ServerError."""
        try:
            async with self.http.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(_CONNECT_S)) as response:
                content = await response.read()
                if response.status != 200:
                    raise ServerError(f"{self.url} answered {response.status}: {_reason(content)}")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise ServerError(
                f"no answer from {self.url}: {error or type(error).__name__}; is the server running?"
            ) from None
        except ValueError as error:
            raise ServerError(f"{self.url} is no URL that can be used: {error}") from None
        try:
            return str(orjson.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url} answered something else than a list of models") from None

    async def close(self) -> None:
        await self.http.close()


class AsyncBulkSession:
    """The lines of one call. All methods run on the event loop."""

    def __init__(self, server: Server, concurrency: int | None = None) -> None:
        """concurrency: most lines without an answer; None: as many as the server takes."""
        self._server = server
        self._concurrency = concurrency or MAX_CONCURRENCY
        self._lines: dict[int, RequestLine] = {}
        """Lines without an answer, in the order in which they were sent first."""
        self._unsent: deque[RequestLine] = deque()
        self._attempts: dict[int, int] = {}
        """Of the lines that were sent again for a reason that may pass."""
        self._pausing: dict[int, asyncio.TimerHandle] = {}
        """Lines that will be sent again after a pause."""
        self._answers: list[Answer] = []
        self._num_answered = 0
        self._num_open = 0
        """Lines whose answers the caller does not have."""
        self._num_bytes = 0
        """Of the lines whose answers the caller does not have."""
        self._is_last = False
        self._has_news = asyncio.Event()
        self._can_send = asyncio.Event()
        self._failure: ServerError | None = None
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

        Waits until there is an answer, or room for more lines unless `is_last`, or until the timeout. Without a
        timeout, an empty list after is_last=True means that every line has been answered. Raises ServerError if the
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
        answers, self._answers = self._answers, []
        self._num_open -= len(answers)
        self._num_bytes -= sum(len(answer.line.body) for answer in answers)
        return answers

    @property
    def unanswered(self) -> list[RequestLine]:
        return list(self._lines.values())

    def fail(self, error: ServerError) -> None:
        """Cancels what is in flight; `exchange` raises the error once the answers that have arrived are taken."""
        self._failure = error
        if self._task is not None:
            self._task.cancel()
        self._has_news.set()

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

    async def _stream(self) -> str | None:
        """One connection: None after its regular end, or if no line was in flight at its end, else why it was lost.
        Raises ServerError."""
        for pause in self._pausing.values():
            pause.cancel()
        self._pausing.clear()
        self._unsent = deque(self._lines.values())
        is_open = True

        async def body() -> AsyncIterator[bytes]:
            while is_open:
                while self._unsent:
                    yield self._next_write()
                if self._is_last and not self._lines:
                    return
                self._can_send.clear()
                await self._can_send.wait()

        url = f"{self._server.url}/v1/bulk?progress=true"
        headers = {"Content-Type": "application/x-ndjson"}
        try:
            async with self._server.http.post(url, data=body(), headers=headers) as response:
                if response.status in _TRANSIENT:
                    return f"{self._server.url} answered {response.status}: {_reason(await response.read())}"
                if response.status != 200:
                    raise ServerError(
                        f"{self._server.url} answered {response.status}: {_reason(await response.read())}"
                    )
                begun = bytearray()
                async for chunk in response.content.iter_any():
                    *ends, rest = chunk.split(b"\n")
                    if ends:
                        ends[0] = bytes(begun) + ends[0]
                        begun.clear()
                        for end in ends:
                            self._receive(end)
                    begun += rest
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            # A server is quiet while it has no line.
            lost = f"the connection to {self._server.url} was lost: {error or type(error).__name__}"
            return lost if self._lines else None
        finally:
            is_open = False
            self._can_send.set()
        if self._lines:
            return f"{self._server.url} ended its answer early"
        return None

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
            self.progress = Progress(told["requests"], told["generated_tokens"], told["expected_tokens"])
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
        self._has_news.set()
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


def _reason(content: bytes) -> str:
    """Why the server has answered an error, in one line."""
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(content[:200].decode(errors="replace").split()) or "no reason"
