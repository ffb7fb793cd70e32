"""What is told of every HTTP answer: counts by method, route and status, and the spans of a trace."""

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.monitoring.request_spans import RequestTracer, current_span

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"

AnswerCounts = dict[tuple[str, str, int], int]
"""Number of answers by method, path of the route with names of parameters in braces, and status. A method or path that
is none of the server's is `other`, so that no client can add without end."""

CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before the answer began."""


class Routes:
    """Finds the route of a path."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        found = [route for route in routes if isinstance(route, Route)]
        self._plain = {route.path for route in found if "{" not in route.path}
        self._patterns = [(route.path_regex, route.path_format) for route in found if "{" in route.path]

    def of(self, path: str) -> str:
        """The path of the route, with names of parameters in braces; `other` if there is none."""
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), _OTHER)


class AnswersMiddleware:
    """Must be outside of all that answers, and inside of what finds the path of the route.

    A HEAD that is answered like GET counts as one.
    """

    def __init__(self, app: ASGIApp, routes: Routes, counts: AnswerCounts) -> None:
        self._app = app
        self._routes = routes
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._note(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            if not has_started:
                self._note(scope, CLIENT_GONE)

    def _note(self, scope: Scope, status: int) -> None:
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        key = (method, self._routes.of(scope["path"]), status)
        self._counts[key] = self._counts.get(key, 0) + 1


class SpansMiddleware:
    """Traces requests of the method POST: the others are of monitoring, or small. To be placed as AnswersMiddleware."""

    def __init__(self, app: ASGIApp, routes: Routes, tracer: RequestTracer) -> None:
        self._app = app
        self._routes = routes
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = self._tracer.begin("POST", self._routes.of(scope["path"]), scope["headers"])
        status = CLIENT_GONE

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current_span.set(span)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            current_span.reset(token)
            span.end(status)
