"""NVIDIA's AIPerf measures the server over each of its endpoints for text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("aiperf")
NUM_REQUESTS = 4
OUTPUT_TOKENS = 8

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=aiperf`")


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("chat", ("--streaming", "--use-server-token-count", "--per-chunk-usage")),
        ("completions", ()),
        ("responses", ("--streaming",)),
        ("messages", ("--streaming",)),
    ],
)
def test_it_counts_every_request_and_token(
    endpoint: str, options: tuple[str, ...], base_url: str, model_directory: Path, tmp_path: Path
) -> None:
    command = [
        PROGRAM,
        "profile",
        "--model",
        "default",
        "--url",
        base_url.removesuffix("/v1"),
        "--endpoint-type",
        endpoint,
    ]
    command += [*options, "--tokenizer", model_directory, "--ui", "none", "--output-artifact-dir", tmp_path]
    load = {"request-count": NUM_REQUESTS, "concurrency": 2, "output-tokens-mean": OUTPUT_TOKENS}
    for name, value in {**load, "synthetic-input-tokens-mean": 20}.items():
        command += [f"--{name}", str(value)]
    # offline, it looks for tokenizers in the cache alone
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    measured = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    assert measured["error_summary"] == []
    assert measured["total_output_tokens"]["avg"] == NUM_REQUESTS * OUTPUT_TOKENS
    if "--streaming" in options:
        assert measured["time_to_first_token"]["avg"] > 0
