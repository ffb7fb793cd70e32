"""Which host names requests may be sent to: a web page must not reach a local server through a name of its own."""

import ipaddress
import re
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from tokasaurus.server.errors import MisdirectedRequest, error_response, shorten

# A port may be empty. A zone, such as eth0, follows the address after a percent sign.
_NUMBER = "(?:0x[0-9a-f]*|[0-9]+)"
_IPV4 = re.compile(rf"({_NUMBER}(?:\.{_NUMBER}){{0,3}})\.?(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
_IPV6 = re.compile(r"\[([0-9a-f:.]+)(?:%[^\s\]]+)?\](?::[0-9]*)?", re.ASCII | re.IGNORECASE)
_BARE_IPV6 = re.compile(r"([0-9a-f:.]+)(?:%\S+)?", re.ASCII | re.IGNORECASE)


def allowed_hosts(address: str, listed: str | None) -> frozenset[str] | None:
    """The names that requests may be sent to, beside every address written as a number; None allows all.

    address: what the server listens on. listed: the flag, names separated by commas; * allows all.
    """
    names = frozenset(name.strip().lower() for name in (listed or "").split(",")) - {""}
    if "*" in names or (listed is None and not _is_loopback(address)):
        return None
    return names | {"localhost"}


class AllowedHostsMiddleware:
    """Answers 421 (misdirected request) to a request whose Host header is not allowed, or missing.

    DNS rebinding: a page whose name resolves to 127.0.0.1 could otherwise send requests to a server on its visitor's
    machine and read the answers. The browser sends the page's name as Host. No name server can change where an address
    leads that is written as a number, such as the 0.0.0.0 that a server prints or a container's address.
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
        error = MisdirectedRequest(
            f"the Host header is {shown}, which this server does not serve: it must be localhost, an address written "
            "as numbers, or a name in allowed_hosts"
        )
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = _without_port(host).lower()
        return name in self._names or is_address(host)


def _without_port(host: str) -> str:
    """localhost:80 -> localhost."""
    return host.partition(":")[0]


def is_address(host: str) -> bool:
    """Whether a Host header is an IP address, with or without a port: 127.0.0.1:80, [::1]:80.

    Of IPv4, all forms that resolvers and URLs have: 127.1, 0x7f000001, a dot at the end. No name ends in a number: each
    client reads such a host as an address, or not at all. Brackets may be missing, and a zone may follow the address,
    since no name has a colon or a percent sign.
    """
    try:
        if match := _IPV4.fullmatch(host):
            socket.inet_aton(match[1])
        elif match := _IPV6.fullmatch(host) or _BARE_IPV6.fullmatch(host):
            ipaddress.IPv6Address(match[1])
    except (OSError, ValueError):
        return False
    return match is not None


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
