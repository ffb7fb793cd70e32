"""Starts under limits that do not suffice: the last line says what is missing, and there is no traceback."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.batch.helpers.request_lines import write_requests
from tests.end_to_end.helpers.toka_process import free_port, starting_toka, wait_for

pytestmark = pytest.mark.spawns

SMALL = ("kv_cache_num_tokens=4000", "max_tokens_per_forward=64", "max_seqs_per_forward=8")
FEW = [(resource.RLIMIT_NOFILE, 24), (resource.RLIMIT_AS, 300 << 20)]
MORE = [(resource.RLIMIT_NOFILE, number) for number in (*range(5, 40, 2), 6, 28)] + [
    (resource.RLIMIT_AS, megabytes << 20) for megabytes in (*range(60, 2000, 110), 100)
]
WORDS = ("not enough memory", "too many open files", "no more threads", "lack of memory", "Memory allocation")


def run_limited(limit: tuple[int, int], *words: str) -> "subprocess.CompletedProcess[str]":
    """`toka` with this limit of its resources; it is stopped if it serves all the same."""
    kind, most = limit
    return subprocess.run(
        ["timeout", "-s", "INT", "20", sys.executable, "-m", "tokasaurus", *words],
        preexec_fn=lambda: resource.setrlimit(kind, (most, most)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check_one_line(done: "subprocess.CompletedProcess[str]") -> None:
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    if done.returncode != 124:  # it has served
        assert done.returncode == 1, output
        assert any(word in output.splitlines()[-1] for word in WORDS), output


@pytest.mark.parametrize("limit", FEW)
def test_a_start_without_enough_files_or_memory(limit: tuple[int, int]) -> None:
    check_one_line(run_limited(limit, f"port={free_port()}", *SMALL))


@pytest.mark.long
def test_a_kv_cache_beyond_the_limit_of_memory_names_its_flag() -> None:
    words = [*SMALL[1:], "kv_cache_num_tokens=200000"]
    done = run_limited((resource.RLIMIT_AS, 2500 << 20), f"port={free_port()}", *words)
    check_one_line(done)
    assert "kv_cache_num_tokens=" in (done.stdout + done.stderr).splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("limit", MORE)
def test_a_start_under_many_limits(limit: tuple[int, int]) -> None:
    check_one_line(run_limited(limit, f"port={free_port()}", *SMALL))


@pytest.mark.parametrize(
    "limit", [(resource.RLIMIT_NOFILE, 16), pytest.param((resource.RLIMIT_AS, 600 << 20), marks=pytest.mark.long)]
)
def test_a_batch_without_enough_files_or_memory(limit: tuple[int, int], tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 2)
    check_one_line(run_limited(limit, "batch", f"input={source}", f"output={tmp_path / 'out.jsonl'}", *SMALL))


# So little memory that the first start, which compiles modules, may fail elsewhere than a later one.
@pytest.mark.parametrize(
    "limit", [(resource.RLIMIT_NOFILE, 5), pytest.param((resource.RLIMIT_AS, 60 << 20), marks=pytest.mark.long)]
)
def test_a_ping_without_enough_files_or_memory(limit: tuple[int, int]) -> None:
    done = run_limited(limit, "ping", "prompt=x", "port=1")
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_a_worker_that_is_killed_at_its_start_suggests_memory() -> None:
    with starting_toka(free_port(), *SMALL) as toka:
        wait_for(lambda: "toka-worker-0" in toka.children(), timeout_s=60)
        os.kill(toka.children()["toka-worker-0"], signal.SIGKILL)
        assert toka.process.wait(timeout=60) == 1
        deadline = time.monotonic() + 10
        while not toka.has_spoken.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert toka.lines[-1].startswith("toka: model worker (rank 0) died: killed by signal 9 (SIGKILL); unless somebody")
    assert "kv_cache_num_tokens=" in toka.lines[-1]
