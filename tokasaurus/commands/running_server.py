"""A running server for commands that talk to one: flags of its address, a client, and one line for what goes wrong."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tokasaurus.addresses import URL_OF_SOCKETS, leads_here, no_proxies, proxies_for, proxy_variable
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagConfig, flag
from tokasaurus.messages.status import UserError

if TYPE_CHECKING:
    import httpx

_PROBE_S = 1.0
_MAX_EVENT_BYTES = 64 << 20


class AddressConfig(FlagConfig):
    """The flags of a server's address."""

    host: str = flag("127.0.0.1", "address of the server", heading="server")
    port: int = flag(ServerConfig.port, "TCP port of the server", minimum=1, maximum=65535)
    unix_socket: str | None = flag(None, "file of the server's Unix socket, replaces host and port")
    base_url: str | None = flag(None, "URL of any OpenAI-compatible API, replaces host and port")
    api_key: str | None = flag(
        None,
        "API key of the server",
        none_means="TOKA_API_KEY or OPENAI_API_KEY",
        variables=("TOKA_API_KEY", "OPENAI_API_KEY"),
        is_secret=True,
    )

    def further_errors(self) -> Iterator[str]:
        if self.unix_socket is not None and self.base_url is not None:
            yield f"unix_socket={self.unix_socket}: either it or base_url= names the server"


class NotAnswered(UserError):
    """The server did not answer as asked. The message is one line."""


class Refused(NotAnswered):
    """The server answered with an error."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        """status: of HTTP. code: by which programs tell errors apart, if the server says one."""
        super().__init__(message)
        self.status = status
        self.code = code


def url_of_server(config: AddressConfig) -> str:
    if config.base_url is not None:
        return config.base_url
    if config.unix_socket is not None:
        return f"{URL_OF_SOCKETS}/v1"
    host = f"[{config.host}]" if ":" in config.host else config.host  # IPv6
    return f"http://{host}:{config.port}/v1"


def name_of_server(config: AddressConfig) -> str:
    """The server's name for messages."""
    return url_of_server(config) if config.unix_socket is None else f"unix_socket={config.unix_socket}"


def http_client(
    base_url: str,
    api_key: str | None,
    unix_socket: str | None = None,
    is_local: bool = False,
    timeout_s: float | None = None,
) -> "httpx.Client":
    """A client for the paths below base_url. Raises NotAnswered, and various errors for a URL that cannot be used.

    unix_socket: replaces the URL's host. is_local: the server is on this machine, so that no proxy is used. timeout_s:
    longest time without a byte.
    Of httpx and not of openai, which takes a second to import."""
    import httpx

    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise NotAnswered("api_key: contains characters that cannot be sent, which are those outside of ASCII")
    with no_proxies() if is_local else proxies_for(base_url):
        return httpx.Client(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key or 'none'}"},
            timeout=timeout_s,
            follow_redirects=True,
            transport=None if unix_socket is None else httpx.HTTPTransport(uds=unix_socket),
        )


def status_of(url: str, path: str, timeout_s: float, unix_socket: str | None = None) -> int | None:
    """The HTTP status with which a server on this machine answers; None if it does not. unix_socket: as of
    `http_client`."""
    import httpx

    try:
        with http_client(url, None, unix_socket, is_local=True, timeout_s=timeout_s) as client:
            # A server may answer only to some hosts, but to this one.
            return client.get(path, headers={"host": "localhost"}).status_code
    except httpx.HTTPError:
        return None


@contextmanager
def client_of(config: AddressConfig) -> Iterator["httpx.Client"]:
    """A client within the context, for `models_of` and `stream_of`; an answer may take any time. Raises NotAnswered."""
    base_url = url_of_server(config)
    _check_that_it_listens(config, base_url)
    with explained(config):
        client = http_client(base_url, config.api_key, config.unix_socket)
    with client:
        yield client


_NO_API = "no OpenAI-compatible API"


def models_of(client: "httpx.Client") -> list[dict[str, Any]]:
    """The models that the server lists. Raises Refused, NotAnswered, and httpx's errors, which `explained` tells."""
    response = client.get("models")
    check_status(response)
    try:
        models = response.json()["data"]
    except (ValueError, LookupError, TypeError):
        raise NotAnswered(_NO_API) from None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise NotAnswered(_NO_API)
    return models


def stream_of(client: "httpx.Client", path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Chunks of the answer to a request with stream=true. Closing the iterator ends the request. Raises as `models_of`,
    also for an error within the stream."""
    has_chunk = False
    with client.stream("POST", path, json=body) as response:
        check_status(response)
        for data in events_of(response):
            try:
                chunk = json.loads(data)
            except ValueError:
                chunk = None
            if isinstance(chunk, dict) and chunk.get("error"):
                raise NotAnswered(_message_of(chunk) or data.decode())
            if not isinstance(chunk, dict) or "choices" not in chunk:
                raise NotAnswered("sent an event that is no chunk" if has_chunk else _NO_API)
            has_chunk = True
            yield chunk
    if not has_chunk:  # any page with status 200
        raise NotAnswered(_NO_API)


class EventReader:
    """The data of server-sent events, without the final [DONE], from bytes as they arrive.

    Lines end at a line feed alone, and not at U+2028, as httpx's do: JSON may have that in a text."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Events that are whole now. Raises NotAnswered for one that is too large."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise NotAnswered(f"sent an event of more than {_MAX_EVENT_BYTES >> 20} MiB")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[5:].strip())
            elif self._lines and line in (b"", b"\r"):
                data = b"\n".join(self._lines)
                self._lines.clear()
                if data and data != b"[DONE]":
                    events.append(data)
        return events

    def end(self) -> list[bytes]:
        """The last event, whose line ends some servers leave out."""
        return self.feed(b"\n\n")


def events_of(response: "httpx.Response") -> Iterator[bytes]:
    """The data of a streamed answer's events, as they come. Raises NotAnswered and httpx's errors."""
    reader = EventReader()
    for part in response.iter_bytes():
        yield from reader.feed(part)
    yield from reader.end()


def check_status(response: "httpx.Response") -> None:
    """Raises Refused."""
    if response.is_success:
        return
    response.read()
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    reason = _message_of(body) or response.text or response.reason_phrase
    status = response.status_code
    raise Refused(f"answered {status}: {' '.join(reason.split())[:300]}", status, code)


def _message_of(body: Any) -> str:
    """The message of an error's body; "" if it has none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _check_that_it_listens(config: AddressConfig, base_url: str) -> None:
    """Raises NotAnswered if nobody listens at an address of this machine: at once, where a client's packages take half
    a second to import. What else is wrong, the client finds."""
    try:
        if config.unix_socket is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(config.unix_socket)
        elif leads_here(base_url):
            parts = urlsplit(base_url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with socket.create_connection((parts.hostname, port), _PROBE_S):
                pass
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise NotAnswered(f"no answer from {name_of_server(config)}: {error}; is toka running?") from None
    except (OSError, ValueError):
        pass


@contextmanager
def explained(config: AddressConfig) -> Iterator[None]:
    """Errors of the client within the context become NotAnswered, with the server's name."""
    import httpx

    server = name_of_server(config)
    try:
        yield
    except Refused as error:
        raise NotAnswered(f"{server} {error}") from None
    except NotAnswered as error:
        raise NotAnswered(f"{server}: {error}") from None
    except httpx.TransportError as error:
        proxy = proxy_variable(url_of_server(config))
        route = server if proxy is None else f"{server} through the proxy of {proxy}"
        raise NotAnswered(f"no answer from {route}: {error}; is toka running?") from None
    except Exception as error:  # the client raises various errors for an invalid host or key
        raise NotAnswered(f"{server}: {' '.join(str(error).split())}") from None
