"""The file of record=: whole lines, continued, bounded, and never another's file."""

import errno
import logging
import os
from pathlib import Path

import pytest

from tokasaurus.messages.status import UserError
from tokasaurus.server.recording import Recording, opened_recording

LINES = [b'{"format":1,"time":%d}' % number for number in range(6)]


def add_all(path: Path, lines: list[bytes], max_bytes: int = 1 << 20) -> None:
    recording = Recording(str(path), max_bytes)
    for line in lines:
        recording.add(line)
    recording.close()


def test_lines_are_in_the_file_at_once_and_a_later_server_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with opened_recording(str(path)) as recording:
        assert recording is not None
        for number, line in enumerate(LINES[:3], 1):
            recording.add(line)
            assert path.read_bytes().splitlines() == LINES[:number]
    add_all(path, LINES[3:])
    assert path.read_bytes().splitlines() == LINES
    with opened_recording(None) as recording:
        assert recording is None


@pytest.mark.parametrize("tail", [b'{"format":1,"ti', b"{", b'{"format":1,"time":9}'])
def test_a_line_that_a_killed_server_did_not_finish_is_dropped(tmp_path: Path, tail: bytes) -> None:
    for whole in ([], LINES[:2]):
        path = tmp_path / f"{len(whole)}.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in whole) + tail)
        add_all(path, LINES[2:4])
        assert path.read_bytes().splitlines() == [*whole, *LINES[2:4]]


@pytest.mark.parametrize("content", [b"notes\n", b'{"custom_id": "1"}\n', b"\x89PNG"])
def test_a_file_that_is_no_recording_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no recording"):
        Recording(str(path))
    assert path.read_bytes() == content


def test_what_cannot_be_recorded_to_is_refused_with_the_flag(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "file", Path("/dev/null")):
        with pytest.raises(UserError, match=r"^record="):
            Recording(str(path))
    first = Recording(str(tmp_path / "run"))
    with pytest.raises(UserError, match="another server records to it"):
        Recording(str(tmp_path / "run"))
    first.close()
    Recording(str(tmp_path / "run")).close()


def test_a_file_that_is_full_is_renamed_and_another_begins(tmp_path: Path) -> None:
    path, size = tmp_path / "run.jsonl", len(LINES[0]) + 1
    add_all(path, LINES, max_bytes=2 * size)
    assert path.read_bytes().splitlines() == LINES[4:]
    assert (tmp_path / "run.jsonl.1").read_bytes().splitlines() == LINES[2:4]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.jsonl", "run.jsonl.1"]


def test_a_full_disk_costs_lines_one_warning_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    recording, write = Recording(str(path)), os.pwrite
    num_left = 2 * (len(LINES[0]) + 1) + 7

    def write_until_full(file: int, content: bytes, offset: int) -> int:
        nonlocal num_left
        if not num_left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, content[:num_left], offset)
        num_left -= written
        return written

    monkeypatch.setattr(os, "pwrite", write_until_full)
    with caplog.at_level(logging.INFO, "tokasaurus.server.recording"):
        for line in LINES[:4]:
            recording.add(line)
        assert path.read_bytes().splitlines() == LINES[:2]
        num_left = 1000
        recording.add(LINES[4])
    assert path.read_bytes().splitlines() == [*LINES[:2], LINES[4]]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "No space left on device" in caplog.text
    recording.close()
