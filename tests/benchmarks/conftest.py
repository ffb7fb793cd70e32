"""A small HTTP server with scripted answers, which runs in a thread of the test process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


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

    @staticmethod
    def honest_answer(body: dict[str, Any]) -> dict[str, Any]:
        num_samples = body.get("n", 1)
        usage = {
            "prompt_tokens": len(body["prompt"].split()) if "prompt" in body else 5,
            "completion_tokens": num_samples * body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        return {"choices": [{"text": "roar"}] * num_samples, "usage": usage}

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "scripted"}]}

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": "1.2.3"}

        @app.post("/v1/{path:path}")
        async def complete(path: str, request: Request) -> JSONResponse:
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
            return JSONResponse(self.answer(body), status_code=self.status(body))

        return app


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
    thread.join()
    listener.close()
