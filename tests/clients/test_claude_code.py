"""Claude Code in a script, with a short system prompt: its own, and its tools, are longer than the demo's context."""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.clients.node import PACKAGES, VARIABLES, needs

pytestmark = needs("@anthropic-ai/claude-code")


def test_it_answers_and_goes_on(base_url: str, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{base_url}/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]  # "default" is a word of its own
    variables = {
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CONFIG_DIR": str(tmp_path),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # An answer is one sentence. It asks again after one that its limit cut, and fails after four of them.
        "CLAUDE_CODE_EXTRA_BODY": json.dumps({"stop_sequences": [".", "!", "?"]}),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "100",
    }

    def ask(question: str, *more: str) -> dict[str, Any]:
        program = PACKAGES / ".bin" / "claude"
        command = [program, "-p", question, "--model", model, "--system-prompt", "Be short.", "--tools", "", *more]
        done = subprocess.run(
            [*command, "--output-format", "json"],
            cwd=tmp_path,
            env={**VARIABLES, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        assert not result["is_error"], result
        return result

    first = ask("Say hello.")
    assert first["result"]
    assert first["usage"]["output_tokens"] > 0
    second = ask("Say goodbye.", "--continue")
    assert second["result"]
    prompts = [each["usage"]["input_tokens"] + each["usage"]["cache_read_input_tokens"] for each in (first, second)]
    assert prompts[1] > prompts[0]
