"""Requests of a soak, and what became of them."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_LIMIT_S = 180.0
"""A request also waits for a restart of the engine."""
COMPLETIONS, CHAT, BULK = "/v1/completions", "/v1/chat/completions", "/v1/bulk"
KILL_GRACE_S = 30.0
"""So long after a kill, streams may report it."""


class WrongAnswer(Exception):
    """The server's answer is not the expected one."""


class EngineDied(Exception):
    """A stream ended with the error event of a killed process, which is allowed after a kill."""


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    killed_s: float = float("-inf")
    """When a process was killed last, by time.monotonic()."""

    def add_fault(self, line: str) -> None:
        self.faults.append(line)
        print(f"FAULT {line[:500]}", flush=True)


@dataclass
class SoakClient:
    session: aiohttp.ClientSession
    tally: Tally
    expected: dict[int, list[str]] = field(default_factory=dict)
    """Texts of each body in `soak_loads.BODIES`, by its number."""
    expected_logprobs: dict[int, list[float]] = field(default_factory=dict)

    @asynccontextmanager
    async def post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """body: bytes, or what becomes JSON. Raises WrongAnswer unless the status is 200."""
        is_bytes = isinstance(body, bytes)
        content = body if is_bytes else json.dumps(body).encode()
        headers = {"Content-Type": "application/x-ndjson" if is_bytes else "application/json"}
        async with self.session.post(path, data=content, headers=headers) as answer:
            if answer.status != 200:
                raise WrongAnswer(f"status {answer.status}: {(await answer.text())[:300]}")
            yield answer

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.post(path, body) as answer:
            found: dict[str, Any] = json.loads(await answer.read())
            return found

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream up to its end, which must be [DONE]. Raises EngineDied, WrongAnswer."""
        async with self.post(path, body | {"stream": True}) as answer:
            last = b""
            try:
                async for line in answer.content:
                    if line.strip():
                        last = line.removeprefix(b"data: ").strip()
                        if last != b"[DONE]":
                            yield self._checked(json.loads(last))
            finally:
                answer.close()
            if last != b"[DONE]":
                raise WrongAnswer(f"a stream ended with {last[:200]!r}")

    def _checked(self, event: dict[str, Any]) -> dict[str, Any]:
        if "error" not in event:
            return event
        if event["error"]["code"] == "engine_died" and time.monotonic() - self.tally.killed_s < KILL_GRACE_S:
            raise EngineDied
        raise WrongAnswer(f"an error event: {event}")


Load = Callable[[SoakClient, random.Random], Awaitable[None]]


async def repeat(load: Load, client: SoakClient, seed: int, is_over: Callable[[], bool]) -> None:
    """Runs the load until the time is over; an answer that is wrong, or does not come, is a fault."""
    rng = random.Random(seed)
    while not is_over():
        try:
            await asyncio.wait_for(load(client, rng), REQUEST_LIMIT_S)
            client.tally.counts[load.__name__] += 1
        except EngineDied:
            client.tally.counts["streams ended by a kill"] += 1
        except (WrongAnswer, aiohttp.ClientError, asyncio.TimeoutError, LookupError, ValueError) as error:
            client.tally.add_fault(f"{load.__name__}: {type(error).__name__} {error}")
            await asyncio.sleep(1)


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
