"""promptfoo evaluates prompts by its providers for chats, responses and completions."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.conftest import PlainPost
from tests.clients.node import PACKAGES, VARIABLES, needs

pytestmark = needs("promptfoo")

ANIMALS = ("whales", "seals")
GREEDY = {"max_tokens": 24, "temperature": 0}
TOOL = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": list(ANIMALS)}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
FORCED = {"tool_choice": "required", "temperature": 0}
CONFIG: dict[str, Any] = {
    "prompts": ["What do {{animal}} eat?"],
    "providers": [
        {"id": "openai:chat:default", "label": "chat", "config": GREEDY},
        {"id": "openai:responses:default", "label": "responses", "config": {"max_output_tokens": 24, "temperature": 0}},
        {"id": "openai:completion:default", "label": "completion", "config": GREEDY},
        {
            "id": "openai:chat:default",
            "label": "chat tool",
            "config": {**FORCED, "max_tokens": 60, "tools": [{"type": "function", "function": TOOL}]},
        },
        {
            "id": "openai:responses:default",
            "label": "responses tool",
            "config": {**FORCED, "max_output_tokens": 60, "tools": [{"type": "function", **TOOL}]},
        },
    ],
    "tests": [{"vars": {"animal": animal}} for animal in ANIMALS],
}


def evaluate(base_url: str, directory: Path) -> list[dict[str, Any]]:
    """The results of CONFIG, by nothing but a base URL and a key."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "PROMPTFOO_CONFIG_DIR": str(directory),
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
        "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    }
    program = PACKAGES / ".bin" / "promptfoo"
    options = ["--no-cache", "--no-progress-bar", "--no-table"]
    done = subprocess.run(
        [program, "eval", "-c", "config.json", "-o", "results.json", *options],
        cwd=directory,
        env={**VARIABLES, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads((directory / "results.json").read_text())["results"]["results"]
    return results


def test_evaluations_have_the_servers_answers(base_url: str, tmp_path: Path, plain_post: PlainPost) -> None:
    found: dict[tuple[str, str], Any] = {}
    for result in evaluate(base_url, tmp_path):
        assert result["success"], result.get("error")
        found[result["provider"]["label"], result["vars"]["animal"]] = result["response"]
    assert len(found) == len(CONFIG["providers"]) * len(ANIMALS)
    for animal in ANIMALS:
        question = f"What do {animal} eat?"
        chat = plain_post("chat/completions", {"messages": [{"role": "user", "content": question}], **GREEDY})
        completion = plain_post("completions", {"prompt": question, **GREEDY})
        assert found["chat", animal]["output"] == chat["choices"][0]["message"]["content"]
        assert found["responses", animal]["output"] == chat["choices"][0]["message"]["content"]
        assert found["completion", animal]["output"] == completion["choices"][0]["text"]
        assert found["chat", animal]["tokenUsage"]["completion"] == chat["usage"]["completion_tokens"]
        calls = [call["function"] for call in found["chat tool", animal]["output"]]
        # one JSON text a line
        calls += [json.loads(line) for line in found["responses tool", animal]["output"].splitlines()]
        assert len(calls) > 1
        assert all(json.loads(call["arguments"])["word"] in ANIMALS for call in calls)
