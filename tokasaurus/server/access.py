"""Who may send a request, and who does: API keys, host names, web pages, request ids, and the client's name."""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.config import ORIGIN
from tokasaurus.flags import split_list
from tokasaurus.messages.status import UserError
from tokasaurus.random_ids import random_id
from tokasaurus.server.docs_page import ASSETS
from tokasaurus.server.errors import CrossSite, MisdirectedRequest, WrongApiKey, error_response, shorten

# Load balancers check the first two without the key. The pages ask their reader for one.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/docs", *(f"/docs/{name}" for name in ASSETS)})
_KEY = re.compile("[!-~]+")
KEY_HEADERS = ("authorization", "api-key", "x-api-key")
"""Where clients send a key: the first is OpenAI's, as `Bearer KEY`, the others are Azure's and Anthropic's."""

# A port may be empty. A zone, such as eth0, follows the address after a percent sign.
_NUMBER = "(?:0x[0-9a-f]*|[0-9]+)"
_IPV4 = re.compile(rf"({_NUMBER}(?:\.{_NUMBER}){{0,3}})\.?(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
_IPV6 = re.compile(r"\[([0-9a-f:.]+)(?:%[^\s\]]+)?\](?::[0-9]*)?", re.ASCII | re.IGNORECASE)
_MAX_NAME_CHARS = 253
_HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.ASCII)
_BARE_IPV6 = re.compile(r"([0-9a-f:.]+)(?:%\S+)?", re.ASCII | re.IGNORECASE)

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_GETS_WITH_EFFECT = frozenset({"/flush_cache", "/health_generate"})  # SGLang's, with rl=T
_CLIENT_ID = "client_id"
# Salt of the request that runs in this context: a context variable, since each line of a bulk request runs in its own
# task.
_key_salt: ContextVar[str] = ContextVar("key_salt", default="")

_REQUEST_ID_HEADER = "x-request-id"
_VALID_REQUEST_ID = re.compile("[ -~]{1,200}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    """Identifies the key in the server."""
    digest: bytes
    """SHA-256 of the key. A fixed length, so the time of a comparison does not depend on the key."""


def read_api_keys(api_key: str | None, keys_file: str | None) -> list[ApiKey]:
    """The key of the flag or environment, and the keys of a file. No keys: the server needs none.

    The file has a key per line, after a name and white space if wanted; # begins a comment line. Several keys may have
    one name: they belong to the same client. Raises UserError, which shows no key.
    """
    keys = [] if api_key is None else [_make_key(api_key, None)]
    if keys_file is not None:
        keys += _read_keys_file(keys_file)
    if len({key.digest for key in keys}) < len(keys):
        raise UserError("api_keys_file=, api_key= (or TOKA_API_KEY): one key is given twice")
    return keys


def _read_keys_file(path: str) -> list[ApiKey]:
    try:
        lines = expand_home("api_keys_file", path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"api_keys_file={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"api_keys_file={path}: must be text in UTF-8") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not _KEY.fullmatch(words[-1]):
            what = "a key, or a name and a key; keys are printable ASCII without spaces"
            raise UserError(f"api_keys_file={path}: line {number} must be {what}")
        keys.append(_make_key(words[-1], words[0] if len(words) == 2 else None))
    if not keys:
        raise UserError(f"api_keys_file={path}: has no key")
    return keys


def _make_key(key: str, name: str | None) -> ApiKey:
    digest = _digest(key.encode())
    return ApiKey(f"key-{digest.hex()[:12]}" if name is None else name, digest)


class ApiKeyMiddleware:
    """Answers 401, without reading the body, to requests without a key in one of KEY_HEADERS.

    Notes the client that a key belongs to. cache_salt_per_key: the flag.
    """

    def __init__(self, app: ASGIApp, keys: list[ApiKey], cache_salt_per_key: bool) -> None:
        self._app = app
        self._keys = keys
        self._salts = {
            key.name: _digest(b"salt:" + key.name.encode()).hex() if cache_salt_per_key else "" for key in keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        sent = _keys_in(Headers(scope=scope))
        key = self._find(sent)
        if key is not None:
            # With a single key, everybody has it: connections tell more about who asks.
            set_client(scope, key.name if len(self._salts) > 1 else None, self._salts[key.name])
            await self._app(scope, receive, send)
            return
        await error_response(WrongApiKey(_why_refused(sent)))(scope, receive, send)

    def _find(self, sent: Mapping[str, str | None]) -> ApiKey | None:
        found = None
        for key in sent.values():
            if key is None:
                continue
            digest = _digest(key.encode("latin-1"))
            for known in self._keys:  # all of them: the time does not tell which one matches
                if hmac.compare_digest(digest, known.digest):
                    found = known
        return found


def _keys_in(headers: Headers) -> dict[str, str | None]:
    """The key in each of KEY_HEADERS that the request has; None if the header has another form."""
    sent: dict[str, str | None] = {}
    for name in KEY_HEADERS:
        value = headers.get(name)
        if value is not None and name == "authorization":
            scheme, _, value = value.strip().partition(" ")
            sent[name] = value.strip() if scheme.lower() == "bearer" else None
        elif value is not None:
            sent[name] = value.strip()
    return {name: key or None for name, key in sent.items()}


def _why_refused(sent: Mapping[str, str | None]) -> str:
    """sent: as `_keys_in` returns it; no key among them is known."""
    names = [name for name, key in sent.items() if key is not None]
    if names:
        return f"the key in the header {' or '.join(names)} is not known to this server"
    if "authorization" in sent:
        return "Authorization must be 'Bearer KEY': the header has another form"
    if sent:
        return f"the header {next(iter(sent))} is empty: this server requires a key"
    others = " or ".join(KEY_HEADERS[1:])
    return f"this server requires a key in the header Authorization: Bearer KEY (or {others}), which is missing"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def allowed_hosts(address: str | None, listed: str | None) -> frozenset[str] | None:
    """The names that requests may be sent to, beside every address written as a number; None allows all.

    address: what the server listens on; None for a Unix socket, which no browser connects to. listed: the flag, names
    separated by commas; * allows all.
    """
    names = frozenset(map(_absolute, split_list(listed)))
    if "*" in names or (listed is None and (address is None or not _is_loopback(address))):
        return None
    return names | {"localhost"}


class AllowedHostsMiddleware:
    """Answers 421 (misdirected request) to a request whose Host header is not allowed.

    DNS rebinding: a page whose name resolves to 127.0.0.1 could otherwise send requests to a server on its visitor's
    machine and read the answers. The browser sends the page's name as Host, always: a request without Host, such as a
    load balancer's check in HTTP/1.0, comes from no page. No name server can change where an address
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
        refused = next((host for host in hosts if not self._is_allowed(host)), None)
        if refused is None:
            await self._app(scope, receive, send)
            return
        await error_response(MisdirectedRequest(self._why_refused(refused)))(scope, receive, send)

    def _why_refused(self, refused: str) -> str:
        allowed = "it must be localhost, an address written as numbers, or a name in allowed_hosts"
        name = _absolute(_without_port(refused))
        if len(name) <= _MAX_NAME_CHARS and _HOST_NAME.fullmatch(name):
            has_others = self._names > {"localhost"}  # which a stranger need not know
            allowed += f"; to serve it, start the server with allowed_hosts={'…,' if has_others else ''}{name}"
        return f"the Host header is {shorten(refused)!r}, which this server does not serve: {allowed}"

    def _is_allowed(self, host: str) -> bool:
        return _absolute(_without_port(host)) in self._names or is_address(host)


def _absolute(name: str) -> str:
    """Localhost. -> localhost: the dot says that no domain is added to a name, which is not done here anyway."""
    return name.lower().removesuffix(".")


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


class CrossSiteMiddleware:
    """Answers 403 to what a page of another site makes a browser send, unless `origins` lists the page.

    A browser keeps answers from such a page, but sends its requests all the same, without asking first if their body is
    said to be text or a form. Only methods that may change something are refused, and the browser's question before it
    sends them. Browsers say in Sec-Fetch-Site where a request comes from (a proxy changes Host, and not this header);
    older ones say it in Origin alone. Other clients send neither. Rules: Go's http.CrossOriginProtection.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        """origins: see `allowed_origins`."""
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            is_question = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            is_safe = scope["method"] in _SAFE_METHODS and scope["path"] not in _GETS_WITH_EFFECT
            if (is_question or not is_safe) and not self._is_allowed(headers):
                origin = headers.get("origin", "")
                is_site = origin != "null" and re.fullmatch(ORIGIN, origin)
                flag = f"cors_origins={shorten(origin)}" if is_site else "cors_origins"
                error = CrossSite(
                    f"the request comes from a web page of another site ({shorten(origin)!r}), which this server does "
                    f"not serve; to serve it, start the server with {flag}"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if "*" in self._origins or (origins and self._origins.issuperset(origins)):
            return True
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site in ("same-origin", "none")
        host = headers.get("host", "").lower()
        return all(origin.partition("://")[2].lower() == host for origin in origins)


def allowed_origins(listed: str | None) -> frozenset[str]:
    """Origins of the flag cors_origins, as browsers write them; * allows all."""
    return frozenset(origin.lower() for origin in split_list(listed))


def set_client(scope: Scope, client_id: str | None, key_salt: str = "") -> None:
    """Note who sends the request of `scope`, in whose task this must be called.

    client_id: None if the key does not tell. key_salt: separates cached prompts of different keys; "" shares them.
    """
    scope.setdefault("state", {})[_CLIENT_ID] = client_id
    _key_salt.set(key_salt)


def use_key_salt(salt: str) -> None:
    """For work in the task of this call that is done for an earlier request, see `key_salt`."""
    _key_salt.set(salt)


def key_salt() -> str:
    """What separates cached prompts of the key that sent the request of this task; "" if nothing does."""
    return _key_salt.get()


def client_of(request: Request) -> str:
    """The name of the request's API key; if there are not several, the address and port of its connection."""
    client_id = request.scope.get("state", {}).get(_CLIENT_ID)
    if client_id is not None:
        return cast(str, client_id)
    return "unknown" if request.client is None else f"{request.client.host}:{request.client.port}"


# vLLM's routers and SGLang's read one of these.
_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")


def session_of(request: Request) -> str:
    """The name of the client's session, such as one roll-out, whose requests begin alike; "" if it has none."""
    return next((name for header in _SESSION_HEADERS if (name := request.headers.get(header))), "")


def request_id_of(headers: Headers) -> str:
    """The client's own X-Request-Id if it is valid, 1 to 200 characters of printable ASCII; else a fresh one."""
    given = headers.get(_REQUEST_ID_HEADER, "")
    return given if _VALID_REQUEST_ID.fullmatch(given) else f"req_{random_id()}"


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
        header = (_REQUEST_ID_HEADER.encode(), request_id_of(Headers(scope=scope)).encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)
