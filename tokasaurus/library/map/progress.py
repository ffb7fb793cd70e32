"""How far a `map` or another call is, in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from tokasaurus.library.bulk import Progress
from tokasaurus.library.counts import Counts
from tokasaurus.monitoring.progress import NoDisplay, Speed, make_display, show_rate, show_time, show_tokens

FIRST_S = 3.0
"""Time until something is shown of a call that is no `map`."""
_LOOK_S = 0.5


class MapProgress:
    """What the user sees of a call."""

    def __init__(self, num_rows: int | None, is_shown: bool, began_s: float | None = None) -> None:
        """num_rows: of the source; None if that is not known. began_s: when the call began, by time.monotonic(); None
        for now."""
        self._num_rows = num_rows
        self._display = make_display() if is_shown else NoDisplay()
        self._speed = Speed()
        self._speed.add(time.monotonic() if began_s is None else began_s, 0, 0)
        self._shown: Counts | None = None
        """Once something was shown: the end shows what they have come to."""

    def __enter__(self) -> MapProgress:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._show(self._shown, 0, None, is_last=True)
        self._display.close()

    def note(self, line: str) -> None:
        self._display.note(line)

    def update(self, counts: Counts, num_in_flight: int, told: Progress | None) -> None:
        """Call it often: it costs little between two changes of what is shown.

        counts: the same object each time.
        told: by the server, of the rows in flight; None if it has not told yet."""
        if self._display.is_due():
            self._show(counts, num_in_flight, told)
            self._shown = counts

    def _show(self, counts: Counts, num_in_flight: int, told: Progress | None, is_last: bool = False) -> None:
        self._speed.add(time.monotonic(), counts.num_finished, _num_tokens(counts, told))
        text = describe(counts, num_in_flight, told, self._num_rows, self._speed)
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
                num_in_flight = self._counts.num_rows - self._counts.num_finished
                shown.update(self._counts, num_in_flight, self._find_progress())


def describe(counts: Counts, num_in_flight: int, told: Progress | None, num_rows: int | None, speed: Speed) -> str:
    """`120 of 2,000 rows done, 3 errors, 9,600 of 160,000 tokens, 812.4 tokens/s, 3 min 5 s left`; rows with errors are
    done, too. Tokens are of this call, done of expected. What is not known is –."""
    num_done = counts.num_finished + counts.num_skipped
    total = "" if num_rows is None else f" of {num_rows:,}"
    errors = "1 error" if counts.num_errors == 1 else f"{counts.num_errors:,} errors"
    num_tokens, expected, left = _num_tokens(counts, told), None, ""
    if num_rows is not None and num_done < num_rows:
        expected = expected_tokens(counts, num_in_flight, told, num_rows)
        left = f", {show_time(seconds_left(counts, num_in_flight, told, num_rows, speed))} left"
    tokens, rate = show_tokens(num_tokens, expected), show_rate(speed.tokens_per_s())
    return f"{num_done:,}{total} rows done, {errors}, {tokens}, {rate} tokens/s{left}"


def expected_tokens(counts: Counts, num_in_flight: int, told: Progress | None, num_rows: int) -> float | None:
    """Output tokens of the call at its end. None until there is a basis: the tokens that the scheduler expects of the
    rows in flight, and for all others, the mean of the rows that have an answer."""
    num_left = max(0, num_rows - counts.num_finished - counts.num_skipped)
    num_answered = counts.num_finished - counts.num_errors
    if told is None or not told.num_requests or told.num_expected is None:
        return None
    mean = counts.output_tokens / num_answered if num_answered else told.num_expected / told.num_requests
    in_flight = max(told.num_expected, told.num_generated)
    return counts.output_tokens + in_flight + max(0, num_left - num_in_flight) * mean


def seconds_left(
    counts: Counts, num_in_flight: int, told: Progress | None, num_rows: int, speed: Speed
) -> float | None:
    """None until there is a basis: the expected tokens, or the rows that have been seen to finish."""
    tokens_per_s, rows_per_s = speed.tokens_per_s(), speed.items_per_s()
    expected = expected_tokens(counts, num_in_flight, told, num_rows)
    if tokens_per_s and expected is not None:
        return (expected - _num_tokens(counts, told)) / tokens_per_s
    return max(0, num_rows - counts.num_finished - counts.num_skipped) / rows_per_s if rows_per_s else None


def _num_tokens(counts: Counts, told: Progress | None) -> int:
    return counts.output_tokens + (0 if told is None else told.num_generated)
