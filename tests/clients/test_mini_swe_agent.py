"""mini-swe-agent: its loop over chats and over responses. Commands are noted, not run."""

import json
from pathlib import Path
from typing import Any

import pytest

NUM_STEPS = 3
OUTPUT = "12 whales"


class NoShell:
    """An environment in which every command prints the same."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def execute(self, action: dict[str, Any]) -> dict[str, Any]:
        self.commands.append(action["command"])
        return {"output": OUTPUT, "returncode": 0, "exception_info": ""}

    def get_template_vars(self) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("kind", ["litellm_model.LitellmModel", "litellm_response_model.LitellmResponseModel"])
def test_it_calls_its_tool_and_sends_results_until_its_steps_are_used_up(
    kind: str, base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path), "MSWEA_SILENT_STARTUP": "1"}
    for name, value in {**variables, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: `make test-clients` has it")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models import get_model_class

    fields = {"api_base": base_url, "api_key": "none", "temperature": 0, "tool_choice": "required"}
    limit = "max_output_tokens" if "response" in kind else "max_tokens"
    model_class = get_model_class("", f"minisweagent.models.{kind}")
    model = model_class(
        model_name="openai/default",
        model_kwargs={**fields, limit: 200, "drop_params": True},
        cost_tracking="ignore_errors",
    )
    shell = NoShell()
    agent = DefaultAgent(
        model,
        shell,
        system_template="You work with a shell.",
        instance_template="Run this command: {{task}}",
        step_limit=NUM_STEPS,
        max_consecutive_format_errors=0,
        output_path=tmp_path / "run.json",
    )
    assert agent.run("ls")["exit_status"] == "LimitsExceeded"
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["info"]["model_stats"]["api_calls"] == NUM_STEPS
    assert shell.commands
    assert sum(OUTPUT in json.dumps(message) for message in run["messages"]) == len(shell.commands)
