"""A replica of the deployment `Engine`: one `toka`, whose HTTP it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import aiohttp
from yarl import URL

from tokasaurus.addresses import URL_OF_SOCKETS
from tokasaurus.ray.owned_server import OwnedServer
from tokasaurus.ray.requests import AnswerStart, EngineLost, ForwardedRequest, Headers

KV_CACHE_TOKENS = "kv_cache_tokens"
"""Key in the metadata of a replica, which its routers see."""

_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers of one connection."""
_NOT_RETURNED = _HOP_HEADERS | {b"date", b"server", b"x-request-id"}
"""Serve adds the last three itself; the last is what it sent as the request's header."""
_NOT_SENT = _HOP_HEADERS | {b"content-length", b"expect", b"accept-encoding"}
_EVENTS_END = b"\n\n"
_HEALTH_S = 8.0
"""Longest answer to a question about the engine's health; Serve's own limit is longer."""


class EngineReplica:
    """The class of the deployment; Serve calls its methods."""

    def __init__(self, words: list[str]) -> None:
        """Returns when the model is loaded; the event loop of the replica's methods runs. words: flags of `toka`.
        Raises EngineError."""
        self._server = OwnedServer(words)
        self._server.start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._server.socket_path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[AnswerStart | bytes, None]:
        """An AnswerStart; if it lacks the body, parts of the body. Raises EngineLost.

        If the caller cancels it, so does toka with the request."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _sent(request.headers)]
        url = URL(URL_OF_SOCKETS + request.target, encoded=True)
        try:
            async with self._session.request(
                request.method, url, headers=headers, data=request.body or None, allow_redirects=False
            ) as answer:
                received = _received(answer.raw_headers)
                if answer.content_type != "text/event-stream":
                    yield AnswerStart(answer.status, received, await answer.read())
                    return
                yield AnswerStart(answer.status, received, None)
                async for events in _whole_events(answer.content):
                    yield events
        except aiohttp.ClientError as error:
            self._server.end_if_dead()
            raise EngineLost(f"the engine's connection was lost: {error}") from None

    async def check_health(self) -> None:
        """Raises an exception unless /ready answers with 200: after some of them, Serve replaces the replica."""
        limit = aiohttp.ClientTimeout(total=_HEALTH_S)
        async with self._session.get(f"{URL_OF_SOCKETS}/ready", timeout=limit) as answer:
            if answer.status != 200:
                raise EngineLost(f"/ready answers {answer.status}: {(await answer.text())[:300]}")

    def record_replica_metadata(self) -> dict[str, int]:
        """Serve shows it to every router."""
        return {KV_CACHE_TOKENS: self._server.kv_cache_tokens}

    async def __del__(self) -> None:
        """Serve calls it when no request is left, or when it has waited for long enough."""
        if hasattr(self, "_session"):  # else it did not start
            await self._session.close()
            await asyncio.to_thread(self._server.stop)


def _sent(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_SENT]


def _received(headers: Headers) -> Headers:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_RETURNED]


async def _whole_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """All that has arrived, up to the end of its last whole event."""
    begun = b""
    async for received in content.iter_any():
        arrived = begun + received
        end = arrived.rfind(_EVENTS_END) + len(_EVENTS_END)
        if end < len(_EVENTS_END):  # rfind has found none
            begun = arrived
            continue
        begun = arrived[end:]
        yield arrived[:end]
    if begun:
        yield begun
