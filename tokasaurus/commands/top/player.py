"""The course of a replay: which sample is shown when, and jumps."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from tokasaurus.commands.top.history import History
from tokasaurus.commands.top.recording import Recording

_MAX_GAP_S = 5.0
"""A longer time between two samples is shortened to this."""
_LOADED_SAMPLES = 300
"""Samples before the place of a jump that are read for its history."""


class Player:
    """Where a replay is. Positions are recorded seconds from the first sample, with long gaps shortened."""

    def __init__(self, recording: Recording, speed: float) -> None:
        """Raises RecordingError."""
        self.history = History()
        self._recording = recording
        self._speed = speed
        self._positions = positions_of(recording.times)
        self._index = 0
        self._position = 0.0
        self._load()

    @property
    def position(self) -> float:
        """Position of the sample that is shown."""
        return self._positions[self._index]

    @property
    def duration(self) -> float:
        return self._positions[-1]

    @property
    def is_at_end(self) -> bool:
        return self._index == len(self._positions) - 1

    def seconds_to_next(self) -> float | None:
        """None while no other sample will be shown."""
        if self.is_at_end:
            return None
        return max(0.0, self._positions[self._index + 1] - self._position) / self._speed

    def pass_time(self, seconds: float) -> None:
        """Go on by the samples of this time. Raises RecordingError."""
        self._position = min(self._position + seconds * self._speed, self.duration)
        last = self._index_at(self._position)
        if last - self._index > _LOADED_SAMPLES:
            self._index = last
            self._load()
        while self._index < last:
            self._index += 1
            self.history.add(self._recording.sample(self._index))

    def jump(self, seconds: float) -> None:
        """Forwards, or backwards if negative. Raises RecordingError."""
        self._position = min(max(0.0, self.position + seconds), self.duration)
        self._index = self._index_at(self._position)
        self._load()

    def _index_at(self, position: float) -> int:
        return max(0, bisect_right(self._positions, position) - 1)

    def _load(self) -> None:
        self.history = History()
        for index in range(max(0, self._index - _LOADED_SAMPLES), self._index + 1):
            self.history.add(self._recording.sample(index))


def positions_of(times: Sequence[float]) -> list[float]:
    """Recorded seconds of each sample since the first, with long gaps shortened; a clock set back passes no time."""
    gaps = (min(max(0.0, after - before), _MAX_GAP_S) for before, after in itertools.pairwise(times))
    return list(itertools.accumulate(gaps, initial=0.0))
