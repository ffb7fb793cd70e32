"""When the manager does the work that can wait: not while the worker may run out of steps."""

from collections.abc import Callable
from dataclasses import dataclass

from tokasaurus.manager.state.engine_state import EngineState

NEW_RUN_WEIGHT = 0.2
"""Of the newest run in the moving average of a task's time."""


@dataclass(slots=True)
class DeferredTask:
    """Work that a turn may leave for a later one.

    has_work: whether there is anything to do. max_steps_deferred: how many turns in a row it may be put off.
    seconds: moving average of its time. num_steps_deferred: turns in which it has been put off since it last ran.
    """

    name: str
    has_work: Callable[[EngineState], bool]
    run: Callable[[EngineState], None]
    max_steps_deferred: int
    seconds: float = 0.0
    num_steps_deferred: int = 0

    def note_run(self, seconds: float) -> None:
        self.seconds += NEW_RUN_WEIGHT * (seconds - self.seconds)
        self.num_steps_deferred = 0


def may_run(task: DeferredTask, seconds_left: float, mode: str | None) -> bool:
    """Whether to do `task` now, or to put it off.

    seconds_left: for how long the worker has steps to compute. mode: "always", "deferred" (put off
    as long as it may be), or None: put off while it might take longer than half of that.
    """
    if mode == "always" or task.num_steps_deferred >= task.max_steps_deferred:
        return True
    return mode is None and 2 * task.seconds < seconds_left
