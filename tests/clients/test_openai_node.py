"""OpenAI's Node client, the AI SDK and others for Node against a real server. Their checks are in the scripts."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.node import NODE, VARIABLES, needs

SCRIPTS = {
    "openai_batches.cjs": ("openai",),
    "openai_and_ai_sdk.cjs": ("openai", "ai"),
    "agents_and_langchain.mjs": ("@openai/agents", "@langchain/openai"),
}


@pytest.mark.parametrize("script", [pytest.param(name, marks=needs(*packages)) for name, packages in SCRIPTS.items()])
def test_node_clients(base_url: str, script: str) -> None:
    assert NODE is not None
    command = [NODE, str(Path(__file__).with_name(script)), base_url]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
