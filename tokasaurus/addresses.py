"""Addresses: the socket that the server listens on, which URLs lead to this machine, and the proxies for the others."""

import importlib.util
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tokasaurus.messages.status import UserError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"host={host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"port={port}: cannot listen on {host}: {error.strerror}; choose another port=") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def leads_here(url: str) -> bool:
    """Whether the URL's host is localhost, a loopback address, or the address of all interfaces (0.0.0.0, ::)."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".").partition("%")[0]
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        # Resolvers read short forms such as 127.1, which ip_address() does not.
        address = ipaddress.IPv6Address(host) if ":" in host else ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


@contextmanager
def proxies_for(url: str) -> Iterator[None]:
    """An HTTP client that is created within uses the environment's proxies, but none for a URL that leads to this
    machine. Raises UserError, which names the variable, if a proxy cannot be used."""
    if leads_here(url):
        with no_proxies():
            yield
    else:
        _check_proxies()
        yield


@contextmanager
def no_proxies() -> Iterator[None]:
    """An HTTP client that is created within uses no proxy, whatever the environment and the system say."""
    old = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    os.environ.update(dict.fromkeys(old, "*"))
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def proxy_variable(url: str) -> str | None:
    """Name of the environment variable with the proxy that a client uses for the URL; None if it uses none."""
    from urllib.request import proxy_bypass  # takes a tenth of a second

    proxies = _proxies()
    parts = urlsplit(url)
    if leads_here(url) or not proxies or proxy_bypass(parts.hostname or ""):
        return None
    return next((_variable(name) for name in (parts.scheme, "all") if name in proxies), None)


def _proxies() -> dict[str, str]:
    """Proxies of the environment that HTTP clients read, by scheme; "all" is for the schemes that are not there."""
    from urllib.request import getproxies_environment

    proxies = getproxies_environment()
    if "*" in [name.strip() for name in proxies.get("no", "").split(",")]:
        return {}
    return {scheme: proxies[scheme] for scheme in ("http", "https", "all") if scheme in proxies}


def _variable(scheme: str) -> str:
    name = f"{scheme}_proxy"
    return name if name in os.environ else name.upper()


def _check_proxies() -> None:
    """Raises UserError. It does not show the proxy's URL, which may contain a password."""
    for scheme, proxy in _proxies().items():
        reason = _why_unusable(proxy)
        if reason is not None:
            raise UserError(f"the environment variable {_variable(scheme)}: {reason}")


def _why_unusable(proxy: str) -> str | None:
    schemes = ("http", "https", "socks5", "socks5h")
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"no URL of a proxy: {error}"
    if parts.scheme not in schemes or not host:
        return f"no URL of a proxy, which is {', '.join(f'{scheme}://HOST:PORT' for scheme in schemes)}"
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio (pip install socksio); a server on this machine needs no proxy"
    return None
