"""A server with random weights in a given shape and every flag at its default, and 80 sequences."""

from pathlib import Path

import httpx

from benchmarks.random_models import ModelShape, write_model
from tests.end_to_end.helpers.toka_process import running_toka, wait_for


def check_default_start(directory: Path, shape: ModelShape, *flags: str) -> None:
    """flags: only those that the machine at hand needs."""
    write_model(directory, shape)
    body = {"model": "default", "prompt": [list(range(1, 40)), list(range(1, 70))], "n": 40, "max_tokens": 8}
    with running_toka(f"model={directory}", *flags) as toka:
        answer = httpx.post(f"{toka.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=200)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 80 * 8
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.gauge("toka_graph_misses_total") == 0
        wait_for(lambda: toka.gauge("toka_kv_blocks_used") == 0, timeout_s=30)
        assert toka.stop() == 0
