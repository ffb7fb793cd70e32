"""A real server with the demo model in float32, for the tests of every client.

`make test` starts it for all files. `make test-clients` runs the tests in environments without the server's
dependencies, and gives them its URL in TOKA_CLIENTS_BASE_URL.
"""

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PlainPost = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def base_url(request: pytest.FixtureRequest) -> str:
    """The server's URL, ending in /v1."""
    if url := os.environ.get("TOKA_CLIENTS_BASE_URL"):
        return url
    return f"{request.getfixturevalue('demo_model').url}/v1"


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The checkpoint of the served model in Hugging Face format."""
    if directory := os.environ.get("TOKA_CLIENTS_MODEL"):
        return Path(directory)
    from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors

    return with_safetensors(resolve_checkpoint(None).directory)


@pytest.fixture(scope="session")
def plain_post(base_url: str) -> PlainPost:
    """(route after /v1, body) -> the answer, requested without a client library, to compare with each client's."""

    def post(route: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps({"model": "default", **body}).encode()
        request = urllib.request.Request(f"{base_url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            parsed: dict[str, Any] = json.load(answer)
            return parsed

    return post


@pytest.fixture(scope="session")
def generated_tokens(base_url: str) -> Callable[[], float]:
    """-> the tokens of all answers since the server's start, by its metrics."""

    def count() -> float:
        with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("toka_generation_tokens_total"))

    return count


WHALES = "What do whales eat?"


@pytest.fixture(scope="session")
def whales(plain_post: PlainPost) -> Callable[..., str]:
    """(number of tokens, system message) -> the greedy answer to WHALES, requested without a client library."""

    def answer(max_tokens: int, system: str | None = None) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "messages": [*messages, {"role": "user", "content": WHALES}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        text: str = plain_post("chat/completions", body)["choices"][0]["message"]["content"]
        return text

    return answer
