"""The ingress: has requests answered by replicas, and asks another replica if one dies before it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.ray.broken_streams import StreamWatch
from tokasaurus.ray.requests import AnswerStart, EngineLost, ForwardedRequest, routed_prompt
from tokasaurus.server.dialects.messages import MessagesErrorsMiddleware
from tokasaurus.server.endpoints import ALL_ENDPOINTS, ENDPOINTS
from tokasaurus.server.errors import ApiError, EngineDied, NotFound, QueueFull, ServiceUnavailable, error_response
from tokasaurus.server.paths import PathMiddleware

FORWARDED = (
    *ALL_ENDPOINTS,
    *("/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/health", "/ready", "/ping", "/version"),
)
"""Paths that any replica answers alike. The others are of one server: its files, its page, its metrics, its weights."""
MAX_ATTEMPTS = 4
"""Replicas that may die over one request: it may be what kills them."""
_PAUSE_S = 0.25
"""Pause before the second attempt; each later one is twice as long. A replica that dies may be chosen again at
first."""
_MAX_BYTES_AT_ONCE = 1 << 18
"""Most bytes of a body that the event loop parses; longer ones are parsed in a thread."""

logger = logging.getLogger("ray.serve")


class _Lost(Exception):
    """The replica has died, before or within its answer."""


class Ingress:
    """An ASGI application. Every answer of a replica is passed on as it is."""

    def __init__(self, engine: Any) -> None:
        """engine: handle of the deployment of `EngineReplica`."""
        self._engine = engine.options(stream=True, method_name="answer")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except ApiError as error:
                await error_response(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything is sent."""
        request = await _read(scope, receive)
        if request is None:
            return
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
            watch = StreamWatch(scope["path"])
            has_begun = False
            try:
                async for message in self._messages(request, watch):
                    has_begun = True
                    await send(message)
                return
            except _Lost as lost:
                if has_begun:
                    events = watch.failure(EngineDied("the replica died while it answered"))
                    await send({"type": "http.response.body", "body": events})
                    return
                logger.warning(f"a replica died before it answered, and another one is asked: {lost}")
        raise EngineDied(f"{MAX_ATTEMPTS} replicas died while they answered")

    async def _messages(self, request: ForwardedRequest, watch: StreamWatch) -> AsyncIterator[Message]:
        """What to send; the first message comes with the first bytes of the body. Raises _Lost and ApiError."""
        parts = self._parts(request)
        start = await anext(parts)
        assert isinstance(start, AnswerStart)
        head: Message = {"type": "http.response.start", "status": start.status, "headers": list(start.headers)}
        if start.body is not None:
            yield head
            yield {"type": "http.response.body", "body": start.body}
            return
        is_first = True
        async for events in parts:
            if is_first:
                yield head
                is_first = False
            watch.note(events)
            yield {"type": "http.response.body", "body": events, "more_body": True}
        if is_first:
            yield head
        yield {"type": "http.response.body", "body": b""}

    async def _parts(self, request: ForwardedRequest) -> AsyncIterator[Any]:
        """The replica's answer. Raises _Lost and ApiError."""
        try:
            async for part in self._engine.remote(request):
                yield part
        except (RayActorError, EngineLost) as error:
            raise _Lost(str(error).partition("\n")[0]) from None
        except BackPressureError as error:
            raise QueueFull(str(error)) from None
        except DeploymentUnavailableError as error:
            raise ServiceUnavailable(str(error)) from None


async def _live(receive: Receive, send: Send) -> None:
    """Nothing is to be done at start and end."""
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _read(scope: Scope, receive: Receive) -> ForwardedRequest | None:
    """The whole request; None if the client has gone. Raises ApiError."""
    path = scope["path"]
    if not _is_forwarded(path):
        raise NotFound(
            f"{path} is not served through Ray Serve, where any replica answers: text is at POST /v1/chat/completions "
            "and the other routes of generation; for many rows, use Ray Data"
        )
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = b"".join(chunks)
    headers = dict(scope["headers"])
    prompt = None
    if path in ENDPOINTS:
        if len(body) > _MAX_BYTES_AT_ONCE:
            prompt = await asyncio.to_thread(routed_prompt, headers, body)
        else:
            prompt = routed_prompt(headers, body)
    query = scope["query_string"].decode("latin-1")
    target = quote(path)
    if query:
        target += f"?{query}"
    return ForwardedRequest(scope["method"], target, list(scope["headers"]), body, prompt)


def _is_forwarded(path: str) -> bool:
    return path in FORWARDED or path.startswith("/v1/models/")


def build_ingress(engine: Any) -> ASGIApp:
    """The application with what paths and errors need. engine: as for Ingress."""
    return PathMiddleware(MessagesErrorsMiddleware(Ingress(engine)), FORWARDED)
