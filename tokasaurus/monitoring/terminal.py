"""A log on a terminal: lines that never wrap by themselves, and below them how far the start is, redrawn in place.

Draws with rich, which is imported a moment after the start, by the thread that writes: nothing waits for it. The cursor
is never hidden, so that it is visible however the process ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokasaurus.monitoring.log_lines import Descriptor, LogLine, Status, StatusRow, no_status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

MAX_COLUMNS = 100
_MIN_COLUMNS = 20

_HELD_S = 0.5
"""For this long after the start, lines are held back: most starts are past their first phases then, which the import of
rich would delay."""
_REDRAW_S = 0.2
_MAX_ROWS = 8
_MIN_TEXT_COLUMNS = 38
"""Beside an indent."""
_BAR_COLUMNS = 16
_MIN_PHASE_COLUMNS = 12
_ECHO_COLUMNS = 4
"""Left free in the rows that are redrawn: a terminal echoes Ctrl-C as ^C behind the last one, which must not wrap."""

_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}


def terminal_columns(descriptor: int) -> int:
    """Columns to write in: the last one of the terminal stays empty, because a character there may wrap."""
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:  # it is gone
        columns = 80
    return max(_MIN_COLUMNS, min(MAX_COLUMNS, columns - 1))


class _DescriptorFile:
    """What rich writes to."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, to: Descriptor) -> None:
        self._descriptor = descriptor
        self._to = to
        self.is_open = True

    def write(self, text: str) -> int:
        self.is_open = self._to.write_all(text) and self.is_open
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


class TerminalOutput(Descriptor):
    """An Output. One thread uses it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.status: Status = no_status
        self._descriptor = descriptor
        self._began_s = time.monotonic()
        self._held: list[LogLine] | None = []
        """None once lines are written at once."""
        self._file = _DescriptorFile(descriptor, self)
        self._live: Live | None = None
        self._console: Console | None = None

    def write(self, line: LogLine) -> bool:
        if self._held is not None:
            self._held.append(line)
            return True
        self._print(line)
        return self._file.is_open

    def refresh(self) -> float | None:
        if self._held is not None:
            seconds_left = self._began_s + _HELD_S - time.monotonic()
            if seconds_left > 0:
                return seconds_left
            self.flush()
        rows = self.status()
        if rows:
            self._draw(rows)
            return _REDRAW_S
        self._erase()
        return None if self.status is no_status else _REDRAW_S

    def flush(self) -> None:
        held, self._held = self._held, None
        for line in held or ():
            self._print(line)

    def _open_console(self) -> Console:
        from rich.console import Console

        class VisibleCursor(Console):
            def show_cursor(self, show: bool = True) -> bool:
                del show
                return False

        if self._console is None:
            self._console = VisibleCursor(file=self._file, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]  # has what rich uses
        self._console.width = terminal_columns(self._descriptor)
        return self._console

    def _print(self, line: LogLine) -> None:
        console = self._open_console()
        if self._live is None:
            self._file.write("\r")  # over the echo of Ctrl-C
        for text in _styled(line, console.width):
            console.print(text, no_wrap=True, overflow="ignore", crop=False)

    def _draw(self, rows: Sequence[StatusRow]) -> None:
        from rich.live import Live
        from rich.text import Text

        console = self._open_console()
        lines = [_row_text(row, console.width - _ECHO_COLUMNS) for row in rows[:_MAX_ROWS]]
        if len(rows) > _MAX_ROWS:
            lines.append(Text(f"  and {len(rows) - _MAX_ROWS} more", style="dim"))
        if self._live is None:
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(Text("\n").join(lines), refresh=True)

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _styled(line: LogLine, columns: int) -> Iterator[Text]:
    """The lines on the terminal of a line of the log."""
    from rich.text import Text

    prefix, indent = "", line.indent
    if line.logger:
        prefix = time.strftime("%H:%M:%S ", time.localtime(line.time_s))
        if line.fields is None:  # figures name no process
            prefix += f"{line.process}: "
        if line.level in ("warning", "error", "critical"):
            prefix += f"{line.level}: "
        indent = 9
    style = _STYLES.get(line.level, "")
    is_first = True
    for paragraph in line.message.split("\n"):
        for part in wrapped(prefix + paragraph.expandtabs() if is_first else paragraph.expandtabs(), columns, indent):
            text = Text(part, style=style)
            if is_first:
                text.stylize("dim", 0, min(9, len(prefix)))
            yield text
            is_first = False


def wrapped(text: str, columns: int, indent: int) -> Iterator[str]:
    """The text in lines of at most `columns` cells, broken at spaces where possible; all but the first are indented."""
    from rich.cells import cell_len, chop_cells

    indent = min(indent, max(columns // 4, columns - _MIN_TEXT_COLUMNS))
    text = "".join(char if char.isprintable() else "�" for char in text).rstrip()
    start = ""
    while cell_len(start + text) > columns:
        fits = chop_cells(start + text, columns)[0]
        cut = fits.rfind(" ", len(start) + 1)
        if cut <= max(len(start), columns // 3):  # such as a path
            cut = len(fits)
        yield (start + text)[:cut].rstrip()
        text = (start + text)[cut:].lstrip(" ")
        start = " " * indent
    yield start + text


def _row_text(row: StatusRow, columns: int) -> Text:
    """If it does not fit, the phase is cut first: its time and share are more important."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    seconds = int(row.seconds)
    begin = Text.assemble((f"{seconds // 60:3d}:{seconds % 60:02d} ", "dim"), f"{row.process}: ")
    end = Text()
    if row.share is not None:
        num_done = round(_BAR_COLUMNS * min(1.0, row.share))
        end.append("  ")
        end.append("━" * num_done, style="green")
        end.append("━" * (_BAR_COLUMNS - num_done), style="bright_black")
        end.append(f" {row.percent}")
    if row.amount:
        end.append(f"  {row.amount}")
    left = columns - begin.cell_len - end.cell_len
    phase = row.phase
    if cell_len(phase) > left:
        phase = set_cell_size(phase, max(_MIN_PHASE_COLUMNS, left - 1)).rstrip() + "…"
    text = Text.assemble(begin, (phase, "bold"), end)
    return text if text.cell_len <= columns else Text(set_cell_size(text.plain, columns - 1) + "…")
