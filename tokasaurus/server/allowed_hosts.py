"""Which host names requests may be sent to: a web page must not reach a local server through a name of its own."""

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from tokasaurus.server.errors import MisdirectedRequest, error_response, shorten


def allowed_hosts(address: str, listed: str | None) -> frozenset[str] | None:
    """The names beside loopback addresses that requests may be sent to; None allows all.

    address: what the server listens on. listed: the flag, names separated by commas; * allows all.
    """
    names = frozenset(name.strip().lower() for name in (listed or "").split(",")) - {""}
    if "*" in names or (listed is None and not _is_loopback(address)):
        return None
    return names | {"localhost"}


class AllowedHostsMiddleware:
    """Answers 421 (misdirected request) to a request whose Host header is not allowed, or missing.

    DNS rebinding: a page whose name resolves to 127.0.0.1 could otherwise send requests to a server on its visitor's
    machine and read the answers. The browser sends the page's name as Host.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if hosts and all(self._is_allowed(host) for host in hosts):
            await self._app(scope, receive, send)
            return
        shown = repr(shorten(hosts[0])) if hosts else "missing"
        error = MisdirectedRequest(f"the Host header is {shown}, which this server does not serve (allowed_hosts)")
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = _without_port(host).lower()
        return name in self._names or _is_loopback(name)


def _without_port(host: str) -> str:
    """[::1]:80 -> ::1, localhost:80 -> localhost."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
