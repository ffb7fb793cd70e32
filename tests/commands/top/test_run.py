"""`toka top` in a pipe: lines, samples, recordings, lost connections, and one line for what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.commands.top.helpers.live_stub import Script, serving
from tests.commands.top.helpers.scripted_samples import line, sample
from tests.end_to_end.helpers.toka_process import free_port
from tests.helpers.examples import few
from tests.helpers.limits import read_line
from tokasaurus.commands.top.config import TopConfig
from tokasaurus.flags import FlagError

ENVIRONMENT = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
COMMAND = [sys.executable, "-m", "tokasaurus", "top"]
TIMEOUT_S = 60


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*COMMAND, *words], stdin=-3, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    return [read_line(process, process.stdout).rstrip("\n") for _ in range(count)]


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """(exit code, stderr) after a signal."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, errors


def failure(*words: str) -> str:
    """The one line of a command that fails at once."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    return done.stderr.strip()


def test_lines_come_over_a_restart_of_the_server() -> None:
    script, port = Script(), free_port()
    with ExitStack() as first_server:
        url = first_server.enter_context(serving(script, port))
        with running(f"base_url={url}/v1") as process:
            lines = read_lines(process, 3)
            first_server.close()
            told = read_line(process, process.stderr)
            assert re.fullmatch(rf"toka top: {url}/v1: no answer since [\d:]+: .+; trying again\n", told)
            num_before = script.next_second
            with serving(script, port):
                while script.next_second < num_before + 3:  # `next_second` grows with each sample that is sent
                    lines += read_lines(process, 1)
                assert ended(process, signal.SIGINT) == (0, "")
    assert all("210 running, 3 prefilling, 33 waiting" in text for text in lines)
    assert set(script.paths) == {"/live"}


def test_a_server_that_has_said_why_it_ends_is_quoted() -> None:
    script = Script(make=lambda second: sample(second, server={**sample(second)["server"], "ended": "it was stopped"}))
    with ExitStack() as server:
        url = server.enter_context(serving(script))
        with running(f"base_url={url}") as process:
            read_lines(process, 2)
            server.close()
            told = read_line(process, process.stderr)
    assert re.fullmatch(rf"toka top: {url}: server ended at [\d:]+: it was stopped; trying again\n", told)


def test_a_server_that_breaks_its_streams_off_is_waited_for() -> None:
    error = {"error": {"message": "the server is stopping", "code": "server_stopping"}}
    script = Script(make=lambda second: sample(second) if second < 3 else error)
    with serving(script) as url, running(f"base_url={url}") as process:
        read_lines(process, 3)
        assert "connection ended; trying again" in read_line(process, process.stderr)
        script.make = sample
        assert "210 running" in read_lines(process, 1)[0]


def test_samples_are_printed_as_they_came(tmp_path: Path) -> None:
    """Through a Unix socket, with a key; samples with fields that this version does not know are read too."""
    script = Script(make=lambda second: sample(second, later={"a": "ü"}), api_key="secret")
    unix_socket = tmp_path / "socket"
    with serving(script, unix_socket=unix_socket):
        with running(f"unix_socket={unix_socket}", "api_key=secret", "json=T") as process:
            assert [json.loads(text) for text in read_lines(process, 3)] == [script.make(second) for second in range(3)]
            assert ended(process, signal.SIGTERM) == (128 + signal.SIGTERM, "")
        told = failure(f"unix_socket={unix_socket}", "api_key=wrong")
    assert told == f"toka top: unix_socket={unix_socket} answered 401: no, not now"


@pytest.mark.long
def test_an_answer_that_may_pass_is_waited_for() -> None:
    script = Script(status=503)
    with serving(script) as url, running(f"base_url={url}") as process:
        told = f"toka top: {url}: no answer: answered 503: no, not now; trying again\n"
        assert read_line(process, process.stderr) == told
        script.status = 200
        assert "210 running" in read_lines(process, 1)[0]


@few(
    2,
    ("script", "message"),
    [
        (Script(status=404), " answered 404: no, not now"),
        (Script(content_type="text/html"), ": answered /live with text/html: it is another server"),
        (
            Script(make=lambda second: sample(second, format=2)),
            ": format 2 of samples is not known, this toka reads 1",
        ),
        (Script(make=lambda _: {}), ": no sample: it lacks a format or a time"),
    ],
)
def test_another_server_is_told_in_one_line(script: Script, message: str) -> None:
    with serving(script) as url:
        assert failure(f"base_url={url}") == f"toka top: {url}{message}"


def test_a_server_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    refused = f"toka top: no answer from {url}: [Errno 111] Connection refused; is toka running?"
    assert failure(f"base_url={url}") == refused
    absent = f"unix_socket={tmp_path / 'absent'}"
    told = f"toka top: no answer from {absent}: [Errno 2] No such file or directory; is toka running?"
    assert failure(absent) == told
    assert failure("base_url=localhost:10210").startswith("toka top: no answer from localhost:10210: ")


def test_a_reader_that_has_gone_ends_the_command() -> None:
    with serving(Script()) as url, running(f"base_url={url}") as process:
        read_lines(process, 1)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=TIMEOUT_S) == 128 + signal.SIGPIPE


def test_a_replay_in_a_pipe_has_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    content = [line(sample(second)) for second in range(200)]
    path.write_bytes(b"".join(content) + content[0][:100])
    done = subprocess.run([*COMMAND, f"replay={path}", "json=T"], capture_output=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"".join(content), b"")
    done = subprocess.run([*COMMAND, f"replay={path}", "speed=1000"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert len(done.stdout.splitlines()) == 200
    assert "16,800 generated" in done.stdout.splitlines()[-1]


def test_the_speed_is_only_of_a_replay() -> None:
    with pytest.raises(FlagError, match="speed=2: needs replay beside it"):
        TopConfig.parse(["speed=2"])
