"""The HTTP server's life: it drains before it exits, and sweeps its connections."""

import asyncio
import functools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from tokasaurus.messages.lifecycle import STOP_AT_ONCE
from tokasaurus.server.connections.protocol import ConnectionProtocol
from tokasaurus.server.connections.table import ConnectionTable
from tokasaurus.server.engine_client.client import EngineClient

# How long the requests that are open after draining have to end with an error.
GRACE_S = 2
LISTEN_BACKLOG = 4096
_TICKS_PER_SWEEP = 10


def http_config(app: ASGIApp, connections: ConnectionTable) -> uvicorn.Config:
    """How uvicorn serves `app`. connections: empty; also needed by `HttpServer`."""
    log_level = connections.config.uvicorn_log_level
    protocol = functools.partial(ConnectionProtocol, connections)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=log_level,
        # one line per request is costly and useless with thousands of requests
        access_log=log_level in ("debug", "trace"),
        backlog=LISTEN_BACKLOG,
        timeout_graceful_shutdown=GRACE_S,
    )


class HttpServer(uvicorn.Server):
    """SIGTERM drains: new work is refused, and the server exits when its open requests have finished.

    Requests still open after drain_seconds, or when STOP_AT_ONCE arrives, end with an error.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, connections: ConnectionTable) -> None:
        super().__init__(config)
        self._engine = engine
        self._connections = connections
        self._drains_until_s: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: that one would re-raise the signals at the end, and also handle Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
            yield
            return
        signal.signal(signal.SIGTERM, lambda *_: self.drain())
        signal.signal(STOP_AT_ONCE, self.handle_exit)
        yield

    def drain(self) -> None:
        """Refuse new work from now on, and exit soon."""
        self._engine.is_draining = True
        if self._drains_until_s is None:
            self._drains_until_s = time.monotonic() + self._connections.config.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; true ends the server."""
        if counter % _TICKS_PER_SWEEP == 0:
            self._connections.sweep(time.monotonic())
        if self._drains_until_s is not None:
            has_open_requests = len(self.server_state.tasks) > 0
            self.should_exit |= not has_open_requests or time.monotonic() >= self._drains_until_s
        return await super().on_tick(counter)
