"""One connection: beside the limits of sizes, its timeouts, and clients that close their sending side."""

from __future__ import annotations

import logging
from typing import Any

from tokasaurus.server.connections.refusing_protocol import RefusingProtocol
from tokasaurus.server.errors import RequestTimedOut

# Its warnings are limited to one line per kind and second.
logger = logging.getLogger("uvicorn.error")

LINGER_S = 2.0
"""Time for a client to read a refusal and close its side."""
BODY_BYTES_PER_S = 65_536
"""Each of these adds a second to the time that a body may take."""

# How soon after a client's end of input the connection is first checked for a reset, and how rarely at last.
_FIRST_CHECK_S, _LAST_CHECK_S = 0.005, 1.0
# HTTP/1.0 has no way to find out whether a client that closed its side still reads: it gets this much time.
_HTTP_1_0_GRACE_S = 1.0


class ConnectionProtocol(RefusingProtocol):
    """Beyond uvicorn's: sizes and times of `table.config`, half-closed connections, and refusals as JSON.

    A client that closes only its sending side gets its whole answer. Since a full close looks the same at first, the
    server then sends a few harmless bytes: if the client is gone, its machine answers with a reset, which counts as a
    disconnect.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_bytes_acked = 0
        self._stuck_s = 0.0

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
                limit = f"{limits.body_timeout_seconds} s and a second for each 64 KiB (body_timeout_seconds)"
                self._refuse(RequestTimedOut(f"the body took longer than {limit}"))
        elif self.transport.is_client_sending:
            if self._waited_s >= limits.header_timeout_seconds:
                limit = f"{limits.header_timeout_seconds} s (header_timeout_seconds)"
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
            logger.warning("closed a connection whose client reads none of its answer (write_timeout_seconds)")
            self.transport.abort()
