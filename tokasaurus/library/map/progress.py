"""How far a `map` or another call is, in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from tokasaurus.library.bulk import Progress
from tokasaurus.library.counts import Counts
from tokasaurus.monitoring.progress import Display, make_display, show_left, show_rate, show_tokens
from tokasaurus.monitoring.time_left import Done, Pace

FIRST_S = 3.0
"""Time until something is shown of a call that is no `map`."""
_LOOK_S = 0.5


class MapProgress:
    """What the user sees of a call."""

    def __init__(self, num_rows: int | None, is_shown: bool, began_s: float | None = None) -> None:
        """num_rows: of the source; None if that is not known. began_s: when the call began, by time.monotonic(); None
        for now."""
        self._num_rows = num_rows
        self._display = make_display() if is_shown else Display()
        self._pace = Pace()
        self._pace.note(Done(time.monotonic() if began_s is None else began_s))
        self._shown: Counts | None = None
        """Once something was shown: the end shows what they have come to."""

    def __enter__(self) -> MapProgress:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._show(self._shown, None, is_last=True)
        self._display.close()

    def note(self, line: str) -> None:
        self._display.note(line)

    def update(self, counts: Counts, told: Progress | None) -> None:
        """Call it often: it costs little between two changes of what is shown.

        counts: the same object each time.
        told: by the server, of the rows in flight; None if it has not told yet."""
        if self._display.is_due():
            self._show(counts, told)
            self._shown = counts

    def _show(self, counts: Counts, told: Progress | None, is_last: bool = False) -> None:
        self._pace.note(Done(time.monotonic(), _num_tokens(counts, told)))
        text = describe(counts, told, self._num_rows, self._pace.tokens_per_s())
        self._display.show(text, counts.num_finished + counts.num_skipped, self._num_rows, is_last)


class ShownCall:
    """Shows, in a thread, how far a call is that returns only when it is done, once it takes some seconds."""

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
                shown.update(self._counts, self._find_progress())


def describe(counts: Counts, told: Progress | None, num_rows: int | None, tokens_per_s: float | None) -> str:
    """`120 of 2,000 rows done, 3 errors, 9,600 of 160,000 tokens, 812.4 tokens/s, 3 min 5 s left`; rows with errors are
    done, too. Tokens are of this call, done of expected. What is not known is –."""
    num_done = counts.num_finished + counts.num_skipped
    total = "" if num_rows is None else f" of {num_rows:,}"
    errors = "1 error" if counts.num_errors == 1 else f"{counts.num_errors:,} errors"
    expected, left = None, ""
    if num_rows is not None and num_done < num_rows:
        left = f", {show_left(None if told is None else told.time_left)} left"
        if told is not None and told.num_expected is not None:
            expected = counts.output_tokens + told.num_expected
    tokens, rate = show_tokens(_num_tokens(counts, told), expected), show_rate(tokens_per_s)
    return f"{num_done:,}{total} rows done, {errors}, {tokens}, {rate} tokens/s{left}"


def _num_tokens(counts: Counts, told: Progress | None) -> int:
    return counts.output_tokens + (0 if told is None else told.num_generated)
