"""The server's own /v1/bulk in front of a function, in place of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from tests.server.helpers.live_server import http_server
from tokasaurus.server.errors import ServiceUnavailable
from tokasaurus.server.jobs.line_runner import Line
from tokasaurus.server.jobs.open_bulk import announced
from tokasaurus.server.protocol.answers import PromptTokensDetails, Usage
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.routes.bulk import BulkRun, BulkStream

_USAGE = Usage(1, 1, 2, PromptTokensDetails(0, 0, 0, 0))
_PACKED = dict.fromkeys(("packed_chosen_logprobs", "packed_topk_indices", "packed_topk_logprobs"))


class EchoServer:
    """Answers the prompt P with `PP`, after a delay. The first two times, a prompt with "busy" gets 503; one with
    "never" always does."""

    def __init__(self, delay_s: float, max_line_bytes: int) -> None:
        self.times: dict[str, int] = {}
        """How often a prompt has come."""
        self.num_connections = 0
        self.names: list[str] = []
        """What the clients call their bulk requests."""
        self.num_lines: list[int | None] = []
        """How many lines the clients announce, by connection."""
        self.progress: dict[str, Any] | None = None
        """What it tells of each request's progress; None: nothing."""
        self._delay_s = delay_s
        self._max_line_bytes = max_line_bytes

    async def read_line(self, content: bytes) -> Line:
        line = orjson.loads(content)
        prompt = line["body"]["prompt"]

        async def answer() -> Answer:
            self.times[prompt] = self.times.get(prompt, 0) + 1
            if "never" in prompt or ("busy" in prompt and self.times[prompt] < 3):
                raise ServiceUnavailable("not now")
            await asyncio.sleep(self._delay_s)
            return Answer(orjson.dumps(_completion(prompt)), _USAGE)

        return Line(line["custom_id"], answer)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "m"}]}

        @app.post("/v1/bulk")
        async def bulk(request: Request) -> Response:
            self.num_connections += 1
            name, num_lines = announced(request.headers)
            self.names.append(name)
            self.num_lines.append(num_lines)
            report = None if self.progress is None else self._report
            return BulkStream(BulkRun(self.read_line, self._max_line_bytes, report))

        return app

    def _report(self) -> bytes:
        return orjson.dumps({"progress": self.progress}, option=orjson.OPT_APPEND_NEWLINE)


def _completion(prompt: str) -> dict[str, Any]:
    return {
        "choices": [{"text": prompt * 2, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        "system_fingerprint": json.dumps({"completion_ids": [[1]], **_PACKED}),
    }


@contextmanager
def echo_server(delay_s: float = 0.0, max_line_bytes: int = 10_000) -> Iterator[tuple[EchoServer, str]]:
    """(the server, its URL)."""
    server = EchoServer(delay_s, max_line_bytes)
    with http_server(server.app()) as url:
        yield server, url
