"""The launcher with stub entries on a terminal of 80 columns: what is seen of a start, and Ctrl-C in its phases."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.terminal import Terminal, on_terminal

HELPERS = Path(__file__).parent / "helpers"
ROOT = Path(__file__).parents[2]
CTRL_C = b"\x03"
SAME_SIGNAL_S = 0.4
"""After this time, a second Ctrl-C counts."""


def command(worker: str, *flags: str) -> list[str]:
    return [sys.executable, str(HELPERS / "stub_launcher.py"), worker, "port=0", "cpu_isa=torch", *flags]


def environment(**variables: str) -> dict[str, str]:
    return {"GRACE_S": "600", "PYTHONPATH": f"{HELPERS}:{ROOT}", **variables}


@contextmanager
def launcher(model: Path, worker: str = "run_worker", *flags: str, **variables: str) -> Iterator[Terminal]:
    with on_terminal(command(worker, f"model={model}", *flags), environment=environment(**variables)) as shown:
        yield shown


def check_end(shown: Terminal, last: str = "stopped") -> None:
    assert shown.exit_code() == 0, shown.lines()
    shown.check_screen()
    assert shown.lines()[-1] == last
    assert not any("Traceback" in line for line in shown.lines())


def test_each_process_is_seen_while_it_starts_and_the_ready_lines_fit(model: Path) -> None:
    with launcher(model) as shown:
        shown.wait_for("server: imports")
        shown.check_screen()
        shown.wait_for("stop:  Ctrl-C")
        lines = shown.lines()
        ready = next(number for number, line in enumerate(lines) if line.startswith("ready: http://127.0.0.1:"))
        assert lines[ready + 1].startswith("page:  http://127.0.0.1:")
        assert lines[ready + 2].startswith("try:   toka ping port=")
        assert len(lines) == ready + 4, "what was redrawn has gone"
        shown.press(CTRL_C)
        check_end(shown)


def test_the_progress_of_a_phase_is_seen_with_its_time_and_share_and_nothing_is_silent(model: Path) -> None:
    with launcher(model, "run_worker_that_loads_for_ever") as shown:
        shown.wait_for("model worker (rank 0): weights")
        shown.wait_for("25%  30 of 120 MB")
        began_s = time.monotonic()
        shown.wait_for("0:03 model worker (rank 0): weights")
        assert time.monotonic() - began_s > 1.0
        assert max(shown.silences_s) < 2.0 + 3.0, "2 s, on a machine that does other things too"
        shown.check_screen()
        assert sum("many words" in line for line in shown.lines()) > 3, "it was wrapped by the launcher"
        shown.press(CTRL_C)
        shown.wait_for("stopping the start; Ctrl-C again kills")
        check_end(shown)


def test_ctrl_c_while_the_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = environment(HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
        with on_terminal(command("run_worker", "model=some/model"), environment=variables) as shown:
            shown.wait_for(": looking up some/model")
            shown.press(CTRL_C)
            check_end(shown, last="stopped before the start was complete")


def test_ctrl_c_while_the_processes_import(model: Path) -> None:
    with launcher(model) as shown:
        shown.wait_for(": imports")
        shown.press(CTRL_C)
        check_end(shown)


@pytest.mark.long
def test_a_second_ctrl_c_is_said_to_kill_and_kills(model: Path) -> None:
    with launcher(model, "run_worker_that_will_not_end") as shown:
        shown.wait_for("stop:  Ctrl-C")
        shown.press(CTRL_C)
        shown.wait_for("stopping: open requests may take 30 s to finish; Ctrl-C again kills")
        time.sleep(SAME_SIGNAL_S)
        shown.press(CTRL_C)
        shown.wait_for("killing: open requests get no answer")
        check_end(shown)


def test_a_failure_of_the_start_is_the_last_line(model: Path) -> None:
    with launcher(model, "run_worker_that_raises") as shown:
        assert shown.exit_code() == 1
        shown.check_screen()
        assert shown.lines()[-1] == "toka: model worker (rank 0) failed: RuntimeError: tensor broke"


def test_a_log_of_json_has_an_object_in_each_line(model: Path) -> None:
    words = command("run_worker_that_loads_for_ever", f"model={model}", "log_format=json")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, **environment()}, text=True)
    lines: list[dict[str, object]] = []
    too_late = threading.Timer(120, process.kill)
    too_late.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1].get("event") == "progress" and lines[-1]["phase"] == "weights":
                process.send_signal(2)
        assert process.wait(60) == 0
    finally:
        too_late.cancel()
        process.kill()
    assert all(line.keys() >= {"time", "level", "process", "logger", "message"} for line in lines)
    events = [line.get("event") for line in lines]
    assert events[-2:] == ["stopping", "stopped"]
    progress = next(line for line in lines if line.get("event") == "progress" and line["phase"] == "weights")
    assert progress["share"] == 0.25
    phases = [(line["of"], line["phase"]) for line in lines if line.get("event") == "phase"]
    assert ("model worker (rank 0)", "device") in phases
    assert ("toka", "find model") in phases


def test_pgrep_finds_all_processes_and_ps_shows_no_key(model: Path) -> None:
    words = command("run_worker", f"model={model}", "api_key=secret-of-the-command-line")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, **environment()}, text=True)
    try:
        assert process.stderr is not None
        assert any(line.startswith("ready:") for line in process.stderr)
        all_processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        names = {one.name() for one in all_processes}
        assert names >= {"toka", "toka-server", "toka-manager", "toka-worker-0"}
        found = subprocess.run(["pgrep", "toka"], capture_output=True, text=True, check=True).stdout.split()
        assert {str(one.pid) for one in all_processes if one.name().startswith("toka")} <= set(found)
        assert not any("secret" in " ".join(one.cmdline()) for one in all_processes)
        assert f"model={model}" in " ".join(all_processes[0].cmdline())
    finally:
        process.terminate()
        process.communicate(timeout=60)
