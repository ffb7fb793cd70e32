"""The quickstarts of the docs by curl alone."""

import json
import shutil
import subprocess
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

HELLO = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        ("chat/completions", HELLO, ("choices", 0, "message", "content")),
        ("completions", {"prompt": "The whale", "max_tokens": 8}, ("choices", 0, "text")),
        ("responses", {"input": "Say hello.", "max_output_tokens": 8}, ("output", 0, "content", 0, "text")),
        ("messages", HELLO, ("content", 0, "text")),
    ],
)
def test_a_body_without_headers_is_answered(
    route: str, body: dict[str, Any], path: tuple[str | int, ...], base_url: str
) -> None:
    """curl then sends `application/x-www-form-urlencoded` as the type of the body, and no key."""

    def curl(fields: dict[str, Any]) -> str:
        command = ["curl", "-sS", "--fail-with-body", "-N", f"{base_url}/{route}", "-d", json.dumps(fields)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    found: Any = json.loads(curl({"model": "default", **body}))
    for key in path:
        found = found[key]
    assert found
    streamed = curl({"model": "default", **body, "stream": True})
    assert streamed.count("data: ") > 3
