"""OpenAI's Node client and the AI SDK against a real server. Their checks are in the .cjs files."""

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
    NODE is None or not all((PACKAGES / name).is_dir() for name in ("openai", "ai")),
    reason="needs `make test-clients CLIENTS=node`",
)


@pytest.mark.parametrize("script", ["openai_batches.cjs", "openai_and_ai_sdk.cjs"])
def test_node_clients(base_url: str, script: str) -> None:
    assert NODE is not None
    command = [NODE, str(Path(__file__).with_name(script)), base_url]
    done = subprocess.run(
        command, env={**os.environ, "NODE_PATH": str(PACKAGES)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
