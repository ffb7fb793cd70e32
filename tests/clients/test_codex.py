"""OpenAI's Codex in a script, over /v1/responses, without the tools that are not functions of the client."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

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
FULL = "Incomplete response returned, reason: max_output_tokens"
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
    command: list[str | Path], variables: dict[str, str], base_url: str, tmp_path: Path
) -> None:
    """Seen at its first call or message, after which it is ended: a small model may go on until its context is full."""
    (tmp_path / "config.toml").write_text(CONFIG.format(base_url=base_url))
    with subprocess.Popen(
        [*command, "--json"],
        cwd=tmp_path,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            events = (json.loads(line) for line in process.stdout if line.startswith("{"))
            first = next(event for event in itertools.dropwhile(is_before_the_answer, events))
        finally:
            process.kill()
    assert first.get("message", FULL) == FULL, first


def is_before_the_answer(event: dict[str, Any]) -> bool:
    """Whether Codex says it of itself: of the turn's start, or that it does not know the model."""
    return event["type"] in {"thread.started", "turn.started"} or event.get("item", {}).get("type") == "error"
