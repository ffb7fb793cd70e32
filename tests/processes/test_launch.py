"""The launcher with stub entries in real processes: start, orderly end, and every kind of death."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.examples import few
from tests.helpers.processes import assert_all_end
from tests.monitoring.helpers.machines import Machine, write_machine
from tokasaurus.monitoring.shortage import hint_at_memory
from tokasaurus.processes.launch import read_start_times, write_start_times

HELPERS = Path(__file__).parent / "helpers"
ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, str(HELPERS / "stub_launcher.py")]

LONG_GRACE_S = "600"
"""Much longer than `Launcher.exit_code` waits: no process ends in time because its grace period is over."""


class Launcher:
    """A launcher in a process of its own, and the lines that it and its children write to stderr."""

    def __init__(self, model: Path, worker: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                HELPERS / "stub_launcher.py",
                worker,
                f"model={model}",
                "port=0",
                "cpu_isa=torch",
                "log_level=debug",  # every phase gets a line
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={"GRACE_S": LONG_GRACE_S, **os.environ, "PYTHONPATH": f"{HELPERS}:{ROOT}"},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for_line(self, pattern: str) -> str:
        def matching() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._changed:
            assert self._changed.wait_for(matching, timeout=60), self.lines
        line = matching()
        assert line is not None
        return line

    def exit_code(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=30)
        return code

    def children(self) -> dict[str, int]:
        """Pid of each child process of the launcher that has a `toka-` title, by title."""
        # /proc/PID/task/PID/children may miss one while another ends.
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                found[child.name()] = child.pid
        return {name: pid for name, pid in found.items() if name.startswith("toka-")}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=30)


@pytest.fixture
def launch(model: Path):
    launchers: list[Launcher] = []

    def start(worker: str = "run_worker", *flags: str) -> Launcher:
        launchers.append(Launcher(model, worker, *flags))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.end()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


CHILDREN = {"toka-server": "server", "toka-manager": "manager", "toka-worker-0": "model worker (rank 0)"}


def test_ready_line_names_url_model_kv_size_and_phase_times(launch) -> None:
    launcher = launch()
    ready = launcher.wait_for_line("^ready: ")
    match = re.fullmatch(r"ready: http://127\.0\.0\.1:(\d+) serves tiny-llama; KV cache 1,600 tokens; \d+\.\d s", ready)
    assert match, ready
    launcher.wait_for_line("^stop: ")
    hints = launcher.lines[launcher.lines.index(ready) + 1 :][:3]
    assert hints == [
        f"page:  http://127.0.0.1:{match[1]}/",
        f"try:   toka ping port={match[1]} prompt='tell me a joke'",
        "stop:  Ctrl-C, then open requests may take 30 s; a second one kills",
    ]
    ended = [line.split() for line in launcher.lines if re.search(r" \d+\.\d\d s( |$)", line)]
    phases = [" ".join(words[: words.index("s") - 1]) for words in ended]
    for phase in ("toka imports", "toka find model", "server imports", "manager imports"):
        assert phase in phases
    assert [phase for phase in phases if "worker" in phase] == ["model worker imports", "model worker load weights"]
    assert any("load weights" in line and line.endswith("1.25 s  7 of [7] layers") for line in launcher.lines)
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=30) as connection:
        assert connection.makefile("rb").read() == b"tiny-llama"
    assert set(launcher.children()) == set(CHILDREN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_all_with_exit_code_0(launch, number: signal.Signals) -> None:
    launcher = launch("run_worker", "served_model_name=other")
    assert " serves other;" in launcher.wait_for_line("^ready: ")
    pids = list(launcher.children().values())
    # To the whole session, as a terminal does.
    os.killpg(launcher.process.pid, number) if number == signal.SIGINT else launcher.process.send_signal(number)
    assert launcher.exit_code() == 0
    assert_all_end(pids, within_s=0.1)
    assert launcher.lines[-1] == "stopped"
    assert not any("Traceback" in line for line in launcher.lines)


@pytest.mark.long
def test_signal_while_starting_ends_all_with_exit_code_0(launch) -> None:
    launcher = launch("run_worker_that_never_starts")
    launcher.wait_for_line("stuck")
    pids = list(launcher.children().values())
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.exit_code() == 0
    assert_all_end(pids, within_s=0.1)
    assert not any("Traceback" in line for line in launcher.lines)


def test_second_ctrl_c_kills_a_worker_that_will_not_end(launch) -> None:
    launcher = launch("run_worker_that_will_not_end")
    launcher.wait_for_line("^ready: ")
    pids = list(launcher.children().values())
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for_line("^stopping")
    time.sleep(0.5)  # a signal that follows sooner counts as the same request
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.exit_code() == 0  # without it: the grace period
    assert_all_end(pids, within_s=0.1)


def test_sigterm_ends_a_worker_that_will_not_end(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACE_S", "1")
    launcher = launch("run_worker_that_will_not_end")
    launcher.wait_for_line("^ready: ")
    pids = list(launcher.children().values())
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.exit_code() == 0
    assert_all_end(pids, within_s=0.1)


@few(2, "title", CHILDREN)
def test_kill_9_of_a_child_ends_the_others_and_names_it_without_restarts(launch, title: str) -> None:
    launcher = launch("run_worker", "max_restarts=0")
    launcher.wait_for_line("^ready: ")
    children = launcher.children()
    os.kill(children[title], signal.SIGKILL)
    assert launcher.exit_code() == 1
    assert_all_end(list(children.values()), within_s=0.1)
    name = "the server" if title == "toka-server" else "the engine"
    end = f"{hint_at_memory(signal.SIGKILL)}; {name} has failed too often (max_restarts)"
    assert launcher.lines[-1] == f"toka: {CHILDREN[title]} died: killed by signal 9 (SIGKILL){end}"


@few(1, ("title", "number"), [("toka-worker-0", signal.SIGKILL), ("toka-manager", signal.SIGTERM)])
def test_a_killed_part_of_the_engine_is_started_again(launch, title: str, number: signal.Signals) -> None:
    launcher = launch()
    launcher.wait_for_line("^ready: ")
    before = launcher.children()
    os.kill(before[title], number)
    launcher.wait_for_line(r"^the engine is ready again after \d+\.\d s \(restart 1\)$")
    after = launcher.children()
    death = f"{CHILDREN[title]} died: killed by signal {number} ({number.name}){hint_at_memory(number)}"
    assert f"toka: {death}; restart 1 of the engine now" in launcher.lines
    assert after.keys() == before.keys()
    assert after["toka-server"] == before["toka-server"]
    assert after["toka-manager"] != before["toka-manager"]
    assert after["toka-worker-0"] != before["toka-worker-0"]
    assert_all_end([before["toka-manager"], before["toka-worker-0"]], within_s=0.1)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.exit_code() == 0
    assert_all_end(list(after.values()), within_s=0.1)


def served_name(port: str) -> bytes:
    """What the stub of the server sends to who connects; waits for a server that is being started."""
    with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as connection:
        return connection.makefile("rb").read()


def test_a_killed_server_is_started_again_behind_the_open_port_and_the_engine_goes_on(launch) -> None:
    launcher = launch()
    match = re.search(r":(\d+) serves", launcher.wait_for_line("^ready: "))
    assert match is not None
    before = launcher.children()
    os.kill(before["toka-server"], signal.SIGKILL)
    wait_until(lambda: "toka-server" not in launcher.children() or launcher.children() != before)
    assert served_name(match[1]) == b"tiny-llama", "nobody is refused, not even before the next server has begun"
    launcher.wait_for_line(r"^the server is ready again after \d+\.\d s \(restart 1\)$")
    death = f"server died: killed by signal 9 (SIGKILL){hint_at_memory(signal.SIGKILL)}"
    assert f"toka: {death}; restart 1 of the server now" in launcher.lines
    after = launcher.children()
    assert after.pop("toka-server") != before.pop("toka-server")
    assert after == before
    for pid in after.values():  # an engine that dies later reaches the new server
        os.kill(pid, signal.SIGKILL)
    launcher.wait_for_line("^the engine is ready again")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.exit_code() == 0
    assert_all_end([*before.values(), *after.values()], within_s=0.1)
    with pytest.raises(ConnectionRefusedError):
        served_name(match[1])


def test_server_and_engine_killed_at_once_are_both_started_again(launch) -> None:
    launcher = launch()
    launcher.wait_for_line("^ready: ")
    for pid in launcher.children().values():
        os.kill(pid, signal.SIGKILL)
    launcher.wait_for_line("^the engine is ready again")
    launcher.wait_for_line("^the server is ready again")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.exit_code() == 0


def test_a_server_that_dies_again_and_again_while_it_starts_ends_all(launch) -> None:
    launcher = launch("run_worker", "max_restarts=2")
    launcher.wait_for_line("^ready: ")
    killed = set[int]()
    while launcher.process.poll() is None:
        pid = launcher.children().get("toka-server")
        if pid is not None and pid not in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    assert launcher.exit_code() == 1
    plans = [line.rpartition("; ")[2] for line in launcher.lines if "of the server" in line]
    assert plans == ["restart 1 of the server now", "restart 2 of the server in 1 s"]
    assert launcher.lines[-1].endswith("; the server has failed too often (max_restarts)")


def test_a_server_killed_before_the_first_start_is_over_ends_all(launch) -> None:
    launcher = launch("run_worker_that_never_starts")
    launcher.wait_for_line("stuck")
    wait_until(lambda: "toka-server" in launcher.children())
    children = launcher.children()
    os.kill(children["toka-server"], signal.SIGKILL)
    assert launcher.exit_code() == 1
    assert launcher.lines[-1].startswith("toka: server died: killed by signal 9 (SIGKILL)")
    assert "restart" not in launcher.lines[-1]
    assert_all_end([*children.values()], within_s=0.1)


def test_a_server_killed_while_it_drains_ends_all_in_order(launch) -> None:
    launcher = launch("run_worker", "drain_seconds=600")
    match = re.search(r":(\d+) serves", launcher.wait_for_line("^ready: "))
    assert match is not None
    children = launcher.children()
    os.kill(children["toka-server"], signal.SIGSTOP)  # so that it does not end by itself
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for_line("^stopping")
    os.kill(children["toka-server"], signal.SIGKILL)
    assert launcher.exit_code() == 0
    assert launcher.lines[-1] == "stopped"
    assert not any("restart" in line for line in launcher.lines)
    assert_all_end([*children.values()], within_s=0.1)
    with pytest.raises(ConnectionRefusedError):
        served_name(match[1])


def test_a_stop_signal_in_the_pause_before_a_restart_of_the_server(launch) -> None:
    launcher = launch()
    launcher.wait_for_line("^ready: ")
    children = launcher.children()
    os.kill(children["toka-server"], signal.SIGKILL)
    wait_until(lambda: launcher.children().get("toka-server", children["toka-server"]) != children["toka-server"])
    os.kill(launcher.children()["toka-server"], signal.SIGKILL)
    launcher.wait_for_line("restart 2 of the server in 1 s$")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.exit_code() == 0
    assert launcher.lines[-1] == "stopped"
    assert_all_end([*children.values()], within_s=0.1)


def test_an_engine_that_dies_again_and_again_ends_the_server(launch) -> None:
    launcher = launch("run_worker_that_returns_after_ready", "max_restarts=2")
    assert launcher.exit_code() == 1
    pauses = [line for line in launcher.lines if "of the engine" in line]
    plans = [line.partition("; ")[2] for line in pauses]
    assert plans == ["restart 1 of the engine now", "restart 2 of the engine in 1 s"]
    assert launcher.lines[-1] == (
        "toka: model worker (rank 0) died: exit code 0; the engine has failed too often (max_restarts)"
    )


def test_replicas_go_on_without_one_that_dies_again_and_again_until_none_is_left(launch) -> None:
    launcher = launch("run_worker_that_returns_in_replica_1", "max_restarts=1", "dp_size=2")
    assert "KV cache 1,600 tokens for each of 2 replicas; " in launcher.wait_for_line("^ready: ")
    launcher.wait_for_line("1 of 2 replicas go on")
    lines = [line for line in launcher.lines if line.startswith("toka: ")]
    assert lines == [
        "toka: model worker 1 (rank 0) died: exit code 0; restart 1 of replica 1 now",
        "toka: model worker 1 (rank 0) died: exit code 0; replica 1 has failed too often (max_restarts); "
        "1 of 2 replicas go on",
    ]
    before = launcher.children()
    assert before.keys() == {"toka-server", "toka-manager0", "toka-worker0-0"}
    os.kill(before["toka-manager0"], signal.SIGKILL)
    launcher.wait_for_line(r"^replica 0 is ready again")
    os.kill(launcher.children()["toka-worker0-0"], signal.SIGKILL)
    assert launcher.exit_code() == 1
    assert launcher.lines[-1].endswith("; replica 0 has failed too often (max_restarts)")


def test_a_stopped_manager_is_killed_and_started_again(launch) -> None:
    launcher = launch("run_worker", "watchdog_seconds=1")
    launcher.wait_for_line("^ready: ")
    before = launcher.children()
    time.sleep(3.2)  # after that long without a sign of life it would be killed
    assert launcher.children() == before
    os.kill(before["toka-manager"], signal.SIGSTOP)
    line = launcher.wait_for_line(r"^toka: manager gave no sign of life for \d+ s \(watchdog_seconds\); restart 1")
    seconds = re.search(r"for (\d+) s", line)
    assert seconds is not None
    assert 3 <= int(seconds[1]) < 30, "3 or 4 on a free machine"
    launcher.wait_for_line("^the engine is ready again")
    assert_all_end([before["toka-manager"], before["toka-worker-0"]], within_s=0.1)


@pytest.mark.long
def test_all_processes_stopped_together_go_on_when_they_are_continued(launch) -> None:
    """As a shell does with Ctrl-Z and fg."""
    launcher = launch("run_worker", "watchdog_seconds=2")
    launcher.wait_for_line("^ready: ")
    before = launcher.children()
    os.killpg(launcher.process.pid, signal.SIGSTOP)
    time.sleep(7)
    os.killpg(launcher.process.pid, signal.SIGCONT)
    time.sleep(3)
    assert launcher.children() == before
    assert not any("restart" in line for line in launcher.lines)


def test_kill_9_of_the_launcher_leaves_no_child(launch) -> None:
    launcher = launch()
    launcher.wait_for_line("^ready: ")
    pids = list(launcher.children().values())
    launcher.process.kill()
    assert_all_end(pids, within_s=30)


def test_exception_while_starting_is_logged_and_ends_in_one_line(launch) -> None:
    launcher = launch("run_worker_that_raises")
    assert launcher.exit_code() == 1
    assert any("Traceback" in line for line in launcher.lines)
    assert launcher.lines[-1] == "toka: model worker (rank 0) failed: RuntimeError: tensor broke"


def test_users_mistake_found_by_a_child_is_one_line_without_traceback(launch) -> None:
    launcher = launch("run_worker_with_user_error")
    assert launcher.exit_code() == 1
    assert launcher.lines[-1] == "toka: model worker (rank 0) failed: kv_cache_num_tokens=7 does not fit"
    assert not any("Traceback" in line for line in launcher.lines)


def test_a_flag_that_a_worker_refuses_ends_with_the_exit_code_of_a_wrong_flag(launch) -> None:
    launcher = launch("run_worker_that_refuses_a_flag")
    assert launcher.exit_code() == 2
    assert launcher.lines[-1] == "toka: model worker (rank 0) failed: device=cuda: there is none"
    assert not any("Traceback" in line for line in launcher.lines)


def test_child_that_ends_by_itself_ends_the_server(launch) -> None:
    launcher = launch("run_worker_that_returns")
    assert launcher.exit_code() == 1
    assert launcher.lines[-1] == "toka: model worker (rank 0) died: exit code 0"


def test_busy_port_is_one_line(launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        launcher = launch("run_worker", f"port={port}")
        assert launcher.exit_code() == 1
    assert launcher.lines == [
        f"toka: port={port}: cannot listen on 127.0.0.1: Address already in use; choose another port="
    ]


def test_a_unix_socket_takes_the_place_of_the_port(launch) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        path = Path(directory, "socket")
        launcher = launch("run_worker", f"unix_socket={path}")
        assert launcher.wait_for_line("^ready: ").startswith(f"ready: unix:{path} serves tiny-llama; ")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(path))
            assert client.makefile("rb").read() == b"tiny-llama"
        second = launch("run_worker", f"unix_socket={path}")
        assert second.exit_code() == 1
        assert second.lines == [f"toka: unix_socket={path}: another process listens there"]
        pids = list(launcher.children().values())
        launcher.process.kill()
        assert_all_end(pids, within_s=30)
        assert path.exists()
        third = launch("run_worker", f"unix_socket={path}")
        third.wait_for_line("^ready: ")
        third.process.send_signal(signal.SIGTERM)
        assert third.exit_code() == 0
        assert not path.exists()


def test_missing_model_is_one_line(launch, tmp_path: Path) -> None:
    launcher = launch("run_worker", f"model={tmp_path / 'absent.gguf'}")
    assert launcher.exit_code() == 2
    (line,) = (
        line for line in launcher.lines if line.startswith("toka: ")
    )  # other lines report the phases of the start
    assert "absent.gguf" in line
    assert line == launcher.lines[-1]


def test_times_outlive_a_start_and_damaged_ones_are_ignored(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    assert read_start_times() == {}
    write_start_times({"server: imports": 1.5})
    assert read_start_times() == {"server: imports": 1.5}
    (path,) = (tmp_path / "cache").iterdir()
    for damage in ("", "[1]", '{"server: imports": "soon"}', "{"):
        path.write_text(damage)
        assert read_start_times() == {}
    path.unlink()
    path.mkdir()
    write_start_times({"server: imports": 1.5})  # impossible, and no error
    assert read_start_times() == {}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone tells of memory nodes")
@few(1, ("flag", "is_bound"), [("dp_size=1", False), ("dp_size=2", True)])
def test_replicas_stay_at_memory_nodes_also_after_a_restart_but_a_single_one_is_free(
    flag: str, is_bound: bool, launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.sched_getaffinity(0)
    first, last = min(free), max(free)
    write_machine(tmp_path, Machine(nodes={0: (str(first), 8), 1: (str(last), 8)}))
    monkeypatch.setenv("MACHINE", str(tmp_path))
    launcher = launch("run_worker", flag, "device=cpu")
    launcher.wait_for_line("^ready: ")
    name = "toka-worker1-0" if is_bound else "toka-worker-0"
    before = launcher.children()[name]
    assert os.sched_getaffinity(before) == ({last} if is_bound else free)
    os.kill(before, signal.SIGKILL)
    launcher.wait_for_line("is ready again")
    assert os.sched_getaffinity(launcher.children()[name]) == ({last} if is_bound else free)
    assert os.sched_getaffinity(launcher.children()["toka-server"]) == free
    assert os.sched_getaffinity(launcher.process.pid) == free
