"""What the launcher starts again when it has died: its processes, when the next start is, and when it is given up."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tokasaurus.messages.status import Failed
from tokasaurus.processes.group import DEATH_S, Child, ProcessGroup

if TYPE_CHECKING:
    from tokasaurus.startup_report import StartupReport

HEALTHY_SECONDS = 10.0
"""What was ready for this long had no lasting fault: earlier failures are forgotten."""

MAX_PAUSE_SECONDS = 30.0


class Restarted(ABC):
    """Processes that start and die together. `children` is empty between a failure and the next start.

    max_restarts: as of RestartPolicy.
    """

    def __init__(self, name: str, group: ProcessGroup, max_restarts: int) -> None:
        """name: shown to the user, such as "the server"."""
        self.name = name
        self.children: list[Child] = []
        self.restart_at_s: float | None = None
        """When to start again, by time.monotonic(); None while it runs."""
        self.exit_code = 1
        """Of the launcher, if a failure of these processes ends it."""
        self.has_been_ready = False
        self.num_restarts = 0
        self.policy = RestartPolicy(max_restarts)
        self._group = group
        self._started_s = time.monotonic()

    @abstractmethod
    def start(self) -> None:
        """Start the processes. Raises OSError."""

    @abstractmethod
    def find_failure(self, report: StartupReport) -> str | None:
        """Take the processes' messages; one line that says which of them failed and how, None if none did."""

    def stop(self) -> None:
        """Kill all its processes."""
        self._group.remove(self.children)
        self.children = []

    @property
    def is_intact(self) -> bool:
        """It has been started, and none of its processes has died."""
        return bool(self.children) and all(child.process.is_alive() for child in self.children)

    def _note_start(self) -> None:
        self._started_s, self.restart_at_s = time.monotonic(), None

    def _note_ready(self, report: StartupReport) -> None:
        now_s = time.monotonic()
        if self.has_been_ready:
            seconds = now_s - self._started_s
            report.show_line(f"{self.name} is ready again after {seconds:.1f} s (restart {self.num_restarts})")
        self.has_been_ready = True
        self.policy.note_ready(now_s)


class RestartPolicy:
    """Counts consecutive failures. max_restarts: most restarts that may fail in a row."""

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


def describe_failure(children: list[Child], failed: list[Failed]) -> str | None:
    """The most likely cause among the dead of `children` and what processes reported; None if there is neither.

    A killed process comes first: it is the cause of failures that the others report.
    """
    dead = [child for child in children if not child.process.is_alive()]
    for child in dead:
        child.process.join(DEATH_S)
    causes = [child.describe_death() for child in dead if child.was_killed]
    causes += [f"{message.process} failed: {message.message}" for message in failed]
    causes += [child.describe_death() for child in dead if child.process.exitcode]
    causes += [child.describe_death() for child in dead]
    return causes[0] if causes else None
