"""Notices a model worker that hangs: one that does not return a step for much longer than the step should take."""

from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.lifecycle import HEARTBEAT_SECONDS

LATE_FACTOR = 4.0
"""A step is late after this many times its longest plausible time, for each stage that it passes."""

PAUSE_SECONDS = 5 * HEARTBEAT_SECONDS
"""If the manager does not look for this long, it was probably stopped itself, and the worker with it. In seconds."""


class WorkerWatch:
    """Look at least every HEARTBEAT_SECONDS. watchdog_s: no step is late before this time, in seconds."""

    def __init__(self, watchdog_s: float, now_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._last_result_id = -1
        self._progress_s = self._looked_s = now_s

    def is_late(self, state: EngineState, now_s: float) -> bool:
        """Whether the oldest step in flight is late. now_s: by a clock that never goes back, in seconds."""
        was_stopped = now_s - self._looked_s > PAUSE_SECONDS
        self._looked_s = now_s
        if not state.steps_in_flight or state.last_result_id != self._last_result_id or was_stopped:
            self._last_result_id, self._progress_s = state.last_result_id, now_s
            return False
        longest_s = state.step_times.longest(state.steps_in_flight[0].cost)
        waited_s: float = now_s - self._progress_s
        return waited_s > max(self._watchdog_s, LATE_FACTOR * state.options.num_stages * longest_s)
