"""Addresses: the socket that the server listens on, which URLs lead to this machine, and the proxies for the others."""

import errno
import fcntl
import importlib.util
import ipaddress
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokasaurus.messages.status import UserError

MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path of a Unix socket's file, in bytes: the size of sun_path, less its final zero."""

URL_OF_SOCKETS = "http://localhost"
"""URL for clients of a Unix socket: it leads to this machine, and none looks the host up."""
_UNIX = "unix:"
# Hosts that stand for all interfaces -> where this machine reaches them.
_SAME_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
# Longest wait for a part of an answer of whoever has the port, and the most that is read of it.
_ASK_S = 1.0
_MAX_ASKED_BYTES = 1 << 20
# Longest wait for others that look at the same directory: each of them needs milliseconds.
_LOCK_S = 1.0


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
        found = who_serves(host, port) if error.errno == errno.EADDRINUSE else ""
        raise UserError(
            f"port={port}: cannot listen on {host}: {error.strerror}{found}; choose another port="
        ) from None
    return listener


def who_serves(host: str, port: int) -> str:
    """` (by …)` with the server that answers HTTP there, by its /v1/models and /version; "" if none does at once."""
    import http.client

    def get(path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_SAME_HOST.get(host, host), port, timeout=_ASK_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ASKED_BYTES)
        finally:
            connection.close()

    try:
        status, models = get("/v1/models")
        if status in (401, 403):
            return " (by a server that asks for an API key)"
        model = _text_at(models, "data", 0, "id") if status == 200 else ""
        if not model:
            return " (by a server without an OpenAI API)"
        owner, version = _text_at(models, "data", 0, "owned_by"), _text_at(get("/version")[1], "version")
    except (OSError, http.client.HTTPException):
        return ""
    return f" (by {' '.join(filter(None, (owner or 'a server', version)))} with the model {model})"


def _text_at(content: bytes, *path: str | int) -> str:
    """The text at this place of a JSON value, fit for a line; "" if there is none."""
    try:
        value: Any = json.loads(content)
        for step in path:
            value = value[step]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return "".join(filter(str.isprintable, value))[:100] if isinstance(value, str) else ""


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket within the context; only this user can connect. Its file is removed at the end.

    A file that a killed server has left is replaced. Raises UserError, also if a process listens there."""
    flag = f"unix_socket={path}"
    path = path.absolute()
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        limit = f"the path of a socket, from / on, may have at most {MAX_SOCKET_PATH_BYTES} bytes"
        raise UserError(f"{flag}: {limit}, and this one has {num_bytes}")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _locked(path.parent):
            _remove_stale(path, flag)
            listener.bind(os.fspath(path))
            path.chmod(0o600)  # before it listens: nobody can have connected
            listener.listen()
            status = path.stat()
    except OSError as error:
        listener.close()
        raise UserError(f"{flag}: cannot listen there: {error.strerror or error}") from None
    except UserError:
        listener.close()
        raise
    try:
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            if os.path.samestat(path.stat(), status):  # else another server has replaced it
                path.unlink()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Servers that start at the same time look at a file of `directory` one after the other. If another program keeps
    its own lock of the directory, this goes on without. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path, flag: str) -> None:
    """Remove the file of a socket to which no process listens any more. Raises UserError and OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{flag}: exists, and is no socket")
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)  # a server whose queue is full is a live one, too
        if client.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
            raise UserError(f"{flag}: another process listens there")
    path.unlink()


def url_of(listener: socket.socket) -> str:
    """How to reach it: a URL, or `unix:` and the path of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"{_UNIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def socket_of(url: str) -> str | None:
    """The file of the Unix socket that `url_of` describes; None for a URL."""
    return url.removeprefix(_UNIX) if url.startswith(_UNIX) else None


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
    from urllib.request import proxy_bypass  # takes a tenth of a second to import

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
