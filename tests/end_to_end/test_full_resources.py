"""What the processes are given is full: stderr, a pipe whose reader has stopped, or /dev/shm, which multiprocessing's
queues and locks would need."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.checkpoint.helpers.fake_hub import CONFIG
from tests.end_to_end.helpers.toka_process import TokaProcess, free_port, wait_for
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.limits import join
from tests.helpers.pipes import fill_pipe
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.helpers.tiny_model import save_tiny_model

pytestmark = pytest.mark.spawns

SMALL = ("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=256", "max_seqs_per_forward=16")
NUM_MALFORMED = 500 if IS_NIGHTLY else 100
MOUNT = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"


def send_malformed(port: int) -> bytes:
    """The status line of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"this is not HTTP\r\n\r\n")
        return connection.makefile("rb").readline()


def is_ready(toka: TokaProcess) -> bool:
    assert toka.process.poll() is None
    try:
        return httpx.get(f"{toka.url}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
def test_malformed_requests_do_not_stop_a_server_whose_stderr_nobody_reads(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    reader, writer = os.pipe()
    fill_pipe(writer)
    port = free_port()
    command = [sys.executable, "-m", "tokasaurus", f"port={port}", f"model={tmp_path}", "log_level=debug", *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer, text=True)
    toka = TokaProcess(process, port)
    waits_s: list[float] = []
    is_over = threading.Event()

    def watch_health() -> None:
        with httpx.Client(timeout=60) as http:
            while not is_over.is_set():
                began_s = time.monotonic()
                assert http.get(f"{toka.url}/health").status_code == 200
                waits_s.append(time.monotonic() - began_s)
                time.sleep(0.02)

    watcher = threading.Thread(target=watch_health)
    try:
        wait_for(lambda: is_ready(toka), 120)
        watcher.start()
        for _ in range(NUM_MALFORMED):
            assert send_malformed(port).startswith(b"HTTP/1.1 400 ")
        body = {"model": "default", "prompt": "A", "max_tokens": 5}
        assert httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120).status_code == 200
        assert toka.gauge("toka_log_records_dropped_total") == 0  # so few lines fit in the queue
        wait_for(lambda: len(waits_s) > 5, 60)
        is_over.set()
        join(watcher)
        late_s = [wait_s for wait_s in waits_s if wait_s >= 1]
        assert len(late_s) <= 2, "the machine may stop for a second; a full pipe would hold up each"
        assert toka.stop() == 0
    finally:
        is_over.set()
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "sh", "-c", MOUNT], capture_output=True).returncode != 0,
    reason="may not mount another /dev/shm",
)
def test_the_processes_start_without_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_small_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    start = f"{MOUNT} && exec {sys.executable} -m tokasaurus model={tmp_path} port=0 device=cpu cpu_isa=torch"
    done = subprocess.run(["unshare", "-m", "sh", "-c", start], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    # All processes have started, and the worker has read the empty file.
    assert "model.safetensors is not a readable safetensors file" in done.stderr.splitlines()[-1]
