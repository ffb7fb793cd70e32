"""Offers requests to an OpenAI-compatible server over HTTP and times them.

The client often runs on the server's machine, so it must use little CPU time. Bodies are encoded before timing starts.
aiohttp takes 0.15 ms of CPU per request; httpx and the openai client take 7 ms with 64 connections and 14 ms with 512.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from tokasaurus.addresses import leads_here, proxies_for
from tokasaurus.commands.bench.scrape import Scrape, watched
from tokasaurus.commands.bench.workloads import OfferedRequest
from tokasaurus.commands.running_server import EventReader, NotAnswered
from tokasaurus.text.exact_json import dumps

# In Python 3.10, asyncio.TimeoutError is not a subclass of OSError.
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError)

# uvicorn and llama.cpp close idle connections after 5 s. A request sent on a connection that the server is closing
# fails, so the client closes idle connections well before.
_IDLE_S = 2.0


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
    is_streaming: bool = False
    """Answers are streamed, so that the times of tokens are known."""
    unix_socket: str | None = None
    """File of a socket that is connected to, whatever host the URL has."""


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
    """Seconds from sending to the whole answer, or to the last token of a stream."""
    prompt_tokens: int
    """Prompt tokens by the server's count; like the other token counts, 0 if the request failed."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache; 0 if the server does not report them."""
    completion_tokens: int
    """Tokens of all choices together."""
    error: str | None
    """None if the request succeeded, otherwise one line."""
    num_samples: int = 1
    events_s: tuple[float, ...] = ()
    """Seconds from sending to each event with tokens, of any choice; empty without a stream."""
    gaps_s: tuple[float, ...] = ()
    """Seconds between two events with tokens of one choice, in the order they came; empty without a stream."""
    waited_s: float | None = None
    """Seconds that the request waited for a free connection after its arrival time; None without an arrival time."""

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first token of any choice; None without a stream."""
        return self.events_s[0] if self.events_s else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, as in RequestResult."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class _Answer:
    """What came back for one request."""

    usage: Usage
    text: str
    """Text of the first choice."""
    events_s: list[float] = field(default_factory=list)
    """Times of a stream's events, as in RequestResult."""
    gaps_s: list[float] = field(default_factory=list)


def read_usage(answer: dict[str, Any], request: OfferedRequest, usage_per_choice: bool) -> Usage:
    """Token counts of an answer. Raises BadAnswer if the answer does not match the request.

    With ignore_eos every choice must have exactly `max_tokens` tokens: otherwise servers cannot be compared."""
    try:
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
        hint = " (the server counts one choice: use usage_per_choice=T)" if is_one_choice else ""
        raise BadAnswer(f"usage.completion_tokens is {completion_tokens}, expected {expected}{hint}")
    return Usage(prompt_tokens, cached_tokens, completion_tokens)


class _StreamReader:
    """Takes the events of one streamed answer, and the time of each.

    An event counts as in `vllm bench serve` (vLLM 0.33): an event with a choice that has text, or whose text is empty,
    has a token; the opening event of a chat, which has only a role, has none. Each choice has times of its own, which
    for one choice is the same."""

    def __init__(self, is_chat: bool) -> None:
        self.events_s: list[float] = []
        self.gaps_s: list[float] = []
        self.text: list[str] = []
        self.usage: dict[str, Any] | None = None
        self._is_chat = is_chat
        self._last_s: dict[int, float] = {}
        self._ended = set[int]()

    def take(self, event: bytes, now_s: float) -> None:
        """event: a JSON object; now_s: seconds since sending. Raises BadAnswer."""
        try:
            chunk = orjson.loads(event)
            if chunk.get("error"):
                error = chunk["error"]
                raise BadAnswer(f"the stream has an error: {error.get('message') if type(error) is dict else error}")
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, now_s)
            self.usage = chunk.get("usage") or self.usage
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, BadAnswer):
                raise
            raise BadAnswer(f"the stream has an event that is none of the API: {event[:200]!r}") from None

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        index = choice.get("index") or 0
        if choice.get("finish_reason"):
            self._ended.add(index)
        text = _streamed_text(choice["delta"]) if self._is_chat and "delta" in choice else choice.get("text")
        if text is None:
            return
        if index == 0:
            self.text.append(str(text))
        if index in self._last_s:
            self.gaps_s.append(now_s - self._last_s[index])
        self.events_s.append(now_s)
        self._last_s[index] = now_s

    def answer(self) -> dict[str, Any]:
        """The stream's answer in the form of one that is not streamed. Raises BadAnswer if the stream lacks its end."""
        if not self.events_s:
            raise BadAnswer("the stream has no token")
        if self.usage is None:
            missing = "usage, which stream_options asks for" if self._ended else "an end: the connection was closed"
            raise BadAnswer(f"the stream lacks {missing}")
        return {"choices": sorted(self._last_s), "usage": self.usage}


def _text_of_chat(answer: dict[str, Any]) -> str:
    """Raises BadAnswer."""
    try:
        return str(answer["choices"][0]["message"].get("content") or "")
    except (KeyError, TypeError, AttributeError):
        raise BadAnswer("the answer has no message") from None


def _streamed_text(delta: dict[str, Any]) -> str | None:
    """Text of the event of a chat; None if it has no token."""
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            return str(delta[name])
    if delta.get("tool_calls") or (delta.get("content") == "" and "role" not in delta):
        return ""
    return None


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
            socket = self._options.unix_socket
            place = url if socket is None else f"unix_socket={socket}"
            raise ServerError(
                f"no model at {place}: {error!r}; is the server running? model= is not looked for"
            ) from None

    async def version(self) -> object:
        """The JSON answer of /version, which is beside /v1; None if there is none."""
        try:
            async with self._session.get(f"{self._options.base_url.removesuffix('/v1')}/version") as response:
                return orjson.loads(await response.read()) if response.ok else None
        except (*UNREACHABLE, ValueError):
            return None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Scrape]:
        """Reads the server's metrics within the context, if it has any."""
        async with watched(self._session, self._options.base_url) as scrape:
            yield scrape

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
        # A turn that follows another is encoded when it is known.
        bodies = [b"" if request.after is not None else self._encode(request, model) for request in requests]
        connections = asyncio.Semaphore(len(requests) if concurrency is None else concurrency)
        turns: dict[int, asyncio.Future[list[dict[str, str]] | None]] = {
            request.after: asyncio.get_running_loop().create_future()
            for request in requests
            if request.after is not None
        }
        start = time.perf_counter()

        async def run_one(index: int) -> RequestResult:
            request = requests[index]
            if request.arrival_s is not None:
                await asyncio.sleep(start + request.arrival_s - time.perf_counter())
            body, before = bodies[index], None
            if request.after is not None:
                before = await turns[request.after]
                request = request.following(before or [])
                body = self._encode(request, model)
            answer, error = _Answer(Usage(0, 0, 0), ""), None
            async with connections:
                sent_s = time.perf_counter() - start
                if requests[index].after is not None and before is None:
                    error = "the turn before it failed"
                else:
                    try:
                        answer = await self._send(request, body)
                    except BadAnswer as bad:
                        error = str(bad)
                finished_s = time.perf_counter() - start
            if index in turns:
                said = {"role": "assistant", "content": answer.text}
                turns[index].set_result(None if error else [*request.messages(), said])
            result = RequestResult(
                index=index,
                sent_s=sent_s,
                finished_s=finished_s,
                latency_s=answer.events_s[-1] if answer.events_s else finished_s - sent_s,
                prompt_tokens=answer.usage.prompt_tokens,
                cached_tokens=answer.usage.cached_tokens,
                completion_tokens=answer.usage.completion_tokens,
                error=error,
                num_samples=request.num_samples,
                events_s=tuple(answer.events_s),
                gaps_s=tuple(answer.gaps_s),
                waited_s=None if request.arrival_s is None else sent_s - request.arrival_s,
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
            **request.fields,
        }
        if request.num_samples != 1:
            body["n"] = request.num_samples
        if request.ignore_eos:  # not part of OpenAI's API: a server may refuse it
            body["ignore_eos"] = True
        if self._options.is_streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return dumps(body | self._options.extra_body)

    async def _send(self, request: OfferedRequest, body: bytes) -> _Answer:
        """Raises BadAnswer."""
        is_chat = "messages" in request.content
        url = f"{self._options.base_url}/{'chat/completions' if is_chat else 'completions'}"
        began_s = time.perf_counter()
        try:
            async with self._session.post(url, data=body) as response:
                if response.status != 200:
                    text = " ".join((await response.read())[:300].decode(errors="replace").split())
                    raise BadAnswer(f"HTTP {response.status}: {text}")
                if self._options.is_streaming:
                    return await self._read_stream(response, request, began_s)
                payload = await response.read()
        except asyncio.TimeoutError:
            raise BadAnswer(f"no answer within {self._options.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BadAnswer(repr(error)) from None
        try:
            answer = orjson.loads(payload)
        except ValueError as error:
            raise BadAnswer(f"the answer is no JSON: {error}") from None
        usage = read_usage(answer, request, self._options.usage_per_choice)
        return _Answer(usage, _text_of_chat(answer) if is_chat else "")

    async def _read_stream(self, response: aiohttp.ClientResponse, request: OfferedRequest, began_s: float) -> _Answer:
        """Raises BadAnswer, and the errors of a connection."""
        reader = _StreamReader("messages" in request.content)
        events = EventReader()
        try:
            async for received in response.content.iter_any():
                for event in events.feed(received):
                    reader.take(event, time.perf_counter() - began_s)
            for event in events.end():
                reader.take(event, time.perf_counter() - began_s)
        except NotAnswered as error:
            raise BadAnswer(f"the server {error}") from None
        usage = read_usage(reader.answer(), request, self._options.usage_per_choice)
        return _Answer(usage, "".join(reader.text), reader.events_s, reader.gaps_s)


@asynccontextmanager
async def open_client(options: ClientOptions) -> AsyncIterator[Client]:
    """A client without retries and without a limit on connections. The environment's proxies are used, but not for URLs
    that lead to this machine. Raises UserError for a proxy that cannot be used."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    connector: aiohttp.BaseConnector
    if options.unix_socket is None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
    else:
        connector = aiohttp.UnixConnector(options.unix_socket, limit=0, keepalive_timeout=_IDLE_S)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    has_proxy = options.unix_socket is None and not leads_here(options.base_url)
    with proxies_for(options.base_url):
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=has_proxy)
    async with session:
        yield Client(session, options)
