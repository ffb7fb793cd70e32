"""Offers requests to an OpenAI-compatible server over HTTP and times them.

The client often runs on the server's machine, so it must use little CPU time. Bodies are encoded before timing starts.
aiohttp takes 0.15 ms of CPU per request; httpx and the openai client take 7 ms with 64 connections and 14 ms with 512.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from benchmarks.throughput.workloads import OfferedRequest

# In Python 3.10, asyncio.TimeoutError is not a subclass of OSError.
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class ServerError(Exception):
    """The server cannot be measured. The message is one line for the user."""


class BadAnswer(ValueError):
    """The answer is not what was requested and must not be counted. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to reach a server and how to read its answers."""

    base_url: str
    """Up to and including /v1, without a slash at the end."""
    api_key: str | None
    """None sends no Authorization header."""
    timeout_s: float
    """Limit for one whole request, in seconds."""
    usage_per_choice: bool
    """The server's usage.completion_tokens counts one of n choices, as llama.cpp's does: multiply it by n."""
    extra_body: dict[str, object]
    """Fields merged into every request's body."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Outcome of one offered request."""

    index: int
    """Position of the request in the offered load."""
    sent_s: float
    """Seconds from the start of the run to sending the request."""
    finished_s: float
    """Seconds from the start of the run to the end of the answer, or to the failure."""
    latency_s: float
    """Seconds from sending to the whole answer. A request with an arrival time counts from that time, which includes
    waiting for a free connection."""
    prompt_tokens: int
    """As the server reports them; 0 if the request failed, as for the other token counts."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache; 0 if the server does not report them."""
    completion_tokens: int
    """Tokens of all choices together."""
    error: str | None
    """None if the request succeeded, otherwise one line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, as in RequestResult."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def read_usage(payload: bytes, request: OfferedRequest, usage_per_choice: bool) -> Usage:
    """Token counts of an answer. Raises BadAnswer if the answer does not match the request.

    With ignore_eos every choice must have exactly `max_tokens` tokens: otherwise servers cannot be compared."""
    try:
        answer = orjson.loads(payload)
        num_choices = len(answer["choices"])
        usage: dict[str, Any] = answer["usage"]
        prompt_tokens, completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadAnswer(f"the answer has no valid choices and usage: {error!r}") from None
    if num_choices != request.num_samples:
        raise BadAnswer(f"{num_choices} choices, expected {request.num_samples}")
    if usage_per_choice:
        completion_tokens *= num_choices
    expected = request.num_samples * request.max_tokens
    if request.ignore_eos and completion_tokens != expected:
        is_one_choice = completion_tokens * num_choices == expected
        hint = " (the server counts one choice: use --usage-per-choice)" if is_one_choice else ""
        raise BadAnswer(f"usage.completion_tokens is {completion_tokens}, expected {expected}{hint}")
    return Usage(prompt_tokens, cached_tokens, completion_tokens)


class Client:
    """A pool of connections to one server. Create it with `open_client`."""

    def __init__(self, session: aiohttp.ClientSession, options: ClientOptions) -> None:
        self._session = session
        self._options = options

    async def find_model(self) -> str:
        """Id of the first model that the server lists. Raises ServerError."""
        url = f"{self._options.base_url}/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                return str(orjson.loads(await response.read())["data"][0]["id"])
        except (*UNREACHABLE, ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"no model at {url}: {error!r}; is the server running? (not asked with --model)"
            ) from None

    async def version(self) -> object:
        """The JSON answer of /version, which is beside /v1; None if there is none."""
        try:
            async with self._session.get(f"{self._options.base_url.removesuffix('/v1')}/version") as response:
                return orjson.loads(await response.read()) if response.ok else None
        except (*UNREACHABLE, ValueError):
            return None

    async def offer(
        self,
        requests: Sequence[OfferedRequest],
        model: str,
        concurrency: int | None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[RequestResult]:
        """Send each request once, in order, as soon as it is due and fewer than `concurrency` are in flight.

        concurrency: HTTP requests; None for no limit. on_answer: called when a request ends, failed or not. Returns
        the results in the order of the requests."""
        bodies = [self._encode(request, model) for request in requests]
        connections = asyncio.Semaphore(len(requests) if concurrency is None else concurrency)
        start = time.perf_counter()

        async def run_one(index: int) -> RequestResult:
            request = requests[index]
            if request.arrival_s is not None:
                await asyncio.sleep(start + request.arrival_s - time.perf_counter())
            async with connections:
                sent_s = time.perf_counter() - start
                try:
                    usage, error = await self._send(request, bodies[index]), None
                except BadAnswer as bad:
                    usage, error = Usage(0, 0, 0), str(bad)
                finished_s = time.perf_counter() - start
            result = RequestResult(
                index=index,
                sent_s=sent_s,
                finished_s=finished_s,
                latency_s=finished_s - (sent_s if request.arrival_s is None else request.arrival_s),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                error=error,
            )
            on_answer()
            return result

        return await asyncio.gather(*(run_one(index) for index in range(len(requests))))

    def _encode(self, request: OfferedRequest, model: str) -> bytes:
        body: dict[str, object] = {
            "model": model,
            **request.content,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        if request.num_samples != 1:
            body["n"] = request.num_samples
        if request.ignore_eos:  # not part of OpenAI's API: a server may refuse it
            body["ignore_eos"] = True
        return orjson.dumps(body | self._options.extra_body)

    async def _send(self, request: OfferedRequest, body: bytes) -> Usage:
        path = "chat/completions" if "messages" in request.content else "completions"
        try:
            async with self._session.post(f"{self._options.base_url}/{path}", data=body) as response:
                payload = await response.read()
        except asyncio.TimeoutError:
            raise BadAnswer(f"no answer within {self._options.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BadAnswer(repr(error)) from None
        if response.status != 200:
            text = " ".join(payload[:300].decode(errors="replace").split())
            raise BadAnswer(f"HTTP {response.status}: {text}")
        return read_usage(payload, request, self._options.usage_per_choice)


@asynccontextmanager
async def open_client(options: ClientOptions) -> AsyncIterator[Client]:
    """A client without retries and without a limit on connections."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    # uvicorn and llama.cpp close idle connections after 5 s. A request sent on a connection that the server is closing
    # fails, so the client closes idle connections well before.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Client(session, options)
