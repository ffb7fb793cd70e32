"""The server that a run starts for itself and stops at its end."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from tokasaurus.batch_command.errors import CommandError
from tokasaurus.monitoring.shortage import hint_at_memory
from tokasaurus.server.jobs.store.data_dir import DataDir, DataDirInUse, StoreError

# Time for the processes of a run that was killed to end.
_FREE_S = 20.0
# Time for the server to stop, beside its drain_seconds.
_STOP_S = 20.0
_READY = re.compile(r"ready: (\S+) serves ")
# Lines that the user must see after the start: the launcher's, and warnings and errors in the log.
_IMPORTANT = re.compile(r"toka: |\S+ \S+ (?:WARNING|ERROR|CRITICAL) ")
_TIME = re.compile(r"^\d\S+ \S+ ")


class OwnServer:
    """A server on a free port of the loopback address, which runs within the context. `address` is its URL."""

    def __init__(
        self, words: list[str], api_key: str, data_dir: Path, drain_s: float, show: Callable[[str], None]
    ) -> None:
        """words: flags. show: shows the user a line."""
        self._words = [*words, "host=127.0.0.1", "port=0", f"data_dir={data_dir}"]
        self._api_key = api_key
        self._data_dir = data_dir
        self._stop_s = drain_s + _STOP_S
        self._show = show
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Lines of its output; None after the last."""
        self._last_shown = ""
        self._last_words = ""
        self.address = ""

    def __enter__(self) -> OwnServer:
        """Returns when the model is loaded. Raises CommandError."""
        self._wait_until_free()
        self._start()
        try:
            while not self.address:
                line = self._lines.get()
                if line is None:
                    raise self._death("did not start")
                ready = _READY.match(line)
                self.address = "" if ready is None else ready[1]
                if line.startswith("toka: "):  # shown by _death
                    self._last_words = line
                else:
                    self._show(line)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def wait(self, seconds: float) -> None:
        """Shows what the server says meanwhile. Raises CommandError if it ends."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=left)
                if line is None:
                    raise self._death("has ended")
                if _IMPORTANT.match(line):
                    self._show_once(line)

    def _wait_until_free(self) -> None:
        """Wait for the processes of a run that was killed a moment ago. Raises CommandError."""
        deadline = time.monotonic() + _FREE_S
        data_dir = DataDir(self._data_dir)
        while True:
            try:
                data_dir.open("toka batch, which starts a server")
            except DataDirInUse as error:
                if time.monotonic() >= deadline:
                    raise CommandError(str(error)) from None
                time.sleep(0.1)
            except StoreError as error:
                raise CommandError(str(error)) from None
            else:
                data_dir.close()
                return

    def _start(self) -> None:
        """Call it in the main thread: on Linux, the server is killed when the thread that has started it ends."""
        lifeline, self._lifeline_writer = os.pipe()
        command = [sys.executable, "-m", "tokasaurus.batch_command.server_process", str(os.getpid()), str(lifeline)]
        try:
            self._process = subprocess.Popen(
                [*command, *self._words],
                env={**os.environ, "TOKA_API_KEY": self._api_key},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[lifeline],
                start_new_session=True,  # a terminal's Ctrl-C is for the run, which decides when the server ends
                text=True,
                errors="replace",
            )
        finally:
            os.close(lifeline)
        assert self._process.stdout is not None
        args = (self._process.stdout, self._data_dir / "server.log")
        threading.Thread(target=self._read_output, args=args, name="server output", daemon=True).start()

    def _read_output(self, output: IO[str], log_path: Path) -> None:
        """Copy the server's output to the log file, if that can be written, and to `_lines`, until it ends."""
        log: IO[str] | None = None
        with suppress(OSError):
            log = log_path.open("w", buffering=1)
        for line in output:
            self._lines.put(line.rstrip("\n"))
            if log is not None:
                with suppress(OSError):  # the disk is full
                    log.write(line)
        if log is not None:
            with suppress(OSError):
                log.close()
        self._lines.put(None)

    def _show_once(self, line: str) -> None:
        """Show the line unless it says the same as the last one, apart from the time."""
        text = _TIME.sub("", line)
        if text.startswith("toka: "):
            self._last_words = text
        if text != self._last_shown:
            self._show(line)
        self._last_shown = text

    def _death(self, what: str) -> CommandError:
        """The error of a server that has ended: with the launcher's last words, if there are any."""
        code = self._process.wait()
        death = f"exit code {code}" if code >= 0 else f"killed by signal {-code}{hint_at_memory(-code)}"
        return CommandError(f"the server {what}: {self._last_words.removeprefix('toka: ') or death}")

    def _stop(self) -> None:
        """Stop it in order; kill it if that takes too long, or if the user interrupts again."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._stop_s)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            os.close(self._lifeline_writer)


class GivenServer:
    """A server that runs already."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
