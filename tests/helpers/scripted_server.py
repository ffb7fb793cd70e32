"""A small HTTP server with scripted answers, which runs in a thread of the test process."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from tests.helpers.limits import join


class ScriptedServer:
    """Answers each completion after `latency_s(body)` with the status and usage that the test sets."""

    def __init__(self) -> None:
        self.base_url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.min_in_flight = 0
        """No request is answered before so many have been in flight at once."""
        self.latency_s = lambda _: 0.0
        self.status = lambda _: 200
        self.answer = self.honest_answer
        self.events = self.honest_events
        self.stream_end = b"data: [DONE]\n\n"
        self.metrics = ""
        """Text of /metrics; empty for none."""

    @staticmethod
    def honest_answer(body: dict[str, Any]) -> dict[str, Any]:
        num_samples = body.get("n", 1)
        usage = {
            "prompt_tokens": len(body["prompt"].split()) if "prompt" in body else 5,
            "completion_tokens": num_samples * body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        text = {"message": {"role": "assistant", "content": "roar"}} if "messages" in body else {"text": "roar"}
        return {"choices": [text] * num_samples, "usage": usage}

    @staticmethod
    def honest_events(body: dict[str, Any]) -> list[tuple[float, Any]]:
        """(seconds before the event, its JSON) of a streamed answer."""
        is_chat = "messages" in body
        events: list[tuple[float, Any]] = []
        samples = range(body.get("n", 1))
        if is_chat:
            events += [(0.0, _choice(index, delta={"role": "assistant", "content": ""})) for index in samples]
        for _ in range(body["max_tokens"]):
            for index in samples:
                text = {"delta": {"content": "roar "}} if is_chat else {"text": "roar "}
                events.append((0.01, _choice(index, **text)))
        usage = ScriptedServer.honest_answer(body)["usage"]
        return [*events, (0.0, {"choices": [], "usage": usage})]

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "scripted"}]}

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": "1.2.3"}

        @app.get("/metrics")
        async def metrics() -> PlainTextResponse:
            return PlainTextResponse(self.metrics, status_code=200 if self.metrics else 404)

        @app.post("/v1/{path:path}")
        async def complete(path: str, request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.paths.append(path)
            self.headers.append(dict(request.headers))
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
            while self.max_in_flight < self.min_in_flight:  # noqa: ASYNC110 - tests wait so seldom
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.latency_s(body))
            self.num_in_flight -= 1
            if body.get("stream") and self.status(body) == 200:
                return StreamingResponse(_stream(self.events(body), self.stream_end), media_type="text/event-stream")
            return JSONResponse(self.answer(body), status_code=self.status(body))

        return app


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "finish_reason": None} | fields]}


async def _stream(events: list[tuple[float, Any]], end: bytes) -> AsyncIterator[bytes]:
    """Each event when it is due, counted from the first byte: delays of the server's loop do not add up."""
    due_s = time.perf_counter()
    for wait_s, event in events:
        due_s += wait_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield end


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    listener = socket.create_server(("127.0.0.1", 0))
    scripted.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(scripted.app(), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()  # clients can connect already: the socket is listening
    yield scripted
    server.should_exit = True
    join(thread)
    listener.close()
