"""kill -9 of a model worker under load: requests are answered all the same, begun streams are told, and the device has
its memory back. Not yet run on a GPU."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.random_models import ModelShape, write_model
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for

SMALL = ModelShape("small shape", 512, 256, 512, 2, 8, 2, 64, is_tied=True)
"""With a head size that FlashInfer has kernels for."""
NUM_REQUESTS = 12
KEPT_BYTES = 256 << 20
"""By which the device's free memory may differ before and after."""


def check_killed_worker(
    directory: Path, *flags: str, num_tokens: int, restart_limit_s: float, free_bytes: Callable[[], int] = lambda: 0
) -> None:
    """num_tokens: of each request; enough that all run when the worker is killed. free_bytes: of the device."""
    write_model(directory, SMALL)
    with running_toka(f"model={directory}", *flags) as toka:
        assert ask(toka, 0, 8) == 8
        free_before, before = free_bytes(), toka.children()
        with ThreadPoolExecutor(NUM_REQUESTS + 1) as pool:
            begun = threading.Event()
            stream = pool.submit(read_stream, toka, num_tokens, begun)
            assert begun.wait(60)
            answers = [pool.submit(ask, toka, number, num_tokens) for number in range(NUM_REQUESTS)]
            wait_for(lambda: toka.gauge("toka_requests_running") > NUM_REQUESTS, 60)
            os.kill(before["toka-worker-0"], signal.SIGKILL)
            killed_s = time.monotonic()
            assert [answer.result() for answer in answers] == [num_tokens] * NUM_REQUESTS
            events = stream.result()
        assert events[-1]["error"]["code"] == "engine_died"
        assert not any("error" in event for event in events[:-1])
        wait_for(lambda: httpx.get(f"{toka.url}/ready", timeout=30).status_code == 200, restart_limit_s)
        assert time.monotonic() - killed_s < restart_limit_s
        after = toka.children()
        assert after["toka-server"] == before["toka-server"]
        assert after["toka-worker-0"] != before["toka-worker-0"]
        assert toka.gauge("toka_engine_restarts_total") == 1
        wait_for(lambda: toka.gauge("toka_kv_blocks_used") == 0, 60)
        assert ask(toka, 0, 8) == 8
        assert abs(free_bytes() - free_before) < KEPT_BYTES
        assert toka.stop() == 0


def ask(toka: TokaProcess, number: int, num_tokens: int) -> int:
    """The tokens of the answer. The client waits while the replica starts again."""
    answer = httpx.post(f"{toka.url}/v1/completions", json=make_body(number, num_tokens), timeout=400)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


def read_stream(toka: TokaProcess, num_tokens: int, begun: threading.Event) -> list[dict[str, Any]]:
    events = []
    body = make_body(99, num_tokens) | {"stream": True}
    with httpx.stream("POST", f"{toka.url}/v1/completions", json=body, timeout=400) as answer:
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                begun.set()
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def make_body(number: int, num_tokens: int) -> dict[str, object]:
    prompt = [7 * index % 250 for index in range(20 + number)]
    return {"model": "default", "prompt": prompt, "seed": number, "max_tokens": num_tokens, "ignore_eos": True}
