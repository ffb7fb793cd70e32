"""aider in a script, with its questions about code: what a small model would edit is chance."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("aider")
FACTS = {"max_input_tokens": 4096, "max_output_tokens": 512, "litellm_provider": "openai", "mode": "chat"}

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=aider`")


def test_a_streamed_answer_equals_the_whole_one_and_is_kept(base_url: str, tmp_path: Path) -> None:
    """At the temperature 0, which it sends."""
    (tmp_path / "whales.py").write_text("FOOD = 'krill'\n")
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"openai/default": FACTS}))  # else it downloads a list of models
    settings = tmp_path / "settings.yml"
    settings.write_text("- name: openai/default\n  extra_params:\n    max_tokens: 24\n")
    variables = {**os.environ, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def ask(stream: str) -> str:
        history = tmp_path / f"{stream}.md"
        command = [PROGRAM, "--model", "openai/default", "--openai-api-base", base_url, "--openai-api-key", "none"]
        command += ["--model-metadata-file", facts, "--model-settings-file", settings, "--edit-format", "ask"]
        command += ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable", f"--{stream}"]
        command += ["--chat-history-file", history, "--message", "What do whales eat?", "whales.py"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        asked, _, answered = history.read_text().rpartition("What do whales eat?")
        assert "Error" not in answered
        counts = re.search(r"Tokens: (\d+) sent, (\d+) received", answered)
        assert asked
        assert counts, answered
        assert int(counts[1]) > 50
        assert 0 < int(counts[2]) <= 30  # in streams, it counts by itself
        return answered[: counts.start()]

    whole = ask("no-stream")
    assert len(whole.split()) > 3
    assert ask("stream") == whole
