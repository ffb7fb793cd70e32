"""When the manager runs its deferred tasks: not while the worker may run out of steps."""

from collections.abc import Callable
from dataclasses import dataclass

from tokasaurus.manager.state.engine_state import EngineState

NEW_RUN_WEIGHT = 0.2
"""Weight of the newest run in the moving average of a task's time."""


@dataclass(slots=True)
class DeferredTask:
    """Work that a step may leave for a later step."""

    name: str
    has_work: Callable[[EngineState], bool]
    """Whether there is anything to do."""
    run: Callable[[EngineState], None]
    max_steps_deferred: int
    """Most consecutive steps that may defer it."""
    seconds: float = 0.0
    """Moving average of its running time."""
    num_steps_deferred: int = 0
    """Steps that have deferred it since it last ran."""

    def note_run(self, seconds: float) -> None:
        self.seconds += NEW_RUN_WEIGHT * (seconds - self.seconds)
        self.num_steps_deferred = 0


def may_run(task: DeferredTask, seconds_left: float, mode: str | None) -> bool:
    """Whether to run `task` now rather than defer it.

    seconds_left: how long the worker is busy with the steps it has. mode: "always", "deferred" (defer as long as
    allowed), or None: defer while the task is expected to take half of seconds_left or more.
    """
    if mode == "always" or task.num_steps_deferred >= task.max_steps_deferred:
        return True
    return mode is None and 2 * task.seconds < seconds_left
