"""A directory in the cache is complete or absent, whatever happens to the process that writes it, and heals."""

import logging
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.damage import DAMAGE
from tests.helpers.limits import read_line
from tokasaurus.checkpoint import cache, resolve_checkpoint
from tokasaurus.checkpoint.cache import build_once, cache_directory, is_intact
from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("TOKA_CACHE", "/own")
    assert cache_directory() == Path("/own")
    monkeypatch.delenv("TOKA_CACHE")
    assert cache_directory() == Path("/xdg/tokasaurus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/home/someone/.cache/tokasaurus")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory for temporary files, of a user without a home directory."""
    for name in ("HOME", "XDG_CACHE_HOME", "TOKA_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_the_cache_is_a_private_temporary_directory(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = temporary / f"tokasaurus-{os.getuid()}"
    assert [cache_directory() for _ in range(3)] == [expected] * 3
    assert stat.S_IMODE(expected.stat().st_mode) == 0o700
    (line,) = caplog.messages
    assert str(expected) in line
    assert "TOKA_CACHE" in line


@pytest.mark.parametrize("kind", ["link", "writable", "file"])
def test_a_temporary_directory_that_others_could_have_made_is_refused(temporary: Path, kind: str) -> None:
    path = temporary / f"tokasaurus-{os.getuid()}"
    if kind == "link":
        (temporary / "theirs").mkdir()
        path.symlink_to(temporary / "theirs")
    elif kind == "writable":
        path.mkdir()
        path.chmod(0o777)
    else:
        path.touch()
    with pytest.raises(CheckpointUnavailable, match=r"not this user's alone; set .TOKA_CACHE"):
        cache_directory()


def test_a_home_directory_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", "~no-such-user/x")
    with pytest.raises(CheckpointError, match=r"^TOKA_CACHE=~no-such-user/x: there is no such home directory$"):
        cache_directory()
    monkeypatch.delenv("TOKA_CACHE")
    with pytest.raises(CheckpointError, match=r"^model=~no-such-user/x: there is no such home directory$"):
        resolve_checkpoint("~no-such-user/x")


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    builds = []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "file").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: build_once(tmp_path / "a" / "b", build), range(8)))
    assert len(builds) == 1
    assert set(results) == {tmp_path / "a" / "b"}
    assert (results[0] / "file").read_text() == "whole"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        build_once(tmp_path / "built", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".built.lock"]
    built = build_once(tmp_path / "built", lambda directory: (directory / "file").touch())
    assert sorted(path.name for path in built.iterdir()) == ["checksums.json", "file"]


def test_the_next_build_removes_the_files_of_a_killed_build(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from tokasaurus.checkpoint.cache import build_once
def build(directory):
    (directory / "half").write_text("half")
    print("started", flush=True)
    time.sleep(60)
build_once(Path(sys.argv[1]), build)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "built")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as stdout:
        assert read_line(process, stdout) == b"started\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "built").exists()
    built = build_once(tmp_path / "built", lambda directory: (directory / "file").touch())
    assert sorted(path.name for path in built.iterdir()) == ["checksums.json", "file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".built.lock", "built"]


def test_an_unwritable_directory_gives_an_error_that_names_toka_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointUnavailable, match=r"cannot write .*TOKA_CACHE"):
        build_once(tmp_path / "file" / "below", lambda _: None)


WRITE_AGAIN = """
import sys
from pathlib import Path
from tokasaurus.checkpoint.cache import build_once
def build(directory):
    print("built")
    (directory / "file").write_text("whole" * 100_000)
assert (build_once(Path(sys.argv[1]), build) / "file").read_text() == "whole" * 100_000
"""


def write_file(directory: Path) -> None:
    (directory / "below").mkdir()
    (directory / "below" / "file").write_bytes(bytes(range(256)) * 40)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["below/file", "checksums.json"])
def test_a_damaged_file_is_logged_once_and_made_again(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = build_once(tmp_path / "built", write_file)
    content = (built / "below" / "file").read_bytes()
    DAMAGE[kind](built / name)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (build_once(built, write_file) / "below" / "file").read_bytes() == content
    (record,) = caplog.records
    assert str(built) in record.getMessage()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".built.lock", "built"]


def test_a_directory_without_checksums_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "built").mkdir()
    built = build_once(tmp_path / "built", write_file)
    assert is_intact(built)


def test_an_open_file_of_a_damaged_directory_stays_readable(tmp_path: Path) -> None:
    built = build_once(tmp_path / "built", write_file)
    with (built / "below" / "file").open("rb") as file:
        (built / "checksums.json").unlink()
        build_once(built, write_file)
        assert len(file.read()) == 256 * 40


def test_two_processes_repair_a_damaged_directory_once(tmp_path: Path) -> None:
    built = build_once(tmp_path / "built", write_file)
    (built / "below" / "file").write_text("")
    command = [sys.executable, "-c", WRITE_AGAIN, str(built)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(outputs) == "built\n"


def test_of_a_large_file_only_samples_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WHOLE_BYTES", 1 << 20)
    size = 64 << 20
    file = tmp_path / "built" / "large"

    def build(directory: Path) -> None:
        with (directory / "large").open("wb") as large:
            large.write(b"header")
            large.truncate(size)

    for offset in (0, size - 1):
        build_once(file.parent, build)
        with file.open("r+b") as damaged:
            damaged.seek(offset)
            damaged.write(b"?")
        assert not is_intact(file.parent)
    build_once(file.parent, build)
    os.truncate(file, size - 1)
    assert not is_intact(file.parent)
    build_once(file.parent, build)
    with file.open("r+b") as damaged:
        damaged.seek(size // 2)
        damaged.write(b"?" * (3 << 20))
    assert not is_intact(file.parent)
