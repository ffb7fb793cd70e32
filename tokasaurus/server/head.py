"""HEAD, for every route that answers GET: monitors and download tools ask with it whether something is there."""

from starlette.types import ASGIApp, Receive, Scope, Send

_IS_HEAD = "toka_is_head"


class HeadMiddleware:
    """Answers HEAD like GET (RFC 9110, section 9.3.2). The HTTP server below sends no body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", _IS_HEAD: True}
        await self._app(scope, receive, send)


def is_head(scope: Scope) -> bool:
    """Whether the body of the answer is left out, so that it need not be read from a disk."""
    return _IS_HEAD in scope
