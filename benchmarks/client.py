"""Offers requests to an OpenAI-compatible server over HTTP and times them.

The client shares the machine with the server, so it has to be cheap: bodies are encoded before the clock starts, and
aiohttp takes 0.15 ms of CPU for a request where httpx and the openai client take 7 ms with 64 connections and 14 ms
with 512."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from benchmarks.workloads import OfferedRequest

# Python 3.10 has an asyncio.TimeoutError that is no OSError.
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class ServerError(Exception):
    """The server cannot be measured. The message is one line for the user."""


class BadAnswer(ValueError):
    """An answer that must not be counted. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to reach a server and how to read its answers.

    base_url: up to and including /v1, without a slash at the end.
    api_key: None sends no Authorization header.
    timeout_s: for one whole request.
    usage_per_choice: the server's usage.completion_tokens counts one of n choices (llama.cpp): multiply by n.
    extra_body: merged into every request's body.
    """

    base_url: str
    api_key: str | None
    timeout_s: float
    usage_per_choice: bool
    extra_body: dict[str, object]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one offered request. Times are in seconds from the start of the run.

    latency_s: from sending to the whole answer; for a request with an arrival time, from that time, so that waiting
    for a free connection counts. cached_tokens: prompt tokens from a cache, where the server tells.
    error: None where the request succeeded, otherwise one line; the token counts are then 0.
    """

    index: int
    sent_s: float
    finished_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def read_usage(payload: bytes, request: OfferedRequest, usage_per_choice: bool) -> Usage:
    """The token counts of an answer. Raises BadAnswer where the answer is not what was asked for.

    With ignore_eos every choice has exactly `max_tokens` tokens; a server that says otherwise is not comparable."""
    try:
        answer = orjson.loads(payload)
        num_choices = len(answer["choices"])
        usage: dict[str, Any] = answer["usage"]
        prompt_tokens, completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadAnswer(f"no choices and usage in the answer: {error!r}") from None
    if num_choices != request.num_samples:
        raise BadAnswer(f"{num_choices} choices, expected {request.num_samples}")
    if usage_per_choice:
        completion_tokens *= num_choices
    expected = request.num_samples * request.max_tokens
    if request.ignore_eos and completion_tokens != expected:
        is_one_choice = completion_tokens * num_choices == expected
        hint = " (it counts one choice: --usage-per-choice)" if is_one_choice else ""
        raise BadAnswer(f"usage.completion_tokens gives {completion_tokens}, expected {expected}{hint}")
    return Usage(prompt_tokens, cached_tokens, completion_tokens)


class Client:
    """A connection pool to one server. Make it with `open_client`."""

    def __init__(self, session: aiohttp.ClientSession, options: ClientOptions) -> None:
        self._session = session
        self._options = options

    async def find_model(self) -> str:
        """The first model that the server lists. Raises ServerError."""
        url = f"{self._options.base_url}/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                return str(orjson.loads(await response.read())["data"][0]["id"])
        except (*UNREACHABLE, ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(f"no model at {url}: {error!r}; is the server running? --model skips this") from None

    async def version(self) -> object:
        """The JSON at /version beside /v1; None where there is none."""
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
        """Send each request once, in order, when it is due and fewer than `concurrency` are in flight.

        concurrency: HTTP requests, None for no limit. on_answer: called as each ends, also one that failed. Returns
        the results in the order of the requests."""
        bodies = [self._encode(request, model) for request in requests]
        slots = asyncio.Semaphore(len(requests) if concurrency is None else concurrency)
        start = time.perf_counter()

        async def run_one(index: int) -> RequestResult:
            request = requests[index]
            if request.arrival_s is not None:
                await asyncio.sleep(start + request.arrival_s - time.perf_counter())
            async with slots:
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
        if request.ignore_eos:  # not OpenAI's: a server that does not know it may refuse it
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
    """A client without a limit on connections, without retries."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    # Servers close idle connections after 5 s (uvicorn, llama.cpp): drop ours well before, or a request may meet the
    # closing and fail.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Client(session, options)
