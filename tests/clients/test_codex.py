"""OpenAI's Codex in a script, over /v1/responses, without the tools that are not functions of the client."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.node import PACKAGES, VARIABLES, needs

pytestmark = needs("@openai/codex")

CONFIG = """\
model = "default"
model_provider = "toka"
web_search = "disabled"
[model_providers.toka]
name = "toka"
base_url = "{base_url}"
wire_api = "responses"
[agents]
enabled = false
"""
NO_TOOLS = """\
[features]
goals = false
shell_tool = false
view_image = false
[tools.experimental_request_user_input]
enabled = false
"""
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["legs"],
    "additionalProperties": False,
}
QUESTION = "How many legs has a spider?"


@pytest.fixture
def command(tmp_path: Path) -> list[str | Path]:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    return [PACKAGES / ".bin" / "codex", "exec", "--skip-git-repo-check", "--output-schema", schema, QUESTION]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {**VARIABLES, "CODEX_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}


def test_its_answer_follows_a_schema(
    command: list[str | Path], variables: dict[str, str], base_url: str, tmp_path: Path
) -> None:
    """The schema ends the answer too: a small model may talk until its context is full, which Codex calls an error, and
    Codex sends no limit."""
    (tmp_path / "config.toml").write_text(CONFIG.format(base_url=base_url) + NO_TOOLS)
    answer = tmp_path / "answer.json"
    command += ["-o", answer]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    answered = json.loads(answer.read_text())
    assert answered.keys() == {"legs"}
    assert answered["legs"] in range(9)


def test_its_tools_are_accepted(
    command: list[str | Path],
    variables: dict[str, str],
    base_url: str,
    generated_tokens: Callable[[], float],
    tmp_path: Path,
) -> None:
    """It is ended once the server answers: a small model may call tools for ever."""
    (tmp_path / "config.toml").write_text(CONFIG.format(base_url=base_url))
    before, latest = generated_tokens(), time.monotonic() + 120
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    while generated_tokens() == before and process.poll() is None and time.monotonic() < latest:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)  # the command is a script, which leaves its program behind
    said, _ = process.communicate()
    assert generated_tokens() > before, said.decode()
