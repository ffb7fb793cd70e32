"""Programs that use an engine of stubs, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.helpers.leftovers import SHARED_MEMORY, shared_memory
from tests.helpers.limits import killed_after, read_line
from tests.helpers.processes import is_running
from tests.library.helpers.stub_entry import use_entries
from tokasaurus.library.engine import PrivateEngine
from tokasaurus.processes.launch import Entries

ROOT = Path(__file__).parents[3]
STUBS = "tests.processes.helpers.launch_stubs"
MODEL = "TOKA_TEST_MODEL"


def stub_entries(worker: str = "run_worker") -> Entries:
    return Entries(f"{STUBS}:run_server", f"{STUBS}:run_manager", f"{STUBS}:{worker}")


def started_engine(show: Callable[[str], None] = lambda _: None) -> PrivateEngine:
    """For scripts: an engine that runs; prints what must be gone after its end, in one line."""
    use_entries(stub_entries())
    engine = PrivateEngine([f"model={os.environ[MODEL]}"], show)
    engine.start()
    print(json.dumps([pids_of(engine), str(directory_of(engine))]), flush=True)
    return engine


def launcher_of(engine: PrivateEngine) -> int:
    server = engine._supervisor._server
    assert server is not None
    return server.pid


def pids_of(engine: PrivateEngine) -> list[int]:
    """Of the launcher and all its descendants."""
    return [launcher_of(engine), *(child.pid for child in psutil.Process(launcher_of(engine)).children(recursive=True))]


def directory_of(engine: PrivateEngine) -> Path:
    return Path(engine.socket_path).parent


def environment_of_scripts(model: Path, temporary: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), MODEL: str(model), "TMPDIR": str(temporary)}


class Script:
    """A Python program, and a directory of its own for temporary files."""

    def __init__(self, text: str, model: Path, temporary: Path, *arguments: str) -> None:
        """arguments: of Python, in place of -c and the text; the text goes to standard input."""
        self._temporary = temporary
        self._shared_before = shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, *(arguments or ("-c", text))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=temporary.parent,
            env=environment_of_scripts(model, temporary),
        )
        assert self.process.stdin is not None
        if arguments:
            self.process.stdin.write(text)
        self.process.stdin.close()

    def read_line(self) -> str:
        line = read_line(self.process, self.process.stdout).rstrip("\n")
        assert self.process.stderr is not None
        assert line, self.process.stderr.read()
        return line

    def wait(self) -> tuple[int, str]:
        """(exit code, standard error)"""
        assert self.process.stderr is not None
        with killed_after(self.process):
            errors = self.process.stderr.read()
        return self.process.wait(60), errors

    def left_after(self, seconds: float, pids: list[int]) -> list[str]:
        """What is still there after so long: of `pids`, temporary files and shared memory."""
        deadline = time.monotonic() + seconds
        while left := self._left(pids):
            if time.monotonic() > deadline:
                return left
            time.sleep(0.02)
        return []

    def _left(self, pids: list[int]) -> list[str]:
        left = [f"process {pid}" for pid in pids if is_running(pid)]
        left += [str(path) for path in self._temporary.iterdir()]
        return left + [f"{SHARED_MEMORY}/{name}" for name in shared_memory() - self._shared_before]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def running_script(text: str, model: Path, *arguments: str) -> Iterator[Script]:
    """It is killed at the end."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:  # a short path, since it is a part of a socket's
        temporary = Path(directory, "tmp")
        temporary.mkdir()
        script = Script(text, model, temporary, *arguments)
        try:
            yield script
        finally:
            script.end()
