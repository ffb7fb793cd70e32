"""Errors of /v1/messages in Anthropic's form, wherever in the server they are answered."""

import re
from typing import cast

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.server.protocol.messages import ERROR_DETAILS, error_type
from tokasaurus.text.json_lines import write_json

_ROUTE = "/v1/messages"
# Also with several slashes, and without /v1.
_URL = re.compile(rb"(?:https?://[^/]*)?(?:/+v1)*/+messages(?=[/?#]|$)")


def is_for_messages(url: bytes) -> bool:
    """Whether a request with this URL is for /v1/messages or a path below it, however that is written."""
    return _URL.match(url) is not None


def write_messages_error(status: int, message: str, param: str | None = None) -> bytes:
    """param: the field that the error is about."""
    error = {"type": error_type(status), "message": message}
    details = ERROR_DETAILS.get(param or "")
    return write_json({"type": "error", "error": error if details is None else error | {"details": details}})


class MessagesErrorsMiddleware:
    """Rewrites OpenAI's error object to Anthropic's in answers of /v1/messages and the paths below it.

    Must be outside of all that answers errors, and inside of what finds the path of the route. Errors within a stream
    are not its concern: their answer has status 200.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{_ROUTE}/"):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        content = b""

        async def rewrite(message: Message) -> None:
            nonlocal start, content
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None:
                await send(message)
                return
            content += message.get("body", b"")
            if not message.get("more_body", False):
                content = _rewritten(content, start)
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(content))
                await send(start)
                await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, rewrite)


def _rewritten(content: bytes, start: Message) -> bytes:
    """content: of the answer. It is returned as it is if it has no error object."""
    headers = Headers(raw=start["headers"])
    if not headers.get("content-type", "").startswith("application/json"):
        return content
    error = orjson.loads(content).get("error")
    if not isinstance(error, dict) or "message" not in error:
        return content
    return write_messages_error(cast(int, start["status"]), error["message"], error.get("param"))
