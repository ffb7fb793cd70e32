"""A real server with the demo model, in float32, for every client.

In the environment of `make test` it is started here. The environments of `make test-clients` have a client each and
none of what the server needs: they are told where it is.
"""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PlainPost = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Up to and including /v1."""
    if url := os.environ.get("TOKA_CLIENTS_BASE_URL"):
        yield url
        return
    from tests.end_to_end.helpers.toka_process import running_toka

    small = ("kv_cache_num_tokens=20000", "max_tokens_per_forward=256", "max_seqs_per_forward=64")
    with running_toka("dtype=float32", *small) as toka:
        yield f"{toka.url}/v1"
        assert toka.stop() == 0


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The same weights in Hugging Face's form."""
    if directory := os.environ.get("TOKA_CLIENTS_MODEL"):
        return Path(directory)
    from tokasaurus.checkpoint import resolve_checkpoint

    return resolve_checkpoint(None).directory


@pytest.fixture(scope="session")
def plain_post(base_url: str) -> PlainPost:
    """(route behind /v1, body) -> the answer, by no client at all: what each client's answer is compared with."""

    def post(route: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps({"model": "default", **body}).encode()
        asked = urllib.request.Request(f"{base_url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            parsed: dict[str, Any] = json.load(answer)
            return parsed

    return post
