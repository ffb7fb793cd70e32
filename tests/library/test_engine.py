"""An engine of its own for a Python program: what it serves, its restarts, its end with the program.

One test runs the real processes; in the others, stubs take their places, which start in a second."""

import json
import os
import resource
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.examples import few
from tests.helpers.limits import join
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_tiny_model
from tests.library.helpers import stub_entry
from tests.library.helpers.engine_scripts import (
    directory_of,
    environment_of_scripts,
    launcher_of,
    pids_of,
    running_script,
    stub_entries,
)
from tokasaurus.library import engine as engine_module
from tokasaurus.library.engine import EngineError, EngineNotUp, PrivateEngine
from tokasaurus.processes import private_server
from tokasaurus.processes.private_entry import lock_file

GONE_S = 5.0
"""A free machine needs a tenth of it."""
UP_S = 60.0
SCRIPT = """
import os, signal, sys, threading, time
from tests.library.helpers.engine_scripts import launcher_of, started_engine
engine = started_engine()
"""
DEATHS = {
    "an exception": "raise RuntimeError('the script')",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "sys.exit": "sys.exit(3)",
    "os._exit": "os._exit(3)",
    "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
    "its last line": "",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(0.5)'])",
}
SIMILAR = {"an exception", "sys.exit", "exec"}
"""To others, so that most runs leave them out."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    save_tiny_model(directory, "llama", num_layers=1)
    return directory


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PrivateEngine]]:
    """Starts an engine whose processes are stubs; it is closed at the end, and then nothing may be left."""
    engines = []
    directory = tempfile.mkdtemp(prefix="t-")  # a short path, since it is a part of a socket's
    monkeypatch.setattr(tempfile, "tempdir", directory)
    monkeypatch.setenv(stub_entry.ENTRIES, "")
    monkeypatch.setattr(private_server, "ENTRY", "")

    def start(
        *words: str,
        worker: str = "run_worker",
        show: Callable[[str], None] = lambda _: None,
        into: list[PrivateEngine] | None = None,
    ) -> PrivateEngine:
        stub_entry.use_entries(stub_entries(worker))
        engine = PrivateEngine([f"model={model}", *words], show)
        engines.append(weakref.ref(engine))
        if into is not None:
            into.append(engine)
        engine.start()
        return engine

    yield start
    for reference in engines:
        engine = reference()
        if engine is not None:
            engine.close()
    Path(directory).rmdir()


def served_name(engine: PrivateEngine) -> str:
    """What the stub of a server answers to a connection."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(engine.socket_path)
        return client.makefile("rb").read().decode()


def kill_and_wait(engine: PrivateEngine, pid: int) -> None:
    """Kill a process of the engine; returns when its socket is dead."""
    os.kill(pid, signal.SIGKILL)
    assert_all_end([pid], GONE_S)
    deadline = time.monotonic() + GONE_S
    while engine._supervisor._accepts_connections():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.spawns
def test_real_processes_serve_http_to_this_user_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_API_KEY", "of other servers")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    lines: list[str] = []
    flags = [f"model={model}", "cpu_isa=torch", "kv_cache_num_tokens=1024", "log_level=warning"]
    engine = PrivateEngine(flags, lines.append)
    engine.start()
    try:
        path, pids = Path(engine.socket_path), pids_of(engine)
        assert [stat.S_IMODE(status.stat().st_mode) for status in (path, path.parent)] == [0o600, 0o700]
        assert engine.model == "tiny-llama"
        assert any("model worker  device" in line for line in lines)
        assert [line for line in lines if "\x1b" in line] == []
        assert any(line.startswith(f"ready: unix:{path} serves tiny-llama; ") for line in lines)
        assert {"toka-server", "toka-manager", "toka-worker-0"} <= {psutil.Process(pid).name() for pid in pids}
        assert os.getsid(0) not in [os.getsid(pid) for pid in pids]  # a terminal's Ctrl-C reaches the script alone
        assert [psutil.Process(pid).net_connections("inet") for pid in pids] == [[] for _ in pids]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            answer = client.post("/v1/completions", json={"model": "default", "prompt": "a", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            assert client.get("/v1/batches").status_code == 501
    finally:
        started = time.monotonic()
        engine.close()
    assert time.monotonic() - started < GONE_S
    assert_all_end(pids, 0.1)
    assert not path.parent.exists()


# Restarts


def test_a_killed_launcher_is_started_again_at_the_same_path(start) -> None:
    lines: list[str] = []
    engine = start(show=lines.append)
    path, before = engine.socket_path, pids_of(engine)
    kill_and_wait(engine, launcher_of(engine))
    engine.wait_until_up(UP_S)
    (line,) = (line for line in lines if "died" in line)
    assert line.startswith("toka: the engine died: killed by signal 9; ")
    assert line.endswith("; restart 1")
    assert served_name(engine) == "tiny-llama"
    assert engine.socket_path == path
    assert not set(before) & set(pids_of(engine))
    assert_all_end(before, 0.1)


def test_a_killed_server_is_started_again_by_the_launcher(start) -> None:
    lines: list[str] = []
    engine = start(show=lines.append)
    before = {psutil.Process(pid).name(): pid for pid in pids_of(engine)}
    os.kill(before["toka-server"], signal.SIGKILL)
    assert_all_end([before["toka-server"]], GONE_S)  # what it accepts before it is dead gets no answer
    assert served_name(engine) == "tiny-llama", "the socket stays open"
    engine.wait_until_up(UP_S)
    after = {psutil.Process(pid).name(): pid for pid in pids_of(engine)}
    assert {name for name in after if after[name] != before[name]} == {"toka-server"}
    (line,) = (line for line in lines if "died" in line)
    assert line.startswith("toka: server died: killed by signal 9 (SIGKILL)")
    assert line.endswith("; restart 1 of the server now")


def test_a_restart_is_the_first_start_again_whatever_the_script_has_changed(
    model: Path, start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    engine = start("model=./tiny-llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(stub_entry.ENTRIES)
    kill_and_wait(engine, launcher_of(engine))
    engine.wait_until_up(UP_S)
    assert served_name(engine) == "tiny-llama"


def test_an_engine_that_dies_again_and_again_is_given_up(start, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    engine = start(show=lines.append)
    monkeypatch.setattr(engine_module, "MAX_RESTARTS", 1)
    kill_and_wait(engine, launcher_of(engine))
    engine.wait_until_up(UP_S)
    kill_and_wait(engine, launcher_of(engine))
    with pytest.raises(EngineError, match=r"^the engine died again after 1 restarts within 10 minutes: killed by"):
        engine.wait_until_up(UP_S)
    assert lines[-1].startswith("toka: the engine died again")


def test_a_restart_that_fails_is_final(model: Path, start, tmp_path: Path) -> None:
    moved = tmp_path / "model"
    shutil.copytree(model, moved)
    engine = start(f"model={moved}")
    shutil.rmtree(moved)
    kill_and_wait(engine, launcher_of(engine))
    with pytest.raises(EngineError, match=rf"^the engine did not start again: .*{moved}"):
        engine.wait_until_up(UP_S)


def restarts(lines: list[str]) -> list[str]:
    """Their numbers, as shown."""
    return [line.partition("; restart ")[2] for line in lines if "; restart " in line]


@few(1, "worker", ["run_worker_that_never_starts", "run_worker_that_is_killed"])
def test_an_engine_that_is_killed_while_it_starts_again_is_started_once_more(start, worker: str) -> None:
    """Its launcher, while the worker does not start; or the worker."""
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if "; restart " in line:
            entries = stub_entries(worker if line.endswith(" 1") else "run_worker")
            environment = engine._supervisor._environment  # of the start that follows
            environment[stub_entry.ENTRIES] = ",".join((entries.server, entries.manager, entries.worker))
        elif restarts(lines) == ["1"] and worker == "run_worker_that_never_starts" and not has_killed.is_set():
            has_killed.set()
            os.kill(launcher_of(engine), signal.SIGKILL)

    has_killed = threading.Event()
    engine = start(show=show)
    kill_and_wait(engine, launcher_of(engine))
    engine.wait_until_up(UP_S)
    assert served_name(engine) == "tiny-llama"
    assert restarts(lines) == ["1", "2"]


def test_a_wait_ends_with_its_time_and_with_the_engine(start) -> None:
    is_starting_again, may_go_on = threading.Event(), threading.Event()

    def show(line: str) -> None:
        """A start again stops at its first line, until the test lets it go on."""
        if line.endswith("; restart 1"):
            is_starting_again.set()
        elif is_starting_again.is_set():
            may_go_on.wait(UP_S)

    engine = start(show=show)
    kill_and_wait(engine, launcher_of(engine))
    with pytest.raises(EngineNotUp, match=r"^the engine does not serve again after 0.1 s$"):
        engine.wait_until_up(0.1)
    closing = threading.Timer(0.2, engine.close)
    closing.start()
    with pytest.raises(EngineError, match=r"^the engine is closed$"):
        engine.wait_until_up(UP_S)
    may_go_on.set()
    join(closing)
    assert_all_end([launcher_of(engine)], 0.1)
    assert not directory_of(engine).exists()


# Starts that fail


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("run_worker_with_user_error", "model worker (rank 0) failed: kv_cache_num_tokens=7 does not fit"),
        pytest.param(
            "run_worker_that_raises",
            "model worker (rank 0) failed: RuntimeError: tensor broke",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_failed_start_raises_the_line_that_toka_prints(start, worker: str, reason: str) -> None:
    with pytest.raises(EngineError) as raised:
        start(worker=worker)
    assert str(raised.value) == reason
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_wrong_flags_and_models_are_one_line(start, tmp_path: Path) -> None:
    for word, reason in {
        "page_size=0": "page_size=0: must be a whole number from 1 to 2147483647",
        f"model={tmp_path / 'absent.gguf'}": f"there is no file {tmp_path / 'absent.gguf'}",
    }.items():
        with pytest.raises(EngineError) as raised:
            start(word)
        assert str(raised.value) == reason


def test_without_files_or_space_an_engine_says_so(start, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(limits[0]) if not Path(f"/proc/self/fd/{number}").is_symlink()]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], limits[1]))  # two are left
    try:
        with pytest.raises(EngineError, match=r"^the engine cannot be started: too many open files: "):
            start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with monkeypatch.context() as context:
        context.setattr(tempfile, "tempdir", "/absent")
        with pytest.raises(EngineError, match=r"^the engine cannot be started: /absent/.*: No such file or directory$"):
            start()


def test_close_ends_a_start_in_another_thread(start) -> None:
    errors: list[str] = []
    shown = threading.Event()
    engines: list[PrivateEngine] = []

    def run() -> None:
        with pytest.raises(EngineError) as raised:
            start(show=lambda _: shown.set(), into=engines)
        errors.append(str(raised.value))

    thread = threading.Thread(target=run)
    thread.start()
    assert shown.wait(UP_S)
    engines[0].close()
    join(thread)
    assert len(errors) == 1


# The end


def test_close_ends_everything_and_may_be_called_again(start) -> None:
    engine = start()
    pids, directory = pids_of(engine), directory_of(engine)
    engine.close()
    assert_all_end(pids, 0.1)
    assert not directory.exists()
    engine.close()
    with pytest.raises(EngineError, match=r"^the engine is closed$"):
        engine.wait_until_up(UP_S)


def test_an_engine_that_nobody_refers_to_is_closed(start) -> None:
    engine = start()
    pids, directory = pids_of(engine), directory_of(engine)
    del engine
    assert_all_end(pids, GONE_S)
    assert not directory.exists()


@pytest.mark.parametrize(
    "death", [pytest.param(death, marks=[pytest.mark.long] if death in SIMILAR else []) for death in DEATHS]
)
def test_nothing_is_left_after_the_script_ends_with(death: str, model: Path) -> None:
    with running_script(SCRIPT + DEATHS[death], model) as script:
        pids, directory = json.loads(script.read_line())
        assert len(pids) >= 4
        script.wait()
        assert script.left_after(GONE_S, [*pids]) == []
        assert not Path(directory).exists()


def test_nothing_is_left_of_a_script_that_is_killed_while_the_engine_starts(model: Path) -> None:
    text = """
import os, psutil, signal
from tests.library.helpers.engine_scripts import started_engine
def show(line):
    if "device" in line and "worker" in line:
        print([child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
started_engine(show)
"""
    with running_script(text, model) as script:
        pids = json.loads(script.read_line())
        script.wait()
        assert script.left_after(GONE_S, pids) == []


def test_a_directory_that_no_process_holds_is_removed_once_it_is_old(tmp_path: Path) -> None:
    for name in ("abandoned", "held", "new", "foreign"):
        (tmp_path / f"toka-engine-{name}").mkdir()
    held = lock_file(tmp_path / "toka-engine-held")
    os.close(lock_file(tmp_path / "toka-engine-abandoned"))
    os.close(lock_file(tmp_path / "toka-engine-new"))
    for name in ("abandoned", "held", "foreign"):
        os.utime(tmp_path / f"toka-engine-{name}", (1, 1))
    engine_module._remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"toka-engine-held", "toka-engine-new", "toka-engine-foreign"}
    os.close(held)


@pytest.mark.long
def test_the_next_start_removes_what_was_left_when_script_and_launcher_were_killed_at_once(model: Path) -> None:
    killed = (
        SCRIPT
        + """
os.kill(launcher_of(engine), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    text = """
import json, os, subprocess, sys
from tests.helpers.processes import assert_all_end
from tests.library.helpers.engine_scripts import directory_of, started_engine
engine = started_engine()
pids, left = json.loads(subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True).stdout)
assert_all_end(pids, 10)
assert os.path.exists(left)
for path in (left, directory_of(engine)):
    os.utime(path, (1, 1))
started_engine().close()
assert not os.path.exists(left)
assert directory_of(engine).exists()
"""
    with running_script(f"KILLED = {killed!r}{text}", model) as script:
        assert script.wait() == (0, "")
        assert script.left_after(GONE_S, []) == []


def test_forked_children_neither_end_the_engine_nor_keep_it(model: Path) -> None:
    text = (
        SCRIPT
        + """
if os.fork() == 0:
    engine.wait_until_up(60)  # it may use the engine
    sys.exit(0)  # closes what the interpreter's end closes
assert os.wait()[1] == 0
engine.wait_until_up(60)
os.kill(engine._supervisor._server.pid, 0)
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with running_script(text, model) as script:
        pids, _ = json.loads(script.read_line())
        child = int(script.read_line())
        try:
            assert script.left_after(GONE_S, pids) == []
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_scripts_from_standard_input_start_engines_in_threads_and_under_an_event_loop(model: Path) -> None:
    text = """
import asyncio, os, signal, threading
from tests.library.helpers.engine_scripts import started_engine
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of no effect on the engine, though programs inherit it
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
engines = []
thread = threading.Thread(target=lambda: engines.append(started_engine()))
thread.start()
thread.join()
async def main():
    engines.append(started_engine())
asyncio.run(main())
for engine in engines:  # the thread that has started one has ended
    engine.wait_until_up(0)
assert len({engine.socket_path for engine in engines}) == 2
engines[0].close()
engines[1].wait_until_up(0)
print("both", flush=True)
"""
    with running_script(text, model, "-") as script:
        both = [json.loads(script.read_line()) for _ in range(2)]
        assert script.read_line() == "both"
        assert script.wait() == (0, "")
        assert script.left_after(GONE_S, both[0][0] + both[1][0]) == []


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [True, False])
def test_an_engine_of_a_notebook_outlives_an_interrupt_and_ends_with_the_kernel(model: Path, is_killed: bool) -> None:
    from jupyter_client import KernelManager

    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(env=environment_of_scripts(model, Path(directory)))
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=UP_S)

            def run(cell: str) -> str:
                printed = []
                hook = printed.append
                reply = client.execute_interactive(cell, timeout=UP_S, output_hook=hook)
                text = "".join(message["content"].get("text", "") for message in printed)
                assert reply["content"]["status"] == "ok", reply["content"]
                return text

            imports = "from tests.library.helpers.engine_scripts import launcher_of, started_engine"
            shown = run(f"{imports}\nengine = started_engine(print)")
            assert "ready: " in shown
            pids, _ = json.loads(shown.splitlines()[-1])
            manager.interrupt_kernel()
            assert run("engine.wait_until_up(0); print(launcher_of(engine))").strip() == str(pids[0])
            if is_killed:
                manager.shutdown_kernel(now=True)
            else:
                client.shutdown()  # the notebook's Restart
            assert_all_end(pids, GONE_S)
            deadline = time.monotonic() + GONE_S
            while list(Path(directory).glob("toka-*")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
