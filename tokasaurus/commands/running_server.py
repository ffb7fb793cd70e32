"""A running server for commands that talk to one: flags of its address, a client, and one line for what goes wrong."""

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tokasaurus.addresses import URL_OF_SOCKETS, leads_here, proxies_for, proxy_variable
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagConfig, flag

if TYPE_CHECKING:
    import httpx

_PROBE_S = 1.0


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


class NotAnswered(Exception):
    """The server did not answer as asked. The message is one line."""


class Refused(NotAnswered):
    """The server answered with an error."""

    def __init__(self, message: str, code: str | None) -> None:
        """code: by which programs tell errors apart, if the server says one."""
        super().__init__(message)
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


@contextmanager
def client_of(config: AddressConfig) -> Iterator["httpx.Client"]:
    """A client within the context, for `models_of` and `stream_of`. Raises NotAnswered.

    Of httpx and not of openai, which takes a second to import."""
    base_url = url_of_server(config)
    _check_that_it_listens(config, base_url)
    import httpx

    with explained(config), proxies_for(base_url):
        client = httpx.Client(
            base_url=base_url,
            headers={"authorization": f"Bearer {config.api_key or 'none'}"},
            timeout=None,  # an answer may take any time
            follow_redirects=True,
            transport=None if config.unix_socket is None else httpx.HTTPTransport(uds=config.unix_socket),
        )
    with client:
        yield client


_NO_API = "no OpenAI-compatible API"


def models_of(client: "httpx.Client") -> list[dict[str, Any]]:
    """The models that the server lists. Raises Refused, NotAnswered, and httpx's errors, which `explained` tells."""
    response = client.get("models")
    _check_status(response)
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
        _check_status(response)
        for data in _events(response.iter_bytes()):
            if data == b"[DONE]":
                continue
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


def _events(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events. Not by httpx's lines, which end at U+2028, too: JSON may have that in a text."""
    rest, lines = b"", list[bytes]()
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line.removeprefix(b"data:").strip())
            elif not line and lines:
                yield b"\n".join(lines)
                lines.clear()
    if rest.startswith(b"data:"):  # some servers leave out the last line ends
        lines.append(rest.removeprefix(b"data:").strip())
    if lines:
        yield b"\n".join(lines)


def _check_status(response: "httpx.Response") -> None:
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
    raise Refused(f"answered {response.status_code}: {' '.join(reason.split())[:300]}", code)


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
