"""`toka` with a tiny model on a terminal of 80 columns, from its start over load to its end."""

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.terminal import on_terminal
from tests.helpers.tiny_model import save_tiny_model

SMALL = ("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=256", "max_seqs_per_forward=16")
NUM_REQUESTS, NUM_SAMPLES = 6, 3
CTRL_C = b"\x03"


@pytest.mark.long
def test_start_load_and_end_wrap_nothing_and_the_summary_counts_what_clients_saw(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    flags = [f"model={tmp_path}", "served_model_name=tiny", "port=0", "stats_report_seconds=0.2", "drain_seconds=1"]
    with on_terminal([sys.executable, "-m", "tokasaurus", *flags, *SMALL]) as shown:
        shown.wait_for("stop:  Ctrl-C", timeout_s=240)
        shown.check_screen()
        (url,) = (found[1] for line in shown.lines() if (found := re.match(r"ready: (\S+) serves tiny;", line)))
        assert f"page:  {url}/" in shown.lines()
        port = url.rpartition(":")[2]
        assert f"try:   toka ping port={port} prompt='tell me a joke'" in shown.lines()
        assert not any("(rank 0): " in line for line in shown.lines()), "nothing is redrawn any more"

        def ask(number: int) -> tuple[int, int]:
            body = {"model": "tiny", "prompt": f"Request {number}", "n": NUM_SAMPLES, "max_tokens": 50}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            usage = answer.raise_for_status().json()["usage"]
            return usage["prompt_tokens"], usage["completion_tokens"]

        with ThreadPoolExecutor() as pool:
            usages = list(pool.map(ask, range(NUM_REQUESTS)))
        refused = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "A", "n": 0}, timeout=60)
        assert refused.status_code == 400, "which is no request in the summary"

        endless = {"model": "tiny", "prompt": "A", "max_tokens": 400, "n": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=120) as stream:
            assert stream.status_code == 200
            next(stream.iter_lines())
        shown.wait_for(" done, ETA")
        is_cut = threading.Event()

        def ask_for_too_much() -> int:
            is_cut.set()
            return httpx.post(f"{url}/v1/completions", json={**endless, "stream": False}, timeout=120).status_code

        with ThreadPoolExecutor() as pool:
            cut = pool.submit(ask_for_too_much)
            is_cut.wait(60)
            while "toka_requests_running 0" in httpx.get(f"{url}/metrics", timeout=60).text:
                pass
            shown.wait_for(" run, ")
            shown.press(CTRL_C)
            assert cut.result() == 503
        assert shown.exit_code() == 0
        shown.check_screen()
        lines = shown.lines()
        assert lines[-1] == "stopped"
        assert "stopping: open requests may take 1 s to finish; Ctrl-C again kills" in "\n".join(lines)
        assert f"requests: {NUM_REQUESTS} answered, 2 aborted, 0 failed" in lines, lines
        tokens = re.match(r"tokens:   ([\d,]+) in prompts, ([\d,]+) generated in ", lines[-2])
        assert tokens is not None
        num_prompt, num_generated = (int(number.replace(",", "")) for number in tokens.groups())
        of_a = num_prompt - sum(prompt for prompt, _ in usages)
        assert of_a % 2 == 0, "the prompt of the other two requests"
        assert 0 < of_a < 20
        assert num_generated > sum(generated for _, generated in usages), "and some tokens of the two that were cut"
