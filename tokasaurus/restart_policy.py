"""When a replica that died is started again, and when not any more."""

import math

HEALTHY_SECONDS = 10.0
"""A replica that was ready for this long had no lasting fault: earlier failures are forgotten."""

MAX_PAUSE_SECONDS = 30.0


class RestartPolicy:
    """Counts the consecutive failures of one replica. max_restarts: most restarts that may fail in a row."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_failures = 0
        self._ready_s = math.inf

    def note_ready(self, now_s: float) -> None:
        self._ready_s = now_s

    def note_failure(self, now_s: float) -> float | None:
        """Seconds to wait before the next start: 0, then 1, 2, 4, … None: do not start again."""
        if now_s - self._ready_s >= HEALTHY_SECONDS:
            self._num_failures = 0
        self._ready_s = math.inf
        self._num_failures += 1
        if self._num_failures > self._max_restarts:
            return None
        return 0.0 if self._num_failures == 1 else min(MAX_PAUSE_SECONDS, 2.0 ** (self._num_failures - 2))
