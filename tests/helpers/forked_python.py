"""Python programs of tests that begin with torch and this package imported: forked from a process that has done so.

A server of tests is four processes, whose imports take more time than all else. Here, `toka` and the servers of `LLM`
come from a nursery: an idle process with the modules, one for each process of pytest. A program that was forked has a
nursery of its own, for what it spawns. A nursery forks with CLONE_PARENT: a program is a child of the one that asked,
as if that had started it. It gets the caller's environment, working directory, signal mask and the descriptors that it
was to inherit, and no others.

What differs from programs that are started: modules that a process would not have are there, and count as its memory.
Tests about imports, memory or the interpreter itself start real ones: they are marked `spawns`.
"""

import atexit
import ctypes
import gc
import os
import pickle
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any, cast

MODULES = (
    *(
        "tokasaurus.model",
        "torch",
        "numpy",
        "orjson",
        "apsw",
        "fastapi",
        "uvicorn",
        "uvloop",
        "llguidance",
        "tokenizers",
    ),
    *("tokenizers", "tokasaurus.cli", "tokasaurus.config", "tokasaurus.processes.launch"),
    *("tokasaurus.processes.private_entry", "tokasaurus.server.app", "tokasaurus.manager.loop"),
    *("tokasaurus.model.worker.entry", "tokasaurus.model.worker.loop"),
)
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "TRITON_", "HF_")
"""Beginnings of variables that imported modules have read."""
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 64


@dataclass
class Program:
    """What a nursery is to run, besides the descriptors, which are sent beside it."""

    words: list[str]
    """After the interpreter: `-m MODULE …` or `-c CODE …`."""
    numbers: list[int]
    """The number of each descriptor in the program."""
    directory: str = field(default_factory=lambda: str(Path.cwd()))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    signal_mask: set[signal.Signals | int] = field(
        default_factory=lambda: cast(Any, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    )
    has_session: bool = False


class Nursery:
    """The end of one that asks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(self, program: Program, descriptors: list[int]) -> int:
        """The process id of a program that runs."""
        with self._lock:
            socket.send_fds(self._connection, [pickle.dumps(program)], descriptors)
            return int(self._connection.recv(32))


def started_nursery() -> Nursery:
    """One that imports its modules now. It ends with this process."""
    ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_end:
        code = f"from tests.helpers.forked_python import main; main({its_end.fileno()})"
        # A thread of numpy's library would not be there after the fork, which its own handlers of forks do not see.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code]
        subprocess.Popen(command, pass_fds=[its_end.fileno()], env=environment, start_new_session=True)
    return Nursery(ours)


def main(descriptor: int) -> None:
    """Of a nursery."""
    import importlib

    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> None:
    """Returns in each program, and never in the nursery."""
    while True:
        content, descriptors, _flags, _address = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not content:
            os._exit(0)
        program: Program = pickle.loads(content)
        pid = _fork_beside()
        if pid == 0:
            connection.close()
            _become(program, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _fork_beside() -> int:
    """As os.fork(); the parent of the new process is this one's."""
    api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    api.PyOS_BeforeFork()
    pid = int(libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    return pid


def _become(program: Program, descriptors: list[int]) -> None:
    """Run the program as an interpreter would, and end."""
    status = 1
    try:
        _take(descriptors, program.numbers)
        if program.has_session:
            os.setsid()
        os.environ.clear()
        os.environ.update(program.environment)
        os.chdir(program.directory)
        random.seed()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        _nurse_children()
        signal.pthread_sigmask(signal.SIG_SETMASK, cast(Any, program.signal_mask))
        status = _run(program.words)
    finally:
        os._exit(status)


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    import fcntl

    above = max([2, *numbers]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=number <= 2)
    kept = {0, 1, 2, *numbers}
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in kept:
            with suppress(OSError):
                os.close(number)


def _nurse_children() -> None:
    """What this process spawns from now on comes from a nursery of its own, which has no other descriptor."""
    ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # it ends with its parent
        nowhere = os.open(os.devnull, os.O_RDWR)
        _take([nowhere, nowhere, nowhere, its_end.fileno()], [0, 1, 2, 3])
        its_end.detach()
        _serve(socket.socket(fileno=3))
    its_end.close()
    nursery, really = Nursery(ours), util.spawnv_passfds

    def spawnv_passfds(path: Any, words: Any, descriptors: Any) -> int:
        texts = [os.fsdecode(word) for word in words]
        if "--multiprocessing-fork" not in texts:
            return really(path, words, descriptors)
        code = texts[texts.index("-c") :]
        numbers = [0, 1, 2, *descriptors]
        return nursery.start(Program(code, numbers), numbers)

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def _run(words: list[str]) -> int:
    """The exit status of `python WORDS`."""
    import runpy

    try:
        kind, subject, *rest = words
        if kind == "-m":
            sys.argv = ["-m", *rest]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(subject, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *rest]
            module = type(sys)("__main__")
            sys.modules["__main__"] = module
            exec(compile(subject, "<string>", "exec"), vars(module))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status


_nursery: Nursery | None = None
_lock = threading.Lock()


@contextmanager
def nursing() -> Iterator[None]:
    """Within the context, subprocess.Popen takes `toka` and the servers of `LLM` from a nursery."""
    really = getattr(subprocess, "_fork_exec", None)
    if really is None or _CLONE is None or not sys.platform.startswith("linux"):
        yield  # Python 3.10, and other systems: all programs are started
        return

    def fork_exec(words: Any, *rest: Any) -> int:
        program = _program_of([os.fsdecode(word) for word in words], rest)
        if program is None:
            return int(really(words, *rest))
        *_, stdin, _, _, stdout, _, stderr = rest[:11]
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        return _own_nursery().start(program, [*streams, *program.numbers[3:]])

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = really  # type: ignore[attr-defined]


def _own_nursery() -> Nursery:
    global _nursery
    with _lock:
        if _nursery is None:
            _nursery = started_nursery()
    return _nursery


def _program_of(words: list[str], rest: tuple[Any, ...]) -> Program | None:
    """The program of a call of fork_exec; None for one that is none of ours, or needs an interpreter of its own."""
    _executables, _close, kept, directory, environment_items, *_ = rest
    error_pipe, has_session = rest[12], rest[14]
    environment = dict(os.environ)
    if environment_items is not None:
        environment = dict(os.fsdecode(item).partition("=")[::2] for item in environment_items)
    is_ours = words[:3] == [sys.executable, "-m", "tokasaurus"] or (
        words[:2] == [sys.executable, "-c"] and "from tokasaurus.processes.private_entry import main" in words[2]
    )
    changed = {name for name, value in os.environ.items() ^ environment.items()}
    if not is_ours or any(map(callable, rest)) or any(name.startswith(READ_AT_IMPORT) for name in changed):
        return None
    numbers = [0, 1, 2, *(number for number in kept if number != error_pipe)]
    directory = str(Path.cwd()) if directory is None else os.fsdecode(directory)
    return Program(words[1:], numbers, directory, environment, has_session=bool(has_session))
