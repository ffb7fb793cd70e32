"""Samples as a server's /live sends them, made up: a pool that fills and empties while steps go on."""

import json
from typing import Any

START_S = 1_764_331_200.0
ROUND_S = 0.0125
STEPS_PER_SECOND = 80
TOTAL_BLOCKS = 6000


def sample(second: int, **changes: Any) -> dict[str, Any]:
    """The sample of this second after the start. changes: of keys at the top."""
    return {
        "format": 1,
        "time": START_S + second,
        "server": {
            "version": "0.3.0",
            "model": "SmolLM2-135M-Instruct",
            "started": START_S - 600,
            "dp_size": 1,
            "pp_size": 1,
            "tp_size": 1,
            "device": "cpu",
            "dtype": "bfloat16",
            "page_size": 16,
            "draining": False,
            "price_per_hour": None,
        },
        "requests": {"open": 12, "answered": 100 + second, "aborted": 2, "failed": 1},
        "replicas": [replica(second)],
        "jobs": [job(second)],
        **changes,
    }


def replica(second: int, index: int = 0, **changes: Any) -> dict[str, Any]:
    step = STEPS_PER_SECOND * second
    own = 2400 + 20 * (second % 60)
    return {
        "index": index,
        "state": "up",
        "restarts": 0,
        "step": step,
        "steps": STEPS_PER_SECOND,
        "step_seconds": ROUND_S,
        "microbatches": 1,
        "running": 210,
        "prefilling": 3,
        "background": 12,
        "waiting": 33,
        "slots": 1024,
        "queue_depth": 2,
        "tokens": {
            "prompt": 900 * second,
            "generated": 16_800 * second,
            "cached": 400 * second,
            "computed": 500 * second,
            "shared": 100 * second,
            "recomputed": 0,
        },
        "blocks": {"total": TOTAL_BLOCKS, "own": own, "shared": 600, "cached": 1200, "free": 1800 - 20 * (second % 60)},
        "events": {"admitted": 4, "finished": 3, "preempted": 0, "evicted": 12},
        "forecast": {
            "step": step + 2,
            "steps": [0, 800, 801, 4000, 9000],
            "blocks": [own + 600, 4800, 4400, 3000, 0],
            "peak": 4800,
            "limit": TOTAL_BLOCKS,
        },
        "next": {
            "fits_in_steps": 61,
            "blocks": 310,
            "prompt_tokens": 900,
            "wait_seconds": 3.2,
            "blocked_by": "blocks",
        },
        "oldest_wait_seconds": 3.2,
        "lengths": [[120, 131], [200, 150]],
        "oldest": [old_request(number, "running") for number in range(8)]
        + [old_request(number, "waiting") for number in range(8, 11)],
        "eta_seconds": 40.1,
        "parts": {
            "manager": {"requests": 0.01, "results": 0.05, "admission": 0.02},
            "device": {"busy": 0.9, "idle": 0.02},
            "phases": {"gemm": 0.6, "attention": 0.2, "sampling": 0.1},
        },
        **changes,
    }


def old_request(number: int, state: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number:032d}-0",
        "client": "alice" if number % 2 else "127.0.0.1:51234",
        "state": state,
        "samples": 1,
        "running": int(state == "running"),
        "prompt_tokens": 900,
        "generated_tokens": 100 * number if state == "running" else 0,
        "max_tokens": 2000,
        "age_seconds": 40.0 - number,
        "wait_seconds": 0.3 if state == "running" else 40.0 - number,
        **changes,
    }


def job(second: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": "batch_abc",
        "kind": "batch",
        "name": "evaluation of the week",
        "state": "running",
        "lines": {"total": 1000, "done": min(1000, 4 * second), "failed": 2, "running": 64},
        "tokens": {"prompt": 1, "generated": 2},
        "started": START_S,
        "tokens_per_second": 900.0,
        "eta_seconds": 100.0,
        "cost": {"device_seconds": 12.5, "price": None},
        **changes,
    }


def line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
