"""EvalScope: an evaluation of questions in a file, and its load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import WHALES, PlainPost

PROGRAM = Path(sys.executable).with_name("evalscope")
GREEDY = {"max_tokens": 12, "temperature": 0}
NUM_REQUESTS = 4
OUTPUT_TOKENS = 8

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=evalscope`")


def run(*command: str | Path) -> None:
    done = subprocess.run([PROGRAM, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_an_evaluation_has_the_answers_of_plain_http(base_url: str, plain_post: PlainPost, tmp_path: Path) -> None:
    questions = [WHALES, "Name a whale."]
    lines = [json.dumps({"query": question, "response": "krill"}) for question in questions]
    (tmp_path / "sea.jsonl").write_text("\n".join(lines))
    data = {"general_qa": {"local_path": str(tmp_path), "subset_list": ["sea"]}}
    command = ["eval", "--model", "default", "--api-url", base_url, "--api-key", "none", "--eval-type", "openai_api"]
    command += ["--datasets", "general_qa", "--dataset-args", json.dumps(data)]
    run(*command, "--generation-config", json.dumps(GREEDY), "--work-dir", tmp_path / "eval", "--no-timestamp")
    predictions = (tmp_path / "eval" / "predictions" / "default" / "general_qa_sea.jsonl").read_text().splitlines()
    outputs = [json.loads(line)["model_output"]["choices"][0]["message"]["content"] for line in predictions]
    messages = [[{"role": "user", "content": question}] for question in questions]
    answers = [plain_post("chat/completions", {"messages": each, **GREEDY})["choices"][0] for each in messages]
    assert sorted(outputs) == sorted(answer["message"]["content"] for answer in answers)


@pytest.mark.parametrize(
    ("api", "route", "options"),
    [
        ("openai", "chat/completions", ("--stream",)),
        ("openai", "completions", ("--no-stream",)),
        ("responses", "responses", ("--no-stream",)),
    ],
)
def test_its_load_counts_every_request_and_token(
    api: str, route: str, options: tuple[str, ...], base_url: str, model_directory: Path, tmp_path: Path
) -> None:
    load = {"number": NUM_REQUESTS, "parallel": 2, "min-prompt-length": 60, "max-prompt-length": 80}
    load |= {"max-tokens": OUTPUT_TOKENS}
    command = ["perf", "--model", "default", "--api", api, "--url", f"{base_url}/{route}", *options]
    command += ["--dataset", "random", "--tokenizer-path", str(model_directory)]
    for name, value in load.items():
        command += [f"--{name}", str(value)]
    run(*command, "--extra-args", '{"ignore_eos": true}', "--outputs-dir", tmp_path, "--no-timestamp")
    (path,) = tmp_path.glob("**/benchmark_summary.json")
    summary = json.loads(path.read_text())
    assert (summary["Success Requests"], summary["Failed Requests"]) == (NUM_REQUESTS, 0)
    assert summary["Avg Output Tokens"] == OUTPUT_TOKENS
