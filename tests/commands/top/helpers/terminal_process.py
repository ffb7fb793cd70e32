"""A command in a pseudo-terminal, whose screen an emulator keeps."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyte
from wcwidth import wcswidth

_TIMEOUT_S = 60
_FRAME_S = 0.1
"""Longest time in which a frame arrives."""
_ALTERNATE_SCREEN = 1049 << 5
"""As pyte numbers the private mode."""


class CountingScreen(pyte.Screen):
    """Counts what a screen of whole lines must not do, since it was made or reset."""

    num_wraps: int
    num_scrolls: int

    def reset(self) -> None:
        super().reset()
        self.num_wraps = self.num_scrolls = 0

    def draw(self, data: str) -> None:
        self.num_wraps += self.cursor.x + wcswidth(data) > self.columns
        super().draw(data)

    def index(self) -> None:
        self.num_scrolls += self.cursor.y == self.lines - 1
        super().index()


class TerminalProcess:
    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, screen: CountingScreen) -> None:
        self.process = process
        self.screen = screen
        self.output = b""
        """All that was written to the terminal."""
        self._master = master
        self._slave = slave
        self._stream = pyte.ByteStream(screen)
        self._unfed = b""
        """The beginning of a sequence, whose rest has not been read yet."""
        self._first_modes = termios.tcgetattr(slave)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        """The terminal, and what the emulator keeps."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, is_there: Callable[[str], bool]) -> str:
        """The screen's text once it is as asked for. A frame may come in parts: the rest of it is waited for."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            if is_there(self.text):
                rest_s = time.monotonic() + _FRAME_S
                while self._read(_FRAME_S / 4) and time.monotonic() < rest_s:
                    pass
                if is_there(self.text):
                    return self.text
            assert time.monotonic() < deadline, f"never shown; last:\n{self.text}"
            self._read(0.1)

    def hang_up(self) -> None:
        """As if the terminal's window were closed. Nothing can be read any more."""
        os.close(self._slave)
        os.close(self._master)
        self._slave, self._master = (os.open(os.devnull, os.O_RDWR) for _ in range(2))

    def close(self) -> None:
        os.close(self._slave)
        os.close(self._master)

    def wait_for_words(self, words: str) -> str:
        return self.wait_for(lambda text: words in text)

    def end(self) -> int:
        """The exit code, once the process has ended and all of its output is read."""
        deadline = time.monotonic() + _TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
            self._read(0.05)
        while self._read(0.1):  # what was written comes a moment later
            pass
        return self.process.returncode

    def wait_until_stopped(self) -> None:
        """By SIGSTOP or SIGTSTP."""
        deadline = time.monotonic() + _TIMEOUT_S
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline, "does not stop"
            self._read(0.05)
        while self._read(0.1):  # what was written comes a moment later
            pass

    def assert_as_before(self) -> None:
        """The terminal is as it was before the command: modes, cursor and main screen."""
        deadline = time.monotonic() + _TIMEOUT_S
        while self.screen.cursor.hidden and time.monotonic() < deadline:
            self._read(0.1)
        assert termios.tcgetattr(self._slave) == self._first_modes
        assert not self.screen.cursor.hidden, self.output[-300:]
        assert _ALTERNATE_SCREEN not in self.screen.mode

    def assert_full_screen(self) -> None:
        """The command has its own screen, in which nothing wraps or scrolls."""
        assert _ALTERNATE_SCREEN in self.screen.mode
        assert self.screen.cursor.hidden
        assert (self.screen.num_wraps, self.screen.num_scrolls) == (0, 0)
        assert not termios.tcgetattr(self._slave)[3] & (termios.ECHO | termios.ICANON)

    def _read(self, timeout_s: float) -> bool:
        """Whether something came."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if not ready:
            return False
        content = os.read(self._master, 1 << 16)
        self.output += content
        # Ctrl-C and Ctrl-Z make the kernel drop what was written and not read yet, within a sequence too. A terminal
        # begins anew at the next escape character, which the emulator would take for a part of the one that was cut.
        whole = re.sub(rb"\x1b\[[0-9;?]*(?=\x1b)", b"", self._unfed + content)
        begun = re.search(rb"\x1b(\[[0-9;?]*)?$", whole)
        end = len(whole) if begun is None else begun.start()
        self._unfed = whole[end:]
        self._stream.feed(whole[:end])
        return True


@contextmanager
def in_terminal(command: list[str], columns: int, rows: int, **environment: str) -> Iterator[TerminalProcess]:
    """Starts the command with the terminal as its controlling one; kills it at the end."""
    master, slave = os.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    variables = {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def take_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    streams: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(command, **streams, env=variables, start_new_session=True, preexec_fn=take_terminal)
    terminal = TerminalProcess(process, master, slave, CountingScreen(columns, rows))
    try:
        yield terminal
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=_TIMEOUT_S)
        terminal.close()
