"""A start where /dev/shm has no room: multiprocessing's queues and locks would need it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.helpers.fake_hub import CONFIG
from tests.helpers.small_tokenizer import save_small_tokenizer

MOUNT = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"


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
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    # All processes have started, and the worker has read the empty file.
    assert "model.safetensors is not a readable safetensors file" in done.stderr.splitlines()[-1]
