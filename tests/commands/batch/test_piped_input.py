"""Inputs that can be read only once: each run in a process of its own, with the input as a shell gives it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.commands.batch.helpers.request_lines import read_results
from tests.commands.batch.helpers.runs import RUN, wait_for_lines
from tests.helpers.examples import few
from tests.server.helpers.fake_engine import Reply, echo, never
from tests.server.helpers.live_server import LiveServer
from tokasaurus.cli import batch_main
from tokasaurus.commands.batch.input_file import is_stream
from tokasaurus.messages.generation import GenerateRequest

SHELL = 'toka_batch() { "$PYTHON" -c "$RUN" "$@"; }; '


def run_in_shell(words: list[str], script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """script: calls `toka_batch "$@"` with words after the first, which is the input."""
    environment = {**os.environ, "PYTHON": sys.executable, "RUN": RUN, **variables}
    command = ["bash", "-c", SHELL + script, "bash", *words[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def check_complete(tmp_path: Path) -> None:
    assert [result["custom_id"] for result in read_results(tmp_path / "out.jsonl")] == [
        f"c{index}" for index in range(30)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl", "out.jsonl"]


@few(
    1,
    "script",
    [
        'cat "$FILE" | toka_batch input=- "$@"',
        'cat "$FILE" | toka_batch input=/dev/stdin "$@"',
        'toka_batch input=- "$@" < "$FILE"',
        'toka_batch input=/dev/stdin "$@" < "$FILE"',
        'toka_batch input=<(cat "$FILE") "$@"',
        'toka_batch input=/dev/fd/7 "$@" 7< "$FILE"',
        'P="$FILE.pipe"; mkfifo "$P"; cat "$FILE" > "$P" & toka_batch input="$P" "$@"; code=$?; rm "$P"; exit $code',
        '(head -10 "$FILE"; sleep 1; tail -n +11 "$FILE") | toka_batch input=- "$@"',
    ],
)
def test_the_output_is_that_of_the_file(words: list[str], tmp_path: Path, script: str) -> None:
    done = run_in_shell(words, script, FILE=str(tmp_path / "in.jsonl"))
    assert done.returncode == 0, done.stderr
    check_complete(tmp_path)


@pytest.mark.long
def test_a_socket_as_standard_input(words: list[str], tmp_path: Path) -> None:
    own, other = socket.socketpair()
    with own, other:
        process = subprocess.Popen([sys.executable, "-c", RUN, "input=-", *words[1:]], stdin=other)
        own.sendall((tmp_path / "in.jsonl").read_bytes())
        own.shutdown(socket.SHUT_WR)
        assert process.wait(timeout=60) == 0
    check_complete(tmp_path)


@few(
    2,
    ("script", "message"),
    [
        ('toka_batch input=- "$@" < /dev/null', "input=-: is empty"),
        ('toka_batch input=/dev/null "$@"', "input=/dev/null: is empty"),
        ('toka_batch input=- "$@" <&-', "input=-: standard input is closed"),
        ('toka_batch input=/dev/fd/77 "$@"', "input=/dev/fd/77: No such file or directory"),
        ('echo x | toka_batch input=- "$@"', "line 1: must be a JSON object"),
    ],
)
def test_an_input_that_cannot_be_used_is_one_line_and_leaves_nothing(
    words: list[str], tmp_path: Path, script: str, message: str
) -> None:
    done = run_in_shell(words, script)
    assert (done.returncode, done.stderr) == (1, f"toka batch: {message}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl"]


def kill_a_piped_run(words: list[str], server: LiveServer, tmp_path: Path) -> Path:
    """The copy of its input. The run is killed when ten lines have results; the others get theirs soon after."""
    may_go_on = threading.Event()

    def answer_ten_and_wait(request: GenerateRequest, index: int) -> Reply | None:
        if len(server.engine.requests) > 10:
            may_go_on.wait(60)
        return echo(request, index)

    server.engine.script = answer_ten_and_wait
    with subprocess.Popen(["cat", tmp_path / "in.jsonl"], stdout=subprocess.PIPE) as cat:
        process = subprocess.Popen([sys.executable, "-c", RUN, "input=-", *words[1:]], stdin=cat.stdout)
    wait_for_lines(server, 10)
    process.kill()
    process.wait()
    threading.Timer(0.5, may_go_on.set).start()
    copy = tmp_path / "out.jsonl.toka.input.jsonl"
    assert copy.read_bytes() == (tmp_path / "in.jsonl").read_bytes()
    return copy


@few(1, "by", ["the same pipe", "the copy", "the file"])
def test_a_killed_run_continues_with_the_same_input(
    words: list[str], server: LiveServer, tmp_path: Path, by: str
) -> None:
    copy = kill_a_piped_run(words, server, tmp_path)
    name = {"the same pipe": "-", "the copy": str(copy), "the file": str(tmp_path / "in.jsonl")}[by]
    done = run_in_shell(words, f'cat "$FILE" | toka_batch input={name} "$@"', FILE=str(tmp_path / "in.jsonl"))
    assert done.returncode == 0, done.stderr
    check_complete(tmp_path)
    assert len(server.http.get("/v1/batches").json()["data"]) == 1
    assert len(server.engine.requests) == 30


@pytest.mark.long
def test_a_killed_run_does_not_continue_with_another_input(
    words: list[str], server: LiveServer, tmp_path: Path
) -> None:
    copy = kill_a_piped_run(words, server, tmp_path)
    state = tmp_path / "out.jsonl.toka.json"
    for script, what in (
        ('toka_batch input=- "$@" < /dev/null', "is empty"),
        ('head -5 "$FILE" | toka_batch input=- "$@"', "is not what its batch was begun with"),
    ):
        done = run_in_shell(words, script, FILE=str(tmp_path / "in.jsonl"))
        how = f"input={copy} continues with the copy, or delete {state} to begin again"
        assert (done.returncode, done.stderr) == (1, f"toka batch: input=-: {what}: {how}\n")
    assert run_in_shell(words, f'toka_batch input="{copy}" "$@"').returncode == 0
    check_complete(tmp_path)


@pytest.mark.long
def test_a_stopped_run_says_what_a_later_one_needs(words: list[str], server: LiveServer, tmp_path: Path) -> None:
    server.engine.script = never
    with (tmp_path / "in.jsonl").open() as source:
        command = [sys.executable, "-c", RUN, "input=-", *words[1:]]
        process = subprocess.Popen(command, stdin=source, stderr=subprocess.PIPE, text=True)
    wait_for_lines(server, 0, "in_progress")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    copy = tmp_path / "out.jsonl.toka.input.jsonl"
    how = f"the same command with the same input continues where it was, as does input={copy}, the copy"
    assert err.splitlines()[-1].endswith(f"; {how}")


def test_a_run_that_is_stopped_while_it_reads_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "input=-", *words[1:]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    part = tmp_path / "out.jsonl.toka.input.jsonl.part"
    deadline = time.monotonic() + 60
    while not part.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in.jsonl"]


def test_a_stream_without_an_end_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a server of the run's own; it is not started."""
    output = tmp_path / "out.jsonl"
    assert batch_main(["input=/dev/zero", f"output={output}", "max_file_bytes=3000000"]) == 1
    line = "toka batch: input=/dev/zero: has more than 3000000 bytes (max_file_bytes)\n"
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_memory_is_no_stream() -> None:
    assert not is_stream("/dev/shm")
    assert is_stream("/dev/fd/3")
