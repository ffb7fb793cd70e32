"""How late the event loop runs its callbacks: while one of them, or a thread with the GIL, works, all clients wait."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.05
WINDOW_S = 10.0
STALL_S = 0.25


class LoopLag:
    """Measures the running event loop within `measuring`."""

    def __init__(self) -> None:
        self.num_stalls = 0
        """Lags of more than STALL_S since the start."""
        # (time.monotonic(), lag) in order, without lags that were followed by a larger one.
        self._lags: deque[tuple[float, float]] = deque()

    def largest_s(self) -> float:
        """The largest lag of the last WINDOW_S, in seconds."""
        self._drop_old(time.monotonic())
        return self._lags[0][1] if self._lags else 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        task = asyncio.get_running_loop().create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()

    async def _measure(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(INTERVAL_S)
            now = time.monotonic()
            self._add(now, max(0.0, now - started - INTERVAL_S))

    def _add(self, now: float, lag: float) -> None:
        self.num_stalls += lag > STALL_S
        while self._lags and self._lags[-1][1] <= lag:
            self._lags.pop()
        self._lags.append((now, lag))
        self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._lags and self._lags[0][0] < now - WINDOW_S:
            self._lags.popleft()
