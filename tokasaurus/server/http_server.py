"""The HTTP server's life: it drains before it exits."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tokasaurus.messages.lifecycle import STOP_AT_ONCE
from tokasaurus.server.engine_client.client import EngineClient


class HttpServer(uvicorn.Server):
    """SIGTERM drains: new work is refused, and the server exits when its open requests have finished.

    Requests still open after `drain_seconds`, or when STOP_AT_ONCE arrives, end with an error.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._drains_until_s: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: that one would re-raise the signals at the end, and also handle Ctrl-C."""
        signal.signal(signal.SIGTERM, lambda *_: self.drain())
        signal.signal(STOP_AT_ONCE, self.handle_exit)
        yield

    def drain(self) -> None:
        """Refuse new work from now on, and exit soon."""
        self._engine.is_draining = True
        if self._drains_until_s is None:
            self._drains_until_s = time.monotonic() + self._drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; true ends the server."""
        if self._drains_until_s is not None:
            has_open_requests = len(self.server_state.tasks) > 0
            self.should_exit |= not has_open_requests or time.monotonic() >= self._drains_until_s
        return await super().on_tick(counter)
