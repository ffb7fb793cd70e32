"""A program on a terminal of its own, and what is seen there."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import pyte

_MANY_LINES = 600
_WIDE = 500
_END_S = 60.0
_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C goes to this program
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program that runs as if a user had started it."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int, columns: int) -> None:
        self.process = process
        self._controller = controller
        self._columns = columns
        self._content = b""
        self._changed = threading.Condition()
        self.silences_s: list[float] = []
        """Times between two outputs."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        last_s = time.monotonic()
        while True:
            try:
                part = os.read(self._controller, 65_536)
            except OSError:  # all its processes have ended
                part = b""
            now_s = time.monotonic()
            with self._changed:
                self.silences_s.append(now_s - last_s)
                self._content += part
                self._changed.notify_all()
            last_s = now_s
            if not part:
                return

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Until this is somewhere on the screen."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for line in self.lines()), timeout_s), self.lines()

    def press(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    def exit_code(self) -> int:
        """Waits for the end of all that writes to the terminal."""
        self._reader.join(_END_S)
        assert not self._reader.is_alive(), self.lines()
        return self.process.wait(_END_S)

    def lines(self) -> list[str]:
        """What a user sees, with what has been scrolled away."""
        return _seen(self._content, self._columns)[0]

    def check_screen(self) -> None:
        """No line was wrapped by the terminal: one that is much wider shows the same. The cursor is visible."""
        # The terminal itself shows a Ctrl-C, wherever the cursor is at that moment, also within a line that is written.
        content = self._content.replace(b"^C", b"")
        lines, screen = _seen(content, self._columns)
        assert lines == _seen(content, _WIDE)[0]
        assert max(map(len, lines)) < self._columns
        assert not screen.cursor.hidden


def _seen(content: bytes, columns: int) -> tuple[list[str], pyte.Screen]:
    screen = pyte.Screen(columns, _MANY_LINES)
    pyte.ByteStream(screen).feed(content)
    return [line.rstrip() for line in screen.display if line.strip()], screen


@contextmanager
def on_terminal(
    command: Sequence[str], columns: int = 80, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Runs the command on a new terminal; it is killed at the end. environment: beside this process's."""
    variables = {**os.environ, "TERM": "xterm", **(environment or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        variables.pop(name, None)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    attributes = termios.tcgetattr(terminal)
    attributes[3] |= termios.NOFLSH  # else a Ctrl-C drops what is on its way, perhaps half of an escape sequence
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    process = subprocess.Popen(
        [sys.executable, "-c", _OWN_TERMINAL, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=variables,
        start_new_session=True,
    )
    os.close(terminal)
    shown = Terminal(process, controller, columns)
    try:
        yield shown
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(controller)
