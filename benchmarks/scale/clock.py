"""The simulation's clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class VirtualClock:
    """Seconds since the simulation's start, which only the simulation moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    @contextmanager
    def in_place_of_monotonic(self) -> Iterator[None]:
        """Within the context, this process reads this clock by `time.monotonic`, as managers do. A manager's own work
        then takes no time, so it never defers any."""
        real = time.monotonic
        time.monotonic = lambda: self.now_s
        try:
            yield
        finally:
            time.monotonic = real
