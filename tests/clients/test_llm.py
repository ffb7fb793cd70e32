"""`llm` on the command line, whose file of models has a name and the base URL."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import PlainPost

PROGRAM = Path(sys.executable).with_name("llm")
WHALES = "What do whales eat?"

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=llm`")


@pytest.fixture
def run(base_url: str, tmp_path: Path) -> Callable[..., str]:
    """Arguments -> what the program prints."""
    lines = ["- model_id: toka", "  model_name: default", f"  api_base: {base_url}", "  supports_tools: true"]
    lines += ["  supports_schema: true"]
    lines += ["- model_id: toka-text", "  model_name: default", f"  api_base: {base_url}", "  completion: true"]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
    variables = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*arguments: str) -> str:
        command = [PROGRAM, *arguments, "-o", "temperature", "0"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.removesuffix("\n")

    return run


@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_answers_equal_plain_http(more: tuple[str, ...], run: Callable[..., str], plain_post: PlainPost) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    chat = plain_post("chat/completions", {"messages": [{"role": "user", "content": WHALES}], **greedy})
    assert run(WHALES, "-m", "toka", "-o", "max_tokens", "12", *more) == chat["choices"][0]["message"]["content"]
    completion = plain_post("completions", {"prompt": WHALES, **greedy})
    answer = run(WHALES, "-m", "toka-text", "-o", "max_tokens", "12", *more)
    assert answer.strip() == completion["choices"][0]["text"].strip()


def test_a_conversation_goes_on(run: Callable[..., str], plain_post: PlainPost) -> None:
    first = run(WHALES, "-m", "toka", "-o", "max_tokens", "12")
    second = run("And seals?", "-c", "-o", "max_tokens", "12")
    messages = [
        {"role": "user", "content": WHALES},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And seals?"},
    ]
    expected = plain_post("chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0})
    assert second == expected["choices"][0]["message"]["content"]


def test_an_answer_follows_its_schema(run: Callable[..., str]) -> None:
    properties = {"legs": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["legs"], "additionalProperties": False}
    options = ("--schema", json.dumps(schema), "-o", "max_tokens", "60")
    answer = json.loads(run("Describe a spider.", "-m", "toka", *options))
    assert isinstance(answer["legs"], int)
    assert len(answer) == 1


def test_tools_can_be_offered(run: Callable[..., str]) -> None:
    assert run(WHALES, "-m", "toka", "-T", "llm_time", "-T", "llm_version", "-o", "max_tokens", "40")
