"""Figures of pipeline stages, in memory that the processes of a replica share: nothing is sent, and nobody waits.

The first rank of each stage writes them, and the manager reads them while somebody watches."""

import multiprocessing
import time
from dataclasses import dataclass

WATCHED_SECONDS = 5.0
"""How long stages measure times after the manager has looked, which it does once a second while somebody watches."""

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Work of one stage since the start of the replica. Seconds are counted only while somebody watches."""

    num_steps: int = 0
    """Steps that the stage has computed."""
    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Time within its steps in which it waited for what other stages send or receive."""

    def since(self, before: "StageTotals") -> "StageTotals":
        """The growth from `before` to this."""
        return StageTotals(
            self.num_steps - before.num_steps,
            self.busy_seconds - before.busy_seconds,
            self.waiting_seconds - before.waiting_seconds,
        )


class StageBoard:
    """Made before the processes are spawned, and handed to them. Each number has one writer and is read as a whole."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        # When the manager looked last, by time.monotonic, which all processes share; then three numbers of each stage.
        self._numbers = _SPAWN.RawArray("d", 1 + 3 * num_stages)
        self._numbers[0] = -WATCHED_SECONDS

    @property
    def is_watched(self) -> bool:
        return bool(time.monotonic() - self._numbers[0] < WATCHED_SECONDS)

    def write(self, stage: int, totals: StageTotals) -> None:
        self._numbers[1 + 3 * stage : 4 + 3 * stage] = [
            float(totals.num_steps),
            totals.busy_seconds,
            totals.waiting_seconds,
        ]

    def look(self) -> tuple[StageTotals, ...]:
        """The totals of each stage, which measure times from now on."""
        self._numbers[0] = time.monotonic()
        numbers = self._numbers[1:]
        return tuple(
            StageTotals(int(numbers[first]), *numbers[first + 1 : first + 3]) for first in range(0, len(numbers), 3)
        )
