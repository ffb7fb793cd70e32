"""OpenAI's Node client against a real server. Its checks are in openai_batches.cjs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / ".venv-clients" / "node" / "node_modules"
# that of the environment, or else of the machine
NODE = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

pytestmark = pytest.mark.skipif(
    NODE is None or not (PACKAGES / "openai").is_dir(), reason="needs `make test-clients CLIENTS=node`"
)


def test_whole_batches(base_url: str) -> None:
    assert NODE is not None
    command = [NODE, str(Path(__file__).with_name("openai_batches.cjs")), base_url]
    done = subprocess.run(
        command, env={**os.environ, "NODE_PATH": str(PACKAGES)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
