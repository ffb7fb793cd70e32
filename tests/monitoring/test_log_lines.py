"""Lines of the log in each form, what is said in silence, and what a terminal shows of them."""

import fcntl
import itertools
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from datetime import datetime, timezone

import pyte
import pytest

from tokasaurus.monitoring import log_lines
from tokasaurus.monitoring.log_lines import (
    LogLine,
    StatusRow,
    StreamOutput,
    as_json,
    as_relayed,
    as_text,
    from_relayed,
)
from tokasaurus.monitoring.log_writer import LogWriter
from tokasaurus.monitoring.terminal import MAX_COLUMNS, TerminalOutput, wrapped

LINE = LogLine("12 out/s", "info", "manager", "tokasaurus.manager.loop", 1_700_000_000.25, {"finished_requests": 3})


def test_a_line_of_json_has_time_level_process_and_figures_as_numbers() -> None:
    assert json.loads(as_json(LINE)) == {
        "time": datetime.fromtimestamp(1_700_000_000.25, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.250Z"),
        "level": "info",
        "process": "manager",
        "logger": "tokasaurus.manager.loop",
        "message": "12 out/s",
        "finished_requests": 3,
    }
    printed = LogLine("two\nlines", process="worker-0", fields={"message": "hidden", "level": 7})
    assert "\n" not in as_json(printed)
    found = json.loads(as_json(printed))
    assert (found["message"], found["level"], found["logger"]) == ("two\nlines", "info", "stderr")


def test_a_line_of_text_has_its_local_time_unless_it_is_no_record() -> None:
    stamp = datetime.fromtimestamp(1_700_000_000.25).strftime("%Y-%m-%d %H:%M:%S,250")
    assert as_text(LINE) == f"{stamp} INFO manager: 12 out/s"
    assert as_text(LogLine("ready: here")) == "ready: here"


@pytest.mark.parametrize("message", ["plain", "two\nlines", "ünïcode – \x1e \x00 \x1b[2J"])
def test_a_line_comes_through_a_pipe_as_it_was(message: str) -> None:
    line = LogLine(message, "warning", "server", "uvicorn.error", 12.5, {"a": 1, "b": None}, 7)
    assert "\n" not in as_relayed(line)
    assert from_relayed(as_relayed(line), "other") == line


@pytest.mark.parametrize("text", ["of a library", "\x1enot json", "\x1e[1, 2", "\x1e{}", ""])
def test_what_a_library_writes_is_a_line_of_its_process(text: str) -> None:
    line = from_relayed(text, "worker-0")
    assert (line.message, line.process, line.logger) == (text.removeprefix("\x1e"), "worker-0", "")


def test_in_long_phases_a_line_comes_after_two_seconds_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, times_s = 1000.0, []
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: now_s)
    reader, writer = os.pipe()
    output = StreamOutput(writer, as_text)
    output.status = lambda: [
        StatusRow("manager", "start", 0.5),
        StatusRow("model worker", "weights", now_s - 1000.0, (now_s - 1000) / 200, amount="1 of 2 MB"),
    ]
    while now_s < 1100:
        seconds = output.refresh()
        assert seconds is not None
        if seconds >= 2.0:  # a line was written
            times_s.append(now_s - 1000)
        now_s += max(seconds, 0.01)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as lines:
        said = lines.read().splitlines()
    assert said[0] == "model worker  weights             2.0 s  1% 1 of 2 MB ..."
    assert 15 < len(said) < 40
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    assert min(gaps) >= 1.99
    assert all(gap <= max(2.01, 0.11 * (time_s + gap)) for time_s, gap in zip(times_s, gaps, strict=False))


def shown_lines(columns: int, lines: Sequence[LogLine], rows: Sequence[StatusRow]) -> tuple[list[str], bytes]:
    """What is on a terminal afterwards, and all bytes that came to it."""
    controller, terminal = pty.openpty()
    os.set_blocking(controller, False)

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    writer = LogWriter(TerminalOutput(terminal))
    writer.show_status(lambda: rows)
    for line in lines:
        writer.put_line(line)
    assert writer.flush_lines(20)
    deadline_s = time.monotonic() + 20
    content = b""
    while b"(rank 0)" not in content:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        content += read_all(controller)
    content += read_all(controller)
    screen = pyte.Screen(columns, 50)
    stream = pyte.ByteStream(screen)
    stream.feed(content)
    assert not screen.cursor.hidden
    writer.show_status(lambda: ())
    assert writer.flush_lines(20)
    os.close(terminal)
    os.close(controller)
    return [line.rstrip() for line in screen.display if line.strip()], content


def read_all(descriptor: int) -> bytes:
    content = b""
    while True:
        try:
            content += os.read(descriptor, 65_536)
        except BlockingIOError:
            return content


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_nothing_on_a_terminal_wraps_by_itself(columns: int) -> None:
    """Each line is shorter than the terminal, so that the terminal has no reason to wrap it."""
    words = " ".join(f"word{number}" for number in range(60))
    lines = [
        LogLine(f"{'model worker':>12}  {'weights':<16}   1.00 s  {words}", indent=41),
        LogLine("/a/long/path" * 30),
        LogLine("全角文字" * 40, "warning", "server", "tokasaurus.server"),
        LogLine("first\n  second\tthird\n" + words, "error", "worker-0", "tokasaurus"),
    ]
    rows = [StatusRow("model worker (rank 0)", "weights " * 20, 75.0, 0.62, amount="167 of 269 MB")]
    shown, content = shown_lines(columns, lines, rows)
    assert max(map(len, shown)) < columns
    assert max(map(len, shown)) <= MAX_COLUMNS
    text = "".join(line.strip() for line in shown)
    for part in ("word59", "/a/long/path", "全角文字", "  second"):
        assert part in "".join(shown) or part in text
    assert "1:15 model worker (rank 0): weig" in shown[-1]
    if columns > 60:
        assert "━ 62%" in shown[-1]
    assert b"\x1b[?25l" not in content, "the cursor is never hidden"


def test_wrapped_text_has_all_words_and_is_indented() -> None:
    text = "name:  " + " ".join(f"w{number}" for number in range(40))
    lines = list(wrapped(text, 30, 7))
    assert all(len(line) <= 30 for line in lines)
    assert all(line.startswith(" " * 7) and line[7] != " " for line in lines[1:])
    assert " ".join(line.strip() for line in lines).split() == text.split()


def test_the_launcher_and_the_manager_start_without_rich() -> None:
    modules = "tokasaurus.manager.loop, tokasaurus.processes.launch, tokasaurus.monitoring.terminal"
    script = f"import sys, {modules}; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
