"""Programs that are started with closed streams, blocked signals, in another locale, or in a hostile directory."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.inherited import module_paths, python_command

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[1]
HELPERS = ROOT / "tests" / "processes" / "helpers"
STUB = [sys.executable, str(HELPERS / "stub_launcher.py"), "run_worker", "cpu_isa=torch"]
TOKA = [sys.executable, "-m", "tokasaurus"]
# The rules by which Python reads a POSIX locale's paths as ASCII.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
HOSTILE = [
    "random",
    "logging",
    "socket",
    "multiprocessing",
    "pickle",
    "queue",
    "selectors",
    "tempfile",
    "json",
    "numpy",
]
WITH_SIGNALS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""
LIBRARY = """
import os, sys
from tokasaurus import LLM, Sampling
answer = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
with LLM(sys.argv[1], dtype="float32", kv_cache_num_tokens=1024, max_seqs_per_forward=4) as llm:
    (result,) = llm.generate(["a"], Sampling(max_tokens=3, ignore_eos=True))
    os.write(answer, str(len(result.samples[0].token_ids)).encode())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "modèle"
    save_tiny_model(directory, "llama", num_layers=1)
    return directory


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with modules of Python's names, and ours."""
    directory = tmp_path / "hostile"
    (directory / "tokasaurus").mkdir(parents=True)
    for path in [*(directory / f"{name}.py" for name in HOSTILE), directory / "tokasaurus" / "__init__.py"]:
        path.write_text("raise SystemExit('a module of the directory')\n")
    return directory


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "GRACE_S": "600", "PYTHONPATH": f"{HELPERS}:{ROOT}", **changed}


@contextmanager
def started(command: list[str], directory: Path, **changed: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=directory, env=environment(**changed), start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_it_listens(process: subprocess.Popen[bytes], path: Path) -> bytes:
    """What it answers first."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except OSError:
                time.sleep(0.05)
                continue
            return connection.recv(100)


CLOSED = {"stderr": "2>&-", "stdin": "<&-", "all": "<&- >&- 2>&-"}


@pytest.mark.parametrize("streams", ["stderr", "all"])
def test_a_server_starts_and_stops_with_closed_streams_and_blocked_signals(
    streams: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    command = [sys.executable, "-c", WITH_SIGNALS, *STUB, f"model={model}", f"unix_socket={path}"]
    with started(["bash", "-c", f'exec "$@" {CLOSED[streams]}', "start", *command], tmp_path) as process:
        assert wait_until_it_listens(process, path) == "modèle".encode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_server_imports_no_module_of_the_working_directory_and_reads_paths_in_any_locale(
    model: Path, hostile: Path, tmp_path: Path
) -> None:
    path = tmp_path / "é"
    with started([*STUB, f"model={model}", f"unix_socket={path}"], hostile, **ASCII) as process:
        assert wait_until_it_listens(process, path) == "modèle".encode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def lines_of_refusal(command: list[str], directory: Path, **changed: str) -> list[str]:
    done = subprocess.run(
        command, cwd=directory, env=environment(**changed), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()


@pytest.mark.parametrize("words", [[], ["map", "input=x.csv", "output=y", "prompt={a}"], ["plan"]], ids=str)
def test_a_deleted_working_directory_is_one_line(words: list[str], model: Path, tmp_path: Path) -> None:
    start = ["bash", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "start"]
    name = " ".join(["toka", *words[:1]])
    line = f"{name}: the working directory is deleted: change to another one"
    assert lines_of_refusal([*start, *TOKA, *words, f"model={model}"], tmp_path) == [line]


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["UTF-8", "ASCII"])
def test_a_path_that_is_not_utf_8_is_one_line(locale: dict[str, str], tmp_path: Path) -> None:
    (line,) = lines_of_refusal([*TOKA, os.fsdecode(b"model=/mod\xe8le")], tmp_path, **locale)
    assert line == r"toka: model=/mod\udce8le: has bytes that are not UTF-8"


def test_commands_run_in_a_directory_with_modules_of_pythons_names(hostile: Path) -> None:
    (hostile / "tokasaurus" / "__init__.py").unlink()  # `python -m` runs what lies there
    (hostile / "tokasaurus").rmdir()
    done = subprocess.run([*TOKA, "--print-config"], cwd=hostile, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", CLOSED.values())
@pytest.mark.parametrize("words", [["--version"], ["ping", "--help"]], ids=str)
def test_commands_that_only_print_run_with_closed_streams(words: list[str], closed: str, tmp_path: Path) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "start", *TOKA, *words]
    assert subprocess.run(command, cwd=tmp_path, env=environment(), check=False).returncode == 0


def test_modules_of_another_interpreter_are_ours_and_those_of_the_directory_come_last(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", str(hostile), *sys.path])
    assert module_paths()[-2:] == ["", str(hostile)]
    command = python_command("import random, sys; sys.stdout.write(random.__file__)")
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    assert Path(found) == Path(os.__file__).parent / "random.py"


@pytest.mark.long
def test_the_library_works_without_streams_among_hostile_modules_in_any_locale(
    model: Path, hostile: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LIBRARY)
    command = [sys.executable, str(program), str(model), str(tmp_path / "answer")]
    with started(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "start", *command], hostile, **ASCII) as process:
        assert process.wait(120) == 0
    assert (tmp_path / "answer").read_text() == "3"


@pytest.mark.long
def test_a_real_server_answers_without_streams_among_hostile_modules_in_any_locale(
    model: Path, hostile: Path, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    flags = ["dtype=float32", "kv_cache_num_tokens=1024", "max_seqs_per_forward=4", f"unix_socket={path}"]
    program = tmp_path / "toka"  # as pip installs it
    program.write_text("from tokasaurus.__main__ import main\nif __name__ == '__main__':\n    raise SystemExit(main())")
    command = [sys.executable, "-c", WITH_SIGNALS, sys.executable, str(program), f"model={model}", *flags]
    body = b'{"prompt": "a", "max_tokens": 2, "guided_regex": "a*"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    with started(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "start", *command], hostile, **ASCII) as process:
        deadline = time.monotonic() + 120
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < deadline, answer
            assert process.poll() is None
            time.sleep(0.2)
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(path))
                except OSError:
                    continue
                connection.sendall(request % (len(body), body))
                answer = connection.recv(10_000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
