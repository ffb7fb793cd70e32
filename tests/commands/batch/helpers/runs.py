"""Runs in processes of their own, and how far they are."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from tests.server.helpers.live_server import LiveServer

RUN = "import sys; from tokasaurus.cli import batch_main; sys.exit(batch_main())"


def start(words: list[str]) -> subprocess.Popen[str]:
    """`toka batch` in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", RUN, *words], stderr=subprocess.PIPE, text=True)


def wait_for_batch(state: Path) -> None:
    """Wait until a run has stored which batch is its own. state: the file OUTPUT.toka.json."""
    wait_until(lambda: state.exists() and bool(orjson.loads(state.read_bytes() or b"{}").get("batch_id")))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_lines(server: LiveServer, num_lines: int, status: str | None = None) -> None:
    """Wait until the server's only batch has so many completed lines, and the status."""
    wait_until(lambda: _has_lines(server, num_lines, status))


def _has_lines(server: LiveServer, num_lines: int, status: str | None) -> bool:
    batches = server.http.get("/v1/batches").json()["data"]
    return any(
        batch["request_counts"]["completed"] >= num_lines and status in (None, batch["status"]) for batch in batches
    )
