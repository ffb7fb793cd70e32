"""`python -m tests.commands.bench.helpers.timed_server PORT`: completions whose tokens come at times that the prompt's
number decides. A process of its own, so that no client disturbs it."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

app = FastAPI()


def seconds_before_token(request: int, token: int) -> float:
    """By the numbers of both, from 0 on."""
    if token == 0:
        return 0.3 + 0.1 * (request * 7 % 13)
    return 0.06 + 0.02 * ((request * 5 + token * 3) % 11)


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "timed", "object": "model"}]}


@app.post("/v1/completions")
async def complete(request: Request) -> StreamingResponse:
    body = await request.json()
    return StreamingResponse(_stream(body), media_type="text/event-stream")


async def _stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    words = body["prompt"].split()
    number = int(words[0]) if words[0].isdecimal() else 0
    due_s = time.perf_counter()
    for token in range(body["max_tokens"]):
        due_s += seconds_before_token(number, token)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        yield _event({"choices": [{"index": 0, "text": " roar", "finish_reason": None}]})
    usage = {"prompt_tokens": len(words), "completion_tokens": body["max_tokens"]}
    yield _event({"choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    whole = {"id": "1", "object": "text_completion", "created": 0, "model": "timed"} | content
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
