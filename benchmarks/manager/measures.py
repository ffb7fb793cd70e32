"""What the manager does to keep a fast worker busy, and how to do without each measure, to show what it is worth.

Each function turns one measure off, in the process that calls it, until the process ends.
"""

import sys
import time
from collections.abc import Callable

from tokasaurus.manager import loop
from tokasaurus.manager.engine import outputs
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.planning.step_budget import SECONDS_QUEUED, num_steps_to_keep_in_flight
from tokasaurus.messages.forward import ForwardOutput

NEW_STEP_WEIGHT = 0.2
"""Weight of the newest step in the moving average of the time per step."""


def _replace(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def take_all_requests() -> None:
    """A round reads every new request, however long that takes."""
    _replace(loop.Intake, max_messages=lambda *_, **__: sys.maxsize)


def stream_each_token() -> None:
    """A stream gets a delta for each token."""
    _replace(outputs, STREAM_SECONDS=0.0)


class _AutomaticCollector:
    """Leaves garbage to Python, which collects it at any moment."""

    def collect(self, *_: object, **__: object) -> None:
        pass


def collect_at_any_moment() -> None:
    _replace(loop, GarbageCollector=_AutomaticCollector)


def expect_equal_steps() -> None:
    """Every step is expected to take the average time of all steps."""
    average: float | None = None

    def note_end(self: Engine, result: ForwardOutput, now_s: float) -> None:
        nonlocal average
        seconds = result.forward_seconds
        average = seconds if average is None else average + NEW_STEP_WEIGHT * (seconds - average)
        self.state.step_seconds = average
        self._step_began_s = now_s

    def seconds_left(self: Engine) -> float:
        seconds = len(self.state.steps_in_flight) * (average or 0.0)
        return max(0.0, seconds - (time.monotonic() - self._step_began_s))

    def wants_step(self: Engine, _seconds_wanted: float) -> bool:
        num_in_flight = len(self.state.steps_in_flight) - self._num_unapplied
        return num_in_flight < num_steps_to_keep_in_flight(average, self.state.options.config.scheduling_steps_ahead)

    _replace(Engine, _note_end=note_end, seconds_left=seconds_left, _wants_step=wants_step)


def apply_all_results_first() -> None:
    """No step is sent while results that have arrived are not applied."""
    fill = Engine._fill_worker_queue

    def fill_if_applied(self: Engine, seconds_wanted: float = SECONDS_QUEUED) -> None:
        if not self._num_unapplied:
            fill(self, seconds_wanted)

    _replace(Engine, _fill_worker_queue=fill_if_applied)


def switch_threads_slowly() -> None:
    """Threads wait for the GIL as long as Python lets them."""
    _replace(loop, SWITCH_SECONDS=sys.getswitchinterval())


MEASURES: dict[str, Callable[[], None]] = {
    "bounds_intake": take_all_requests,
    "coalesces_streams": stream_each_token,
    "collects_in_pauses": collect_at_any_moment,
    "predicts_steps": expect_equal_steps,
    "sends_between_results": apply_all_results_first,
    "switches_threads_fast": switch_threads_slowly,
}
"""By name of the measure: what turns it off."""
