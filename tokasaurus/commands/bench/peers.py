"""Servers that are started for a measurement and stopped after it, each as its own documentation says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.results import progress_bar
from tokasaurus.commands.running_server import status_of

_LOOK_S = 0.2
_STOP_S = 60.0
_SECRET = re.compile(r"(?i)(key|token|password|secret)$")
_NUM_LINES = 15
"""Last lines shown of the log of a server that did not start."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of server."""

    program: str
    """Name of the program, in the bin/ of its environment, or on PATH."""
    words: Callable[[str, int, str], list[str]]
    """(model, port, an empty directory) -> the command's words after the program."""
    ready_path: str
    """Answers 200 when requests are served."""
    api_path: str = "/v1"


def _toka(model: str, port: int, directory: str) -> list[str]:
    # Files and batches of a server that is measured are not the user's. Nor do models' own defaults add a penalty.
    neutral = "sampling_defaults=neutral"
    return [*([f"model={model}"] if model else []), f"port={port}", f"data_dir={directory}", neutral]


def _vllm(model: str, port: int, _directory: str) -> list[str]:
    return ["serve", model, "--host", "127.0.0.1", "--port", str(port)]


def _sglang(model: str, port: int, _directory: str) -> list[str]:
    return ["serve", "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]


def _llama_cpp(model: str, port: int, _directory: str) -> list[str]:
    source = ["-m", model] if Path(model).is_file() else ["-hf", model]
    return [*source, "--host", "127.0.0.1", "--port", str(port)]


def _openvino(model: str, port: int, directory: str) -> list[str]:
    address = ["--rest_port", str(port), "--rest_bind_address", "127.0.0.1"]
    if Path(model).is_dir():
        return [*address, "--model_path", model, "--model_name", "default"]
    return [*address, "--source_model", model, "--model_repository_path", directory, "--task", "text_generation"]


PEERS = {
    "toka": Peer("toka", _toka, "/ready"),
    "vllm": Peer("vllm", _vllm, "/health"),
    "sglang": Peer("sglang", _sglang, "/health"),
    "llama.cpp": Peer("llama-server", _llama_cpp, "/health"),
    "openvino": Peer("ovms", _openvino, "/v2/health/ready", "/v3"),
}
"""Kinds of servers by their names in peer=. Documentation: docs.vllm.ai (vllm serve), docs.sglang.io (sglang serve),
llama.cpp's tools/server/README.md, docs.openvino.ai (OpenVINO Model Server)."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers."""

    base_url: str
    command: str
    """The command line, without what seems to be a secret."""


def program_of(name: str, environment: str | None) -> list[str]:
    """The words that begin its command. environment: the directory of a virtual environment, or a program; None for
    PATH. Raises ServerError."""
    program = PEERS[name].program
    if environment is None:
        if name == "toka":  # this one, whatever PATH says
            return [sys.executable, "-m", "tokasaurus"]
        if shutil.which(program) is None:
            raise ServerError(f"{name}: no {program} on PATH; peer_env= says where it is installed")
        return [program]
    path = Path(environment).expanduser()
    if path.is_file() and os.access(path, os.X_OK):
        return [str(path)]
    if (path / "bin" / program).is_file():
        return [str(path / "bin" / program)]
    raise ServerError(f"{name}: {path} is neither a program nor an environment with bin/{program}")


@contextmanager
def started(
    name: str, model: str | None, environment: str | None, arguments: str, start_timeout_s: float
) -> Iterator[Started]:
    """Runs the server while the block runs; yields when it answers.

    arguments: further ones, quoted as in a shell. Raises ServerError, with the
    end of its output if it does not start."""
    peer = PEERS[name]
    with tempfile.TemporaryDirectory(prefix="toka-bench-") as directory:
        port = _free_port()
        own = peer.words(model or "", port, directory)
        command = [*program_of(name, environment), *own, *words_of(name, arguments)]
        log = Path(directory) / "log"
        environ = dict(os.environ)
        if environment is not None and Path(environment).expanduser().is_dir():
            # PATH as in an activated environment: some servers start their own processes by PATH.
            environ["PATH"] = f"{Path(environment).expanduser() / 'bin'}{os.pathsep}{environ.get('PATH', '')}"
        processes: list[subprocess.Popen[bytes]] = []

        def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then stops the server
                env=environ,
            )
            processes.append(process)
            return process

        # A signal raises in the main thread. If it came within Popen, nobody would know the process that was started.
        with log.open("wb") as output, ThreadPoolExecutor(1) as pool:
            try:
                try:
                    process = pool.submit(start, output).result()
                except OSError as error:
                    raise ServerError(f"{name}: {command[0]}: {error.strerror}") from None
                _wait_until_ready(name, process, port, peer.ready_path, start_timeout_s, log)
                yield Started(f"http://127.0.0.1:{port}{peer.api_path}", shlex.join(without_secrets(command)))
            finally:
                pool.shutdown()
                for process in processes:
                    _stop(process)


def words_of(name: str, arguments: str) -> list[str]:
    """The words of peer_args. Raises ServerError."""
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise ServerError(f"peer_args: {name}: {error}: {arguments}") from None


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words, with *** in place of the values of options whose name ends with key, token, password or secret."""
    shown: list[str] = []
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        elif index and words[index - 1].startswith("-") and _SECRET.search(words[index - 1]):
            shown.append("***")
        else:
            shown.append(word)
    return shown


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(
    name: str, process: subprocess.Popen[bytes], port: int, path: str, timeout_s: float, log: Path
) -> None:
    """Raises ServerError."""
    began_s = time.monotonic()
    with progress_bar(f"{name} starts", timeout_s) as show:
        while (waited_s := time.monotonic() - began_s) < timeout_s:
            if process.poll() is not None:
                raise ServerError(f"{name} ended with {process.returncode} at its start:\n{_end_of(log)}")
            if status_of(f"http://127.0.0.1:{port}", path, 5) == 200:
                return
            show(waited_s)
            time.sleep(_LOOK_S)
    raise ServerError(f"{name} did not answer within {timeout_s:g} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_NUM_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it has started."""
    try:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:  # also if a second signal cuts the wait
        with suppress(ProcessLookupError):  # the rest of its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
