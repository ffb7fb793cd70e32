"""What a pipeline stage counts while somebody watches: its steps, and for how long they computed and waited."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokasaurus.messages.stages import StageBoard, StageTotals
from tokasaurus.model.staging.staging import Mark


class StageTimes:
    """Busy and waiting seconds of one stage's steps.

    For each step, in order: `begin`; `waiting` around each wait for another stage; `end`. Times are between marks, and
    so the device's. They are measured only while somebody watches.
    """

    def __init__(self, board: StageBoard | None, stage: int, mark: Callable[[], Mark]) -> None:
        """board: None: nothing is counted. mark: as Transfers.mark."""
        self._board = board
        self._stage = stage
        self._mark = mark
        self._marks: list[Mark] = []
        """Marks of the present step: its begin, then begin and end of each wait. Empty if it is not measured."""
        self._ended: deque[list[Mark]] = deque()
        """The marks of steps that the device may still compute."""
        self._num_steps, self._busy_s, self._waiting_s = 0, 0.0, 0.0

    def begin(self) -> None:
        if self._board is not None and self._board.is_watched:
            self._marks = [self._mark()]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if not self._marks:
            yield
            return
        self._marks.append(self._mark())
        yield
        self._marks.append(self._mark())

    def end(self) -> None:
        """The step is launched."""
        if self._board is None:
            return
        if self._marks:
            self._marks.append(self._mark())
        self._ended.append(self._marks)
        self._marks = []
        while self._ended and (not self._ended[0] or self._ended[0][-1].is_reached()):
            self._count(self._ended.popleft())
        self._board.write(self._stage, StageTotals(self._num_steps, self._busy_s, self._waiting_s))

    def _count(self, marks: list[Mark]) -> None:
        self._num_steps += 1
        if marks:
            begin, *waits, end = marks
            waited_s = sum(after.seconds_since(before) for before, after in zip(waits[::2], waits[1::2], strict=True))
            self._waiting_s += waited_s
            self._busy_s += end.seconds_since(begin) - waited_s
