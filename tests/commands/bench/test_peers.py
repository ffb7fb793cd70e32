"""Starting and stopping servers, with a program that stands for one."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.peers import PEERS, program_of, started

SERVER = """\
#!{python}
import http.server, pathlib, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > began + {delay} else 503)
        self.end_headers()
    def log_message(self, *_): pass
print("words:", *sys.argv[1:], flush=True)
if "--fail" in sys.argv: sys.exit("no such device")
began = time.monotonic()
pathlib.Path({pid!r}).write_text(str(__import__("os").getpid()))
port = next(word for before, word in zip(sys.argv, sys.argv[1:]) if before in ("--port", "--rest_port"))
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A directory like a virtual environment, with a program for each peer."""
    (tmp_path / "bin").mkdir()
    for peer in PEERS.values():
        program = tmp_path / "bin" / peer.program
        program.write_text(SERVER.format(python=sys.executable, delay=0.5, pid=str(tmp_path / "pid")))
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return tmp_path


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama.cpp", "openvino"])
def test_a_server_runs_while_it_is_measured(name: str, environment: Path) -> None:
    with started(name, "org/model", str(environment), "--further 'two words'", 30) as server:
        assert server.command.endswith("--further 'two words'")
        assert "org/model" in server.command
        assert server.base_url.endswith(PEERS[name].api_path)
        root = server.base_url.removesuffix(PEERS[name].api_path)
        with urllib.request.urlopen(root + PEERS[name].ready_path, timeout=10) as answer:
            assert answer.status == 200, "it is ready"
        pid = int((environment / "pid").read_text())
        os.kill(pid, 0)
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_signal_while_a_server_is_started_leaves_none(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is there, but Popen has not returned yet."""
    processes: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(original(*arguments, **options))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), started("vllm", "org/model", str(environment), "", 30):
        pass
    assert [process.returncode for process in processes] == [-signal.SIGTERM]


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_words(environment: Path) -> None:
    expected = pytest.raises(ServerError, match=r"vllm ended with 1 at its start:\n(.*\n)*.*no such device")
    with expected, started("vllm", "org/model", str(environment), "--fail", 30):
        pass


def test_a_server_that_is_not_ready_in_time_is_stopped(environment: Path) -> None:
    with pytest.raises(ServerError, match="did not answer within"), started("vllm", "m", str(environment), "", 0.2):
        pass


def test_the_program_is_found_in_an_environment_or_named_itself(environment: Path, tmp_path: Path) -> None:
    assert program_of("vllm", str(environment)) == [str(environment / "bin" / "vllm")]
    assert program_of("vllm", str(environment / "bin" / "vllm")) == [str(environment / "bin" / "vllm")]
    assert program_of("toka", None) == [sys.executable, "-m", "tokasaurus"]
    with pytest.raises(ServerError, match="neither a program nor an environment"):
        program_of("sglang", str(tmp_path / "bin"))


def test_a_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServerError, match=r"no llama-server on PATH; peer_env="):
        program_of("llama.cpp", None)


def test_a_file_is_given_to_llama_cpp_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    assert PEERS["llama.cpp"].words(str(file), 80, "")[:2] == ["-m", str(file)]
    assert PEERS["llama.cpp"].words("org/model", 80, "")[:2] == ["-hf", "org/model"]
