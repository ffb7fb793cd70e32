"""OpenAI's Node client and the AI SDK against a real server. Their checks are in the .cjs files."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.node import NODE, VARIABLES, needs

pytestmark = needs("openai", "ai")


@pytest.mark.parametrize("script", ["openai_batches.cjs", "openai_and_ai_sdk.cjs"])
def test_node_clients(base_url: str, script: str) -> None:
    assert NODE is not None
    command = [NODE, str(Path(__file__).with_name(script)), base_url]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
