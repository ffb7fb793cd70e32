"""The header X-Request-Id of every answer, by which a client and the logs of a proxy can name one request."""

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
_VALID = re.compile("[ -~]{1,200}")


def request_id_of(headers: Headers) -> str:
    """The client's own X-Request-Id if it is valid, 1 to 200 characters of printable ASCII; else a fresh one."""
    given = headers.get(_HEADER, "")
    return given if _VALID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


class RequestIdMiddleware:
    """Adds the request's id to the answer.

    Must be outside of all other middleware, since these answer errors themselves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (_HEADER.encode(), request_id_of(Headers(scope=scope)).encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)
