"""NVIDIA's AIPerf measures the server over each of its endpoints for text."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("aiperf")
NUM_REQUESTS = 4
OUTPUT_TOKENS = 8

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="needs `make test-clients CLIENTS=aiperf`")


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("chat", ("--streaming", "--per-chunk-usage")),
        ("completions", ()),
        ("responses", ()),
        ("responses", ("--streaming",)),
        ("messages", ("--streaming",)),
    ],
)
def test_it_counts_every_request_and_token(
    endpoint: str,
    options: tuple[str, ...],
    base_url: str,
    generated_tokens: Callable[[], float],
    model_directory: Path,
    tmp_path: Path,
) -> None:
    """As the server counts them: by itself, it turns the text into tokens again, which can be fewer of them. Of streams
    of responses it reads only counts in `response.completed`, while one that its limit cuts ends `incomplete`."""
    url = base_url.removesuffix("/v1")
    command = [PROGRAM, "profile", "--model", "default", "--url", url, "--endpoint-type", endpoint]
    command += [*options, "--use-server-token-count", "--tokenizer", model_directory]
    command += ["--ui", "none", "--output-artifact-dir", tmp_path, "--extra-inputs", "ignore_eos:true"]
    load = {"request-count": NUM_REQUESTS, "concurrency": 2, "output-tokens-mean": OUTPUT_TOKENS}
    for name, value in {**load, "synthetic-input-tokens-mean": 20}.items():
        command += [f"--{name}", str(value)]
    # offline, it looks for tokenizers in the cache alone
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    before = generated_tokens()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    measured = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    assert measured["error_summary"] == []
    if (endpoint, *options) != ("responses", "--streaming"):
        assert measured["total_output_tokens"]["avg"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert generated_tokens() - before == NUM_REQUESTS * OUTPUT_TOKENS
    if "--streaming" in options:
        assert measured["time_to_first_token"]["avg"] > 0
