"""Paths as clients write them → the paths of routes."""

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")
_VERSION = "/v1"


def squeeze_slashes(path: str) -> str:
    """//v1//models/ -> /v1/models."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def paths_of(routes: Iterable[BaseRoute]) -> list[str]:
    """The paths of an application's routes, with names of parameters in braces."""
    return [route.path for route in routes if isinstance(route, Route)]


def methods_at(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods that an application's routes have for the path of a request, sorted."""
    there = (route for route in routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
    return sorted({method for route in there for method in route.methods or ()})


class PathMiddleware:
    """Gives each request the path of the route that its client means.

    A base URL may end in a slash, or have /v1 or not, and clients add theirs: several slashes count as one, the last
    one is dropped, and /v1 may be left out, be there twice, or precede a route without it. There is no redirect, after
    which many clients send no body. Must be outside of what checks paths, so that all of it sees the same path.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[str]) -> None:
        """routes: paths of all routes."""
        self._app = app
        known = [path.split("/") for path in routes]
        self._unversioned = {names[1] for names in known if names[1] != "v1"}
        """First names of the paths without /v1."""
        self._versioned = {names[2] for names in known if names[1] == "v1"} - self._unversioned
        """First names of the others, after /v1."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self._route(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _route(self, path: str) -> str:
        if not path.startswith("/"):  # OPTIONS has a *, for the whole server
            return path
        path = squeeze_slashes(path)
        while path.startswith(f"{_VERSION}{_VERSION}/"):
            path = path.removeprefix(_VERSION)
        _, first, *rest = path.split("/")
        if first in self._versioned:
            return _VERSION + path
        return path.removeprefix(_VERSION) if first == "v1" and rest and rest[0] in self._unversioned else path
