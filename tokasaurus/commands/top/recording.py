"""Files with one sample per line: written while watching, and read for a replay."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from typing_extensions import Self

from tokasaurus.commands.top.samples import NotASample, Sample, UnknownFormat, read_sample


class RecordingError(Exception):
    """One line says what is wrong with the file."""


class Recorder:
    """Writes samples to a new file, which is there from the first one on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        """Raises RecordingError, also if the file exists."""
        try:
            if self._file is None:
                self._file = Path(self._path).open("xb", buffering=0)  # noqa: SIM115 (closed by `close`)
            self._file.write(line + b"\n")
        except OSError as error:
            raise RecordingError(f"record={self._path}: {error.strerror}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
        why = "the file is empty"
        try:
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 (closed by `close`)
            offset = 0
            for number, line in enumerate(self._file, start=1):
                try:
                    sample = read_sample(line)
                except UnknownFormat as error:
                    raise RecordingError(f"replay={path}: line {number}: {error}") from None
                except NotASample as error:
                    why = f"line {number} is {error}" if why == "the file is empty" else why
                    self.num_left_out += line.endswith(b"\n")
                else:
                    self._offsets.append(offset)
                    self.times.append(sample.time)
                offset += len(line)
        except OSError as error:
            raise RecordingError(f"replay={path}: {error.strerror}") from None
        if not self.times:
            raise RecordingError(f"replay={path}: no recording: {why}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.times)

    def line(self, index: int) -> bytes:
        """The line as it was recorded, without its end. Raises RecordingError."""
        try:
            self._file.seek(self._offsets[index], os.SEEK_SET)
            return self._file.readline().rstrip(b"\r\n")
        except OSError as error:
            raise RecordingError(f"replay={self._path}: {error.strerror}") from None

    def sample(self, index: int) -> Sample:
        """Raises RecordingError, also if the file has changed since it was opened."""
        try:
            return read_sample(self.line(index))
        except NotASample as error:
            raise RecordingError(f"replay={self._path}: the file has changed: {error}") from None
