"""The terminal while the screen is shown: alternate screen, no cursor, single keys; restored however it ends."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text
from typing_extensions import Self

from tokasaurus.commands.top.view import Look

_SEQUENCES = {b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left"}
_BUFFER_BYTES = 1 << 20
"""More than any frame has."""


def can_show_a_screen() -> bool:
    """Whether standard output is a terminal that can place its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class Terminal:
    """Use as a context."""

    def __init__(self) -> None:
        # When a signal, such as SIGWINCH, interrupts a write that is larger than a file's buffer, Python
        # loses the rest of it; and the buffer of sys.stdout has 1 KiB on a terminal.
        self._file = open(  # noqa: SIM115 (its descriptor is sys.stdout's)
            sys.stdout.fileno(), "w", _BUFFER_BYTES, sys.stdout.encoding, errors="replace", closefd=False
        )
        self._console = Console(file=self._file, highlight=False, markup=False, emoji=False)
        self.look = Look(
            has_colours=self._console.color_system is not None and not self._console.no_color,
            ascii_only=not self._console.encoding.lower().startswith("utf"),
        )
        self._live: Live | None = None
        self._input = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._old_modes: list[Any] = []

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def input(self) -> int | None:
        """The descriptor that keys come from; None if standard input is no terminal."""
        return self._input

    def size(self) -> tuple[int, int]:
        """(columns, rows) now."""
        with suppress(OSError):
            size = os.get_terminal_size(sys.stdout.fileno())
            if size.columns > 0 and size.lines > 0:
                return size.columns, size.lines
        return 80, 24

    def draw(self, lines: Sequence[Text]) -> None:
        """Show lines that have at most the present size."""
        assert self._live is not None, "drawn within the context"
        self._console.size = ConsoleDimensions(*self.size())
        self._live.update(Group(*lines), refresh=True)

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does, with the terminal as it was before; returns when it goes on."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()

    def _enter(self) -> None:
        if self._input is not None:
            self._old_modes = termios.tcgetattr(self._input)
        try:
            if self._input is not None:
                tty.setcbreak(self._input)
            self._live = Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                with suppress(OSError):  # the terminal is gone
                    live.stop()
        finally:
            if self._input is not None and self._old_modes:
                with suppress(termios.error):
                    termios.tcsetattr(self._input, termios.TCSADRAIN, self._old_modes)


def keys_of(content: bytes) -> list[str]:
    """Names of the keys that a terminal has sent: single characters, left and right."""
    keys = []
    while content:
        sequence = next((known for known in _SEQUENCES if content.startswith(known)), None)
        if sequence is not None:
            keys.append(_SEQUENCES[sequence])
            content = content[len(sequence) :]
        elif content.startswith(b"\x1b"):  # another key's sequence, up to its final letter
            end = next((place for place, byte in enumerate(content[2:], start=2) if 0x40 <= byte <= 0x7E), len(content))
            content = content[end + 1 :]
        else:
            keys.append(chr(content[0]))
            content = content[1:]
    return keys
