"""A start where /dev/shm, which keeps the semaphores of queues, has hardly any room."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.helpers.fake_hub import CONFIG

MOUNT = "mount -t tmpfs -o size=4k tmpfs /dev/shm"


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "sh", "-c", MOUNT], capture_output=True).returncode != 0,
    reason="may not mount another /dev/shm",
)
def test_a_full_shared_memory_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    start = f"{MOUNT} && exec {sys.executable} -m tokasaurus model={tmp_path} port=0 device=cpu cpu_isa=torch"
    done = subprocess.run(["unshare", "-m", "sh", "-c", start], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("toka: /dev/shm is full: cannot create a queue")
