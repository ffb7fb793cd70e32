"""Files with one sample per line, read for a replay."""

import itertools
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tokasaurus.commands.top.history import History
from tokasaurus.commands.top.samples import NotASample, Sample, UnknownFormat, read_sample
from tokasaurus.messages.status import UserError

_MAX_GAP_S = 5.0
"""A longer time between two samples is shortened to this."""
_LOADED_SAMPLES = 300
"""Samples before the place of a jump that are read for its history."""


class RecordingError(UserError):
    """One line says what is wrong with the file."""


class Recording:
    """The samples of a file, read from it when they are asked for. Its last line may be cut, and lines that are no
    samples are left out: a server that was killed may have begun them."""

    def __init__(self, path: str) -> None:
        """Reads the whole file once. Raises RecordingError, also for another version of the format."""
        self._path = path
        self._offsets = array("Q")
        self.times = array("d")
        """Unix seconds."""
        self.num_left_out = 0
        """Lines that are no samples, without the last one."""
        why, offset = "", 0
        with _named(path):
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 (until the command ends)
            for number, line in enumerate(self._file, start=1):
                try:
                    self.times.append(read_sample(line)["time"])
                    self._offsets.append(offset)
                except UnknownFormat as error:
                    raise RecordingError(f"replay={path}: line {number}: {error}") from None
                except NotASample as error:
                    why = why or f"line {number} is {error}"
                    self.num_left_out += line.endswith(b"\n")
                offset += len(line)
        if not self.times:
            raise RecordingError(f"replay={path}: no recording: {why or 'the file is empty'}")

    def line(self, index: int) -> bytes:
        """The line as it was recorded, without its end. Raises RecordingError."""
        with _named(self._path):
            self._file.seek(self._offsets[index], os.SEEK_SET)
            return self._file.readline().rstrip(b"\r\n")

    def sample(self, index: int) -> Sample:
        """Raises RecordingError, also if the file has changed since it was opened."""
        try:
            return read_sample(self.line(index))
        except NotASample as error:
            raise RecordingError(f"replay={self._path}: the file has changed: {error}") from None


class Player:
    """Where a replay is. Positions are recorded seconds from the first sample, with long gaps shortened."""

    def __init__(self, recording: Recording, speed: float) -> None:
        """Raises RecordingError."""
        self._recording, self._speed = recording, speed
        self._positions = positions_of(recording.times)
        self.duration = self._positions[-1]
        self._position = 0.0
        self._index = -1
        self.jump(0.0)

    @property
    def position(self) -> float:
        """Position of the sample that is shown."""
        return self._positions[max(0, self._index)]

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
        self._show(max(0, bisect_right(self._positions, self._position) - 1))

    def jump(self, seconds: float) -> None:
        """Forwards, or backwards if negative. Raises RecordingError."""
        self._position = min(max(0.0, self.position + seconds), self.duration)
        self.history = History()
        self._index = -1
        self._show(max(0, bisect_right(self._positions, self._position) - 1))

    def _show(self, last: int) -> None:
        if last - self._index > _LOADED_SAMPLES:
            self.history, self._index = History(), last - _LOADED_SAMPLES - 1
        for index in range(self._index + 1, last + 1):
            self.history.add(self._recording.sample(index))
        self._index = last


def positions_of(times: Sequence[float]) -> list[float]:
    """Recorded seconds of each sample since the first, with long gaps shortened; a clock set back passes no time."""
    gaps = (min(max(0.0, after - before), _MAX_GAP_S) for before, after in itertools.pairwise(times))
    return list(itertools.accumulate(gaps, initial=0.0))


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordingError(f"replay={path}: {error.strerror}") from None
