"""uvicorn's HTTP/1.1 protocol with limits of sizes, timeouts, half-closed connections, and refusals as JSON."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import itertools
import logging
import select
import socket
import struct
import termios
from collections.abc import Collection, Iterable
from typing import Any

import httptools
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokasaurus.server.access import request_id_of
from tokasaurus.server.connections.table import ConnectionTable
from tokasaurus.server.dialects.messages import is_for_messages, write_messages_error
from tokasaurus.server.errors import (
    ApiError,
    HeadersTooLarge,
    MalformedHttp,
    RequestTimedOut,
    TooManyConnections,
    UrlTooLong,
    error_response,
)

# Offset of tcpi_bytes_acked (u64) in Linux's struct tcp_info.
_BYTES_ACKED_OFFSET = 120


class LingeringTransport(asyncio.Transport):
    """Passes everything on to a transport, but lets `close` linger while the client is sending.

    A socket that is closed with unread input resets the connection, and the client may lose the answer to what it is
    sending. So the sending direction is closed first; whoever owns the transport drops further input, and aborts the
    connection if the client does not close it in time.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._inner = transport
        self.is_client_sending = False
        """Set by the protocol: a request has begun to arrive and is incomplete."""
        self.is_lingering = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_lingering:
            self._inner.write(data)

    def close(self) -> None:
        if not self.is_client_sending or self._inner.is_closing():
            self._inner.close()
        elif not self.is_lingering:
            self.is_lingering = True
            self._inner.resume_reading()
            self._inner.write_eof()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def num_bytes_acked(self) -> int:
        """Bytes that the client's machine has confirmed; where the system does not tell, minus the bytes that are
        unsent, or sent over a Unix socket and unread."""
        try:
            info = self._socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            return int(struct.unpack_from("Q", info, _BYTES_ACKED_OFFSET)[0])
        except (AttributeError, OSError, struct.error):
            return -self._inner.get_write_buffer_size() - self._num_bytes_in_kernel()

    def _num_bytes_in_kernel(self) -> int:
        try:
            (num_bytes,) = struct.unpack("i", fcntl.ioctl(self._socket().fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return 0
        return int(num_bytes)

    def is_hung_up(self) -> bool:
        """Whether the connection was reset. A client that closed it normally counts only once it was sent something,
        since only its answer, a reset, tells it from one that is done sending and still reads."""
        poll = select.poll()
        poll.register(self._socket().fileno(), 0)
        return bool(poll.poll(0))

    def _socket(self) -> socket.socket:
        found: socket.socket = self._inner.get_extra_info("socket")
        return found


def watch_for_lost_peers(listener: socket.socket, unread_timeout_s: int) -> None:
    """The kernel will end a connection that `listener` accepts once the client's machine is gone.

    That is two minutes without an answer to probes, or `unread_timeout_s` without confirmation of sent bytes.
    """
    options = [("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)]
    options += [("TCP_USER_TIMEOUT", 1000 * unread_timeout_s)]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # Linux has them all
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Its warnings are limited to one line per kind and second.
logger = logging.getLogger("uvicorn.error")

MAX_HEADERS = 200
"""Headers of one request: each costs far more memory than its bytes."""
MAX_PIPELINED = 64
"""Requests that a client may send before the answer to an earlier one."""
_SLICE_BYTES = 8192
"""Input is parsed in slices: of an unfinished head only those are known in which it arrived."""

LINGER_S = 2.0
"""Time for a client to read a refusal and close its side."""
BODY_BYTES_PER_S = 65_536
"""Each of these adds a second to the time that a body may take."""

_unix_numbers = itertools.count(1)
"""Connections to a Unix socket are told apart by number: requests of different ones take turns in the queue."""

# How soon after a client's end of input the connection is first checked for a reset, and how rarely at last.
_FIRST_CHECK_S, _LAST_CHECK_S = 0.005, 1.0
# HTTP/1.0 has no way to find out whether a client that closed its side still reads: it gets this much time.
_HTTP_1_0_GRACE_S = 1.0


class _Refused(Exception):
    """Raised in the parser's callbacks to stop it; the protocol has noted why."""


class _GatedFlow(FlowControl):
    """Does not read on while a pipelined request waits: its successors would fill the memory."""

    def __init__(self, transport: asyncio.Transport, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class ConnectionProtocol(HttpToolsProtocol):
    """Beyond uvicorn's: sizes and times of `table.config`, half-closed connections, and refusals as JSON.

    A client that closes only its sending side gets its whole answer. Since a full close looks the same at first, the
    server then sends a few harmless bytes: if the client is gone, its machine answers with a reset, which counts as a
    disconnect.
    """

    transport: LingeringTransport

    def __init__(
        self,
        table: ConnectionTable,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = table
        self._limits = table.config
        self._active: RequestResponseCycle | None = None
        """The request being answered; `cycle` is the one received last."""
        self._has_headers = False
        """The headers of the request that is arriving are complete."""
        self._has_served = False
        """A complete request has arrived."""
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._num_body_bytes_in_slice = 0
        """Body bytes, of all requests, in the slice of data that is being parsed."""
        self._num_bytes_without_body = 0
        self._waited_s = 0.0
        """How long the client has kept the server waiting for what comes next."""
        self.url = b""  # so far; uvicorn sets it at the start of each request
        self._refusal: ApiError | None = None
        self._has_eof = False
        self._num_bytes_acked = 0
        self._stuck_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = LingeringTransport(transport)
        super().connection_made(self.transport)
        if self.client is None:  # of a Unix socket, where connections have no address
            self.client = ("unix", next(_unix_numbers))
        self.flow = _GatedFlow(self.transport, self.pipeline)
        if not self._table.add(self):
            limit = f"the server has {self._table.max_connections} open connections"
            self._refuse(TooManyConnections(limit))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.is_client_sending = False
        self._table.remove(self)
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def evict(self) -> None:
        self.transport.abort()

    def drop_head(self) -> None:
        self._refuse(HeadersTooLarge("the unfinished headers of all connections together are too large"))
        self.parser = httptools.HttpRequestParser(self)  # the old one holds the head
        self.url, self.headers = b"", []

    def shutdown(self) -> None:
        self.transport.is_client_sending = False  # no time to linger
        if self.transport.is_lingering:
            self.transport.abort()
        else:
            super().shutdown()

    # What arrives

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self._refusal is not None or self.transport.is_closing():
                return  # the rest is dropped
            self._receive(data[start : start + _SLICE_BYTES])

    def _receive(self, data: bytes) -> None:
        """data: up to _SLICE_BYTES."""
        self._num_body_bytes_in_slice = 0
        former_cycle = self.cycle
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or _describe(error))
            return
        if not self.transport.is_client_sending:
            return
        if not self._has_headers:
            # The parser shows a header only when it is complete. A body in the same slice is an earlier request's.
            num_head_bytes = self._table.add_head_bytes(self, len(data) - self._num_body_bytes_in_slice)
            if num_head_bytes > self._limits.max_header_bytes + self._limits.max_url_bytes:
                self._refuse(self._headers_too_large())
        elif self._num_body_bytes_in_slice == 0 and self.cycle is former_cycle:
            # trailers or extensions of chunks, of any length
            self._num_bytes_without_body += len(data)
            if self._num_bytes_without_body > self._limits.max_header_bytes:
                self._refuse(self._headers_too_large())

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError. An offer to upgrade to another protocol is ignored."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser took the end of the headers for the end of the request, and read no body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        """The head of the request that the parser has just read, without the offer to upgrade."""
        lines = [b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, self.scope["http_version"].encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.transport.is_client_sending = True
        self._has_headers = False
        self._num_header_bytes = 0
        if self._has_served:  # the first one's time began with the connection
            self._waited_s = 0.0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.max_url_bytes:
            limit = f"path and query may have at most {self._limits.max_url_bytes} bytes"
            self._stop_parsing(UrlTooLong(limit))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value) + 4  # ": " and the line's end
        if self._num_header_bytes > self._limits.max_header_bytes or len(self.headers) >= MAX_HEADERS:
            self._stop_parsing(self._headers_too_large())
        if not self._has_headers:  # trailers are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing(
                MalformedHttp(f"more than {MAX_PIPELINED} requests wait for the answer to an earlier one")
            )
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self.scope["http_version"] = self.parser.get_http_version()
            if self.scope["method"] == "CONNECT":  # always an upgrade for the parser
                self._stop_parsing(MalformedHttp("this server is no proxy"))
            return
        super().on_headers_complete()
        self._table.forget_head(self)
        self._has_headers = True
        self._waited_s = 0.0
        self._num_body_bytes = self._num_bytes_without_body = 0

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_body_bytes_in_slice += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.transport.is_client_sending = self._has_headers = False
        self._has_served = True
        self._waited_s = 0.0
        self._tell_table()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_answer_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Replaces uvicorn's, which starts a timer for every request and reads on whatever is pipelined."""
        self.server_state.total_requests += 1
        self._waited_s = 0.0
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._has_eof:
            self.transport.close()
        self._tell_table()
        self.flow.resume_reading()

    def _tell_table(self) -> None:
        """Whether the server works for the client, or waits for it."""
        is_active_incomplete = self._has_headers and self._active is self.cycle
        if self._is_answering() and not is_active_incomplete:
            self._table.set_busy(self)
        elif self.transport.is_client_sending:
            self._table.set_unfinished(self)
        else:
            self._table.set_idle(self)

    def _is_answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    # Refusals

    def _stop_parsing(self, error: ApiError) -> None:
        self._refusal = error
        raise _Refused

    def _refuse(self, error: ApiError) -> None:
        """Answer what is arriving with `error`, after the answers to earlier requests, and close the connection."""
        self._refusal = error
        logger.warning(f"refused a request with {error.status} ({error.code}): %s", error.message)
        if self.pipeline and self._has_headers:  # the newest is incomplete
            self.pipeline.popleft()
        elif not self._is_answering() or (self._has_headers and self._active is self.cycle):
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        cycle = self.cycle if self._has_headers else None
        self._waited_s = 0.0
        self.transport.is_client_sending = True  # it may be: let it read the answer
        if cycle is None or not cycle.response_started:
            headers = self.headers or []
            self.transport.write(_refusal_response(error, self.url, headers, self.server_state.default_headers))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.close()
        else:
            self.transport.abort()  # the answer that has begun cannot become an error

    def _headers_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"a request may have at most {MAX_HEADERS} headers, and {self._limits.max_header_bytes} bytes of them"
        )

    # End of the client's input

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """Whether to keep the connection open for the answer to a request that is complete."""
        active = self._active
        if active is None or active.response_complete or active.more_body or self.transport.is_lingering:
            return False
        if self._has_eof:
            return True
        self._has_eof = True
        if active.scope["http_version"] == "1.0":
            self.loop.call_later(_HTTP_1_0_GRACE_S, self.transport.abort)
            return True
        if not active.response_started:
            active.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif active.chunked_encoding:
            self.transport.write(b"0")  # a leading zero of the next chunk's size
        self._check_after_eof(_FIRST_CHECK_S)
        return True

    def _check_after_eof(self, next_in_s: float) -> None:
        if self.transport.is_closing():
            return
        if self.transport.is_hung_up():
            self.transport.abort()
        else:
            self.loop.call_later(next_in_s, self._check_after_eof, min(2 * next_in_s, _LAST_CHECK_S))

    # Timeouts

    def check(self, tick_s: float) -> None:
        """Called about once a second for every connection. tick_s: seconds since the last call."""
        if self.transport.get_write_buffer_size() > 0:
            self._check_writing(tick_s)
        else:
            self._stuck_s = 0.0
        if self.transport.is_lingering:
            self._waited_s += tick_s
            if self._waited_s > LINGER_S:
                self.transport.abort()
        elif self.flow.read_paused:
            if not self.transport.is_closing() and self.transport.is_hung_up():
                self.transport.abort()
        elif not self.transport.is_closing() and self._is_waiting():
            self._check_waiting()  # first: the tick may have begun before the wait
            self._waited_s += tick_s

    def _is_waiting(self) -> bool:
        """Whether it is the client's turn to send."""
        if self._refusal is not None:
            return False
        if self._has_headers:  # a response that has begun may take its time to read the body
            return not self.cycle.response_started or self.cycle.response_complete
        return not self._is_answering()

    def _check_waiting(self) -> None:
        limits = self._limits
        if self._has_headers:
            limit_s = limits.body_timeout_seconds + self._num_body_bytes / BODY_BYTES_PER_S
            if self._waited_s >= limit_s:
                limit = f"{limits.body_timeout_seconds} s and a second for each 64 KiB"
                self._refuse(RequestTimedOut(f"the body took longer than {limit}"))
        elif self.transport.is_client_sending:
            if self._waited_s >= limits.header_timeout_seconds:
                limit = f"{limits.header_timeout_seconds} s"
                self._refuse(RequestTimedOut(f"the headers took longer than {limit}"))
        elif self._waited_s >= (limits.keep_alive_seconds if self._has_served else limits.header_timeout_seconds):
            self.transport.close()

    def _check_writing(self, tick_s: float) -> None:
        acked = self.transport.num_bytes_acked()
        if acked != self._num_bytes_acked:
            self._num_bytes_acked, self._stuck_s = acked, 0.0
            return
        self._stuck_s += tick_s
        if self._stuck_s > self._limits.write_timeout_seconds:
            logger.warning("closed a connection whose client reads none of its answer")
            self.transport.abort()


async def _answer_without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer HTTP/1.0, whose clients know no chunks: an answer without content-length ends where the connection
    does."""
    is_until_close = False

    async def send_plainly(message: Message) -> None:
        nonlocal is_until_close
        if message["type"] == "http.response.start":
            is_until_close = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_until_close:
                cycle.chunked_encoding = False
        elif is_until_close:
            cycle.expected_content_length = len(message.get("body", b""))  # it checks that it gets no more
        await send(message)

    await app(scope, receive, send_plainly)


def _refusal_response(
    error: ApiError, url: bytes, request_headers: list[tuple[bytes, bytes]], default: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The response to a request of which only `url`, or its start, and `request_headers` may be known; afterwards the
    connection must close.

    default: headers of every response.
    """
    response = error_response(error)
    if is_for_messages(url):
        kept = {name: value for name, value in response.headers.items() if name != "content-length"}
        response = Response(write_messages_error(error.status, error.message), error.status, kept)
    own_id = request_id_of(Headers(raw=request_headers)).encode()
    headers = [*default, *response.raw_headers, (b"x-request-id", own_id), (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)])


def _describe(error: httptools.HttpParserError) -> MalformedHttp:
    if isinstance(error, httptools.HttpParserCallbackError):  # its text names a function of the parser
        return MalformedHttp("this is not a valid HTTP request: the URL is invalid")
    return MalformedHttp(f"this is not a valid HTTP request: {error}")
