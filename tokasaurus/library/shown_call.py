"""How far a call is that returns when it is done, shown to the user if it takes longer than some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from tokasaurus.library.bulk import Progress
from tokasaurus.library.counts import Counts
from tokasaurus.library.map.progress import MapProgress

FIRST_S = 3.0
"""Time until something is shown."""
_LOOK_S = 0.5


class ShownCall:
    """Within the context, a thread shows how far the call is."""

    def __init__(self, num_rows: int, counts: Counts, find_progress: Callable[[], Progress | None]) -> None:
        """counts: changes while the call runs. find_progress: what the server has told of the rows in flight."""
        self._num_rows = num_rows
        self._counts = counts
        self._find_progress = find_progress
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> ShownCall:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._has_ended.wait(FIRST_S):
            return
        with MapProgress(self._num_rows, is_shown=True, began_s=self._began_s) as shown:
            while not self._has_ended.wait(_LOOK_S):
                num_in_flight = self._counts.num_rows - self._counts.num_finished
                shown.update(self._counts, num_in_flight, self._find_progress())
