"""Log lines on a pipe that nobody reads, or reads late: the caller never waits."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.helpers.pipes import fill_pipe, read_until
from tokasaurus.monitoring import log_writer
from tokasaurus.monitoring.log_lines import LogLine, StreamOutput
from tokasaurus.monitoring.log_writer import MAX_LINES, LogWriter

INVALID = "Invalid HTTP request received."


def as_message(line: LogLine) -> str:
    return line.message


class Reader:
    """A pipe with a LogWriter at its other end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        self.log = LogWriter(StreamOutput(self.writer, as_message))

    def read(self) -> list[str]:
        """All complete lines, once everything that is queued has been written."""
        content = bytearray()

        def read_to_mark() -> None:
            content.extend(read_until(self.reader, lambda text: text.endswith(b"\0")))

        thread = threading.Thread(target=read_to_mark)
        thread.start()
        assert self.log.flush_lines(10)
        os.write(self.writer, b"\0")
        thread.join(10)
        return content.decode().strip("x\0").splitlines()


@pytest.fixture
def pipe() -> Iterator[Reader]:
    pipe = Reader()
    yield pipe
    os.close(pipe.reader)  # unblocks the writer
    pipe.log.flush_lines(10)
    os.close(pipe.writer)


def warn(log: LogWriter, text: str, name: str = "tokasaurus.server", *args: object) -> None:
    log.handle(logging.LogRecord(name, logging.WARNING, __file__, 1, text, args, None))


def test_lines_are_written_in_order(pipe: Reader) -> None:
    for number in range(100):
        warn(pipe.log, "line %d", "tokasaurus", number)
    assert pipe.read() == [f"line {number}" for number in range(100)]
    assert pipe.log.num_dropped == 0


def test_a_full_pipe_never_blocks_and_what_is_dropped_is_counted(pipe: Reader) -> None:
    fill_pipe(pipe.writer)
    began_s = time.monotonic()
    for number in range(MAX_LINES + 501):
        warn(pipe.log, f"line {number}")
    assert time.monotonic() - began_s < 10, "a writer that waits would wait for ever"
    dropped = pipe.log.num_dropped
    assert 500 <= dropped <= 501  # the thread may hold one line already
    lines = pipe.read()
    assert lines.pop(1) == f"{dropped} log lines dropped"
    # The thread may take line 0 from the queue at any moment, which leaves space for one line after the first 1,000.
    expected = [f"line {number}" for number in range(MAX_LINES + 501)]
    assert lines[:MAX_LINES] == expected[:MAX_LINES]
    assert len(lines) == len(expected) - dropped
    assert set(lines) <= set(expected)


def test_flushing_a_full_pipe_ends_in_time_and_the_second_time_at_once(pipe: Reader) -> None:
    fill_pipe(pipe.writer)
    began_s = time.monotonic()
    warn(pipe.log, "line")
    assert not pipe.log.flush_lines(3.0)
    middle_s = time.monotonic()
    assert 2.9 < middle_s - began_s < 30
    assert not pipe.log.flush_lines(3.0)
    assert time.monotonic() - middle_s < 2.5


def test_lines_after_the_reader_has_left_are_dropped(pipe: Reader) -> None:
    reader, pipe.reader = pipe.reader, os.open(os.devnull, os.O_RDONLY)
    os.close(reader)
    for _ in range(3):
        warn(pipe.log, "line")
    assert pipe.log.flush_lines(10)
    assert pipe.log.num_dropped == 3


def test_a_pipe_that_another_process_made_non_blocking_loses_nothing(pipe: Reader) -> None:
    os.set_blocking(pipe.writer, False)
    for number in range(500):
        warn(pipe.log, f"line {number} {'long' * 10}")
    assert len(pipe.read()) == 500


def test_malformed_requests_cause_one_line_per_kind_and_second(pipe: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    with monkeypatch.context() as stopped:  # all within one second, however slow the machine is
        stopped.setattr(log_writer, "time", SimpleNamespace(monotonic=lambda: now_s))
        for _ in range(912):
            warn(pipe.log, INVALID, "uvicorn.error")
            warn(pipe.log, "Unsupported upgrade request.", "uvicorn.error")
    time.sleep(1.5)
    assert sorted(pipe.read()) == [
        INVALID,
        f"{INVALID} (911 more of these)",
        "Unsupported upgrade request.",
        "Unsupported upgrade request. (911 more of these)",
    ]


def test_other_warnings_are_all_written(pipe: Reader) -> None:
    for _ in range(5):
        warn(pipe.log, "again")
    assert pipe.read() == ["again"] * 5


def test_a_record_whose_arguments_do_not_fit_fails_no_caller(pipe: Reader) -> None:
    warn(pipe.log, "%d", "tokasaurus", "text")
    assert pipe.log.num_dropped == 1


SCRIPT = """
import logging, sys, threading, warnings
from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.log_writer import setup_logging
setup_logging(ServerConfig.parse([]), "server")
for number in range(%d):
    logging.getLogger("tokasaurus").error("record %%d", number)
    print("printed", number, file=sys.stderr)
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("last words")
"""


def test_the_last_lines_of_a_process_are_written_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT % 50], stderr=subprocess.PIPE, text=True, timeout=240)
    lines = [line.partition(" server: ")[2] or line for line in done.stderr.splitlines()]
    assert lines[:100] == [text % number for number in range(50) for text in ("record %d", "printed %d")]
    for words in ("careful", "ZeroDivisionError"):
        assert any(words in line for line in lines)
    assert lines[-1] == "ValueError: last words"


def test_a_process_ends_although_nobody_reads_its_stderr() -> None:
    reader, writer = os.pipe()
    fill_pipe(writer)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT % 3000], stderr=writer)
    assert process.wait(timeout=120) == 1
    os.close(reader)
    os.close(writer)


# Run in a process of its own: logging is global, and other tests start uvicorn in this one.
LEVELS_SCRIPT = """
import logging, sys
from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.log_writer import setup_logging

setup_logging(ServerConfig.parse(sys.argv[1:]), "manager")
logging.getLogger("tokasaurus.manager.loop").debug("ours debug")
logging.getLogger("tokasaurus.manager.loop").info("ours info")
logging.getLogger("uvicorn.access").info("uvicorn info")
logging.getLogger("httpx").info("other info")
logging.getLogger("httpx").warning("other warning")
"""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["ours info", "uvicorn info", "other warning"]),
        (["log_level=debug"], ["ours debug", "ours info", "uvicorn info", "other warning"]),
        (["log_level=error"], ["other warning"]),
    ],
)
def test_the_level_is_of_this_package_and_the_web_server(flags: list[str], shown: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", LEVELS_SCRIPT, *flags], capture_output=True, text=True, check=True)
    assert [line.partition(" manager: ")[2] for line in result.stderr.splitlines()] == shown
    assert result.stdout == ""
