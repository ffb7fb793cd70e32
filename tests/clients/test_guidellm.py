"""GuideLLM measures the server over chats, completions and responses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("guidellm")
NUM_REQUESTS = 4
OUTPUT_TOKENS = 8

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=guidellm`")


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_it_counts_every_request_and_token(route: str, base_url: str, model_directory: Path, tmp_path: Path) -> None:
    url, report = base_url.removesuffix("/v1"), tmp_path / "report.json"
    data = {"kind": "synthetic_text", "prompt_tokens": 20, "output_tokens": OUTPUT_TOKENS}
    command = [PROGRAM, "run", "--backend", f"kind=openai_http,target={url},model=default,request_format={route}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model_directory}", "--data", json.dumps(data)]
    command += ["--output", f"kind=json,path={report}", "--disable-console"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (measured,) = json.loads(report.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert measured["metrics"]["output_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert measured["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
