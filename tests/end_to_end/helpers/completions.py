"""Completions asked for with http.client, whose threads need little CPU time: each call has a connection of its own."""

import http.client
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tests.helpers.tiny_model import save_tiny_model

TIMEOUT_S = 240.0
"""Longest silence of the server."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    """The JSON object."""
    retry_after: str | None
    """The header's value."""

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.body["choices"]]

    @property
    def error_code(self) -> str:
        """Empty if the answer is no error."""
        error = self.body.get("error")
        return "" if error is None else str(error["code"])


@dataclass
class Streamed:
    """A stream of one choice. A status other than 200 has no events."""

    status: int
    text: str = ""
    error_codes: list[str] = field(default_factory=list)
    """Of each error event."""
    num_events: int = 0
    """Without errors and [DONE]."""
    is_done: bool = False
    """Whether [DONE] came."""
    is_error_last: bool = False


def save_long_model(directory: Path, context: int) -> None:
    """A tiny model whose sequences may have `context` tokens."""
    save_tiny_model(directory, "llama")
    path = directory / "config.json"
    config = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps(config | {"max_position_embeddings": context}))


def make_body(number: int, **fields: object) -> dict[str, object]:
    """A request whose text depends on `number` alone; it never ends early."""
    return {"model": "default", "prompt": f"Story {number}", "seed": number, "ignore_eos": True, **fields}


def random_ids(number: int, length: int) -> list[int]:
    """Token ids of ordinary characters."""
    return random.Random(number).choices(range(200), k=length)


def complete(port: int, body: dict[str, object], timeout_s: float = TIMEOUT_S) -> Answer:
    """Raises OSError or HTTPException if the server refuses the connection or does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        response = _post(connection, body)
        return Answer(response.status, orjson.loads(response.read()), response.headers["Retry-After"])
    finally:
        connection.close()


def stream(
    port: int,
    body: dict[str, object],
    timeout_s: float = TIMEOUT_S,
    on_first_event: Callable[[], object] = lambda: None,
) -> Streamed:
    """Reads to the end. Raises as `complete`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        response = _post(connection, body | {"stream": True})
        streamed = Streamed(response.status)
        while line := response.readline():
            content = line.strip().removeprefix(b"data: ")
            if not content or response.status != 200:
                continue
            if content == b"[DONE]":
                streamed.is_done = True
                continue
            event = orjson.loads(content)
            streamed.is_error_last = "error" in event
            if streamed.is_error_last:
                streamed.error_codes.append(event["error"]["code"])
            else:
                if not streamed.num_events:
                    on_first_event()
                streamed.num_events += 1
                streamed.text += "".join(choice["text"] for choice in event["choices"])
        return streamed
    finally:
        connection.close()


def get_status(port: int, path: str, timeout_s: float = 30.0) -> int:
    """The status of a GET over a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def _post(connection: http.client.HTTPConnection, body: dict[str, object]) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/completions", orjson.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()
