"""The figures of `toka bench` beside those of `vllm bench serve`, on the same server with the same requests.

vLLM is no dependency: its `vllm` is looked for on PATH and in the directory TEST_VLLM_BIN."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands.bench.helpers.timed_server import seconds_before_token
from tests.end_to_end.helpers.toka_process import free_port
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.cli import bench_main

VLLM = shutil.which("vllm", path=os.pathsep.join((os.environ.get("TEST_VLLM_BIN", ""), os.environ["PATH"])))
NUM_REQUESTS, CONCURRENCY = 24, 6
LENGTHS = [4 + number % 9 for number in range(NUM_REQUESTS)]
PERCENTILES = ("p50", "p90", "p95", "p99")
LIMIT = 0.01


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.commands.bench.helpers.timed_server", str(port)])
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def ours(base_url: str, directory: Path) -> dict[str, float]:
    """Milliseconds and rates by vLLM's names."""
    load, output = directory / "load.jsonl", directory / "ours.json"
    lines = [{"prompt": f"{number} word", "max_tokens": length} for number, length in enumerate(LENGTHS)]
    load.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["file", f"input={load}", f"base_url={base_url}", f"concurrency={CONCURRENCY}", f"output={output}"]
    assert bench_main([*words, "ignore_eos=T"]) == 0
    [run] = json.loads(output.read_text())["runs"]
    summary = run["summary"]
    rates = {
        "request_throughput": summary["requests_per_s"],
        "output_throughput": summary["output_tokens_per_s"],
        "total_token_throughput": summary["total_tokens_per_s"],
        "duration": summary["wall_s"],
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread = summary[f"{name}_s"]
        rates |= {f"{percent}_{name}_ms": 1000 * spread["percentiles"][percent] for percent in PERCENTILES}
        rates |= {f"mean_{name}_ms": 1000 * spread["mean"], f"std_{name}_ms": 1000 * spread["std"]}
    return rates


@pytest.mark.long
def test_times_are_those_that_the_server_keeps_to(base_url: str, tmp_path: Path) -> None:
    found = ours(base_url, tmp_path)
    times = [
        [seconds_before_token(number, token) for token in range(LENGTHS[number])] for number in range(NUM_REQUESTS)
    ]
    by_hand = {
        "mean_ttft_ms": [waits[0] for waits in times],
        "mean_itl_ms": [wait for waits in times for wait in waits[1:]],
        "mean_tpot_ms": [sum(waits[1:]) / (len(waits) - 1) for waits in times],
        "mean_e2el_ms": [sum(waits) for waits in times],
    }
    for name, values in by_hand.items():
        mean_ms = 1000 * sum(values) / len(values)
        assert mean_ms <= found[name] < mean_ms + 50, name


@pytest.mark.long
@pytest.mark.skipif(VLLM is None, reason="there is no vllm on PATH or in TEST_VLLM_BIN")
def test_figures_equal_those_of_vllm_bench_serve(base_url: str, tmp_path: Path) -> None:
    model, load, result = tmp_path / "model", tmp_path / "vllm.jsonl", tmp_path / "vllm.json"
    save_tiny_model(model, "llama")  # its tokenizer
    lines = [{"prompt": f"{number} word", "output_tokens": length} for number, length in enumerate(LENGTHS)]
    load.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert VLLM is not None
    command = [VLLM, "bench", "serve", "--backend", "openai", "--base-url", base_url.removesuffix("/v1")]
    command += ["--model", "timed", "--tokenizer", str(model), "--dataset-name", "custom", "--dataset-path", str(load)]
    command += ["--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle", "--num-prompts", "24"]
    command += [
        "--max-concurrency",
        str(CONCURRENCY),
        "--ignore-eos",
        "--save-result",
        "--result-filename",
        str(result),
    ]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    theirs = json.loads(result.read_text())
    found = ours(base_url, tmp_path)
    print({name: (round(value, 2), round(theirs[name], 2)) for name, value in found.items()})
    assert theirs["completed"] == NUM_REQUESTS
    different = {name: (value, theirs[name]) for name, value in found.items() if abs(value / theirs[name] - 1) > LIMIT}
    assert not different
