"""Runs Python's cyclic garbage collector at chosen moments, so that it does not interrupt a step.

Most objects are freed by reference counts. The collector finds cycles; to do so it visits every object of a generation,
and a full collection of a manager with thousands of sequences takes longer than a step of a fast device.
"""

import gc
import time

YOUNG_OBJECTS = 2_000
"""New objects that make a collection of the youngest generation worth its time: some tenths of a millisecond."""

YOUNG_PER_MIDDLE = 10
"""Collections of the youngest generation for one of the middle generation."""

OVERDUE_FACTOR = 10
"""With this many times YOUNG_OBJECTS, there is a collection even if the worker has little to do."""

IDLE_FULL_SECONDS, BUSY_FULL_SECONDS = 5.0, 60.0
"""Shortest time between two full collections if the worker has time for one, and longest time without one if not."""

SLACK = 2.0
"""A collection starts if the worker has enough work for this many times the time that it probably takes."""

NEW_WEIGHT = 0.3
"""Weight of the newest collection in the moving average of a generation's time."""


class GarbageCollector:
    """Replaces the automatic collector of this process, from its creation on.

    Everything that exists then is never visited again, so create it after start-up.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._seconds = [0.0005, 0.001, 0.005]  # expected time of a collection of each generation
        self._last_full_s = time.monotonic()

    def collect(self, seconds_left: float, is_idle: bool) -> None:
        """Run a collection if one is due and this is a good moment.

        seconds_left: how long the worker is busy with the steps it has. is_idle: no sequence runs or waits.
        """
        num_young, num_middle, num_old = gc.get_count()
        since_full_s = time.monotonic() - self._last_full_s
        has_new = num_young > 0 or num_middle > 0 or num_old > 0
        if has_new and self._is_due(2, since_full_s, (IDLE_FULL_SECONDS, BUSY_FULL_SECONDS), seconds_left, is_idle):
            self._run(2)
            self._last_full_s = time.monotonic()
            return
        generation = 1 if num_middle >= YOUNG_PER_MIDDLE else 0
        if self._is_due(generation, num_young, (YOUNG_OBJECTS, OVERDUE_FACTOR * YOUNG_OBJECTS), seconds_left, is_idle):
            self._run(generation)

    def _is_due(
        self, generation: int, amount: float, limits: tuple[float, float], seconds_left: float, is_idle: bool
    ) -> bool:
        """limits: the amount from which a collection is worth its time, and from which it runs in any case."""
        has_time = is_idle or SLACK * self._seconds[generation] < seconds_left
        return amount >= limits[0] and (has_time or amount >= limits[1])

    def _run(self, generation: int) -> None:
        start_s = time.perf_counter()
        gc.collect(generation)
        self._seconds[generation] += NEW_WEIGHT * (time.perf_counter() - start_s - self._seconds[generation])
