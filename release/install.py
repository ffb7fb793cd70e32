"""Install a file of a release as a user would, where no compiler is found, and ask the server that it starts."""

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 300
INSTALL_SECONDS = 1800
_ASK = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
whole = client.chat.completions.create(model="default", messages=question, max_tokens=8, temperature=0)
parts = client.chat.completions.create(model="default", messages=question, max_tokens=8, temperature=0, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == whole.choices[0].message.content, (text, whole)
assert "Paris" in text, text
"""
_KERNELS = """
from pathlib import Path
from tokasaurus.model.cpu import build
level = build.choose_set(None, build.machine_sets())
path = build.find_or_build(build.kernel_library(level))
assert path.parent == build.PREBUILT, path
"""


class CheckFailed(Exception):
    """The message says what is wrong, in a few lines."""


def install(python: str, files: list[str], directory: Path) -> Path:
    """A new environment of `python` in `directory` with `files`; returns its python.

    files: for pip. Raises CheckFailed.
    """
    _run([python, "-m", "venv", str(directory)], _environment(), INSTALL_SECONDS)
    inner = directory / "bin" / "python"
    pip = [str(inner), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *files], _environment(), INSTALL_SECONDS)
    _run([str(inner), "-m", "pip", "check"], _environment(), INSTALL_SECONDS)
    return inner


def check_kernels(python: Path) -> None:
    """The wheel's own kernels are used. Raises CheckFailed."""
    with tempfile.TemporaryDirectory() as cache:
        _run([str(python), "-c", _KERNELS], _without_compiler(python, cache), 60)


def check_server(python: Path) -> None:
    """`toka` serves the demo model, `toka ping` and OpenAI's client get an answer, and Ctrl-C ends it with exit code 0.

    Raises CheckFailed.
    """
    with tempfile.TemporaryDirectory() as cache, _served(python, cache) as url:
        environment = _without_compiler(python, cache)
        toka = str(python.parent / "toka")
        answer = _run([toka, "ping", "prompt=The capital of France is", f"base_url={url}"], environment, 60)
        if "Paris" not in answer:
            raise CheckFailed(f"toka ping answered {answer!r}")
        _run([str(python), "-c", _ASK, url], environment, 60)


def _environment() -> dict[str, str]:
    """Without what would let Python find the package in this folder."""
    return {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}


def _without_compiler(python: Path, cache: str) -> dict[str, str]:
    """An environment whose only commands are those of the installed packages."""
    return _environment() | {"PATH": str(python.parent), "TOKA_CACHE": cache}


@contextmanager
def _served(python: Path, cache: str) -> Iterator[str]:
    """The address of a server of the demo model. Raises CheckFailed, also if it does not end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(cache, "server.log")
    command = [str(python.parent / "toka"), f"port={port}", "kv_cache_num_tokens=8192"]
    with log.open("w") as file:
        server = subprocess.Popen(
            command,
            env=_without_compiler(python, cache),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=_heed_interrupts,
        )
    try:
        _await_ready(server, log)
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGINT)
        if (code := server.wait(timeout=60)) != 0:
            raise CheckFailed(f"the server ended with exit code {code}: {_end_of(log)}")
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=60)


def _heed_interrupts() -> None:
    """A shell's background job, such as `nohup make release-check &`, ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await_ready(server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_s = time.monotonic() + READY_SECONDS
    while not re.search(r"^ready\b", log.read_text(), flags=re.MULTILINE):
        if server.poll() is not None or time.monotonic() > ends_s:
            raise CheckFailed(f"the server was not ready after {READY_SECONDS} s or has ended: {_end_of(log)}")
        time.sleep(0.2)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-20:])


def _run(command: list[str], environment: dict[str, str], timeout_s: int) -> str:
    """What the command prints. Raises CheckFailed."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd="/",  # not where the package lies
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"{' '.join(command)}: not done after {timeout_s} s") from None
    if done.returncode != 0:
        raise CheckFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def version_of(python: str) -> str:
    """Such as 3.10. Raises CheckFailed."""
    return _run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], _environment(), 60).strip()
