"""A directory in the cache is complete or absent, whatever happens to the process that writes it."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokasaurus.checkpoint.cache import build_once, cache_directory
from tokasaurus.checkpoint.errors import CheckpointError


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("TOKA_CACHE", "/own")
    assert cache_directory() == Path("/own")
    monkeypatch.delenv("TOKA_CACHE")
    assert cache_directory() == Path("/xdg/tokasaurus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/home/someone/.cache/tokasaurus")


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
    assert [path.name for path in built.iterdir()] == ["file"]


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
        assert stdout.readline() == b"started\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "built").exists()
    built = build_once(tmp_path / "built", lambda directory: (directory / "file").touch())
    assert [path.name for path in built.iterdir()] == ["file"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".built.lock", "built"]


def test_an_unwritable_directory_gives_an_error_that_names_toka_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*TOKA_CACHE"):
        build_once(tmp_path / "file" / "below", lambda _: None)
