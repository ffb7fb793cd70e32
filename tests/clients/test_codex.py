"""OpenAI's Codex in a script, over /v1/responses, without the tools that are not functions of the client."""

import subprocess
from pathlib import Path

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
[features]
multi_agent = false
"""


def test_it_answers(base_url: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(base_url=base_url))
    answer = tmp_path / "answer.txt"
    done = subprocess.run(
        [PACKAGES / ".bin" / "codex", "exec", "--skip-git-repo-check", "-o", answer, "Say hello."],
        cwd=tmp_path,
        env={**VARIABLES, "CODEX_HOME": str(tmp_path), "OPENAI_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    assert answer.read_text()
