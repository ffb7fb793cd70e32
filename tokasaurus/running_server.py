"""A running server for commands that talk to one: flags of its address, a client, and one line for what goes wrong."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tokasaurus.addresses import URL_OF_SOCKETS, client_of_socket, leads_here, proxies_for, proxy_variable
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagConfig, flag

if TYPE_CHECKING:
    from openai import OpenAI

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
def client_of(config: AddressConfig) -> Iterator["OpenAI"]:
    """A client within the context; its calls need `explained`. Raises NotAnswered."""
    base_url = url_of_server(config)
    _check_that_it_listens(config, base_url)
    import openai

    with explained(config), proxies_for(base_url):
        client = openai.OpenAI(
            base_url=base_url,
            api_key=config.api_key or "none",  # the client requires one
            max_retries=0,
            timeout=None,  # an answer may take any time
            http_client=None if config.unix_socket is None else client_of_socket(config.unix_socket),
        )
    with client:
        yield client


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
    """Errors of the client within the context become NotAnswered."""
    import openai

    server = name_of_server(config)
    try:
        yield
    except NotAnswered:
        raise
    except openai.APIStatusError as error:
        raise NotAnswered(f"{server} answered {error.status_code}: {_reason(error)}") from None
    except openai.APIConnectionError as error:
        proxy = proxy_variable(url_of_server(config))
        route = server if proxy is None else f"{server} through the proxy of {proxy}"
        raise NotAnswered(f"no answer from {route}: {error.__cause__ or error}; is toka running?") from None
    except Exception as error:  # the client raises various errors for an invalid host or key
        raise NotAnswered(f"{server}: {' '.join(str(error).split())}") from None


def _reason(error: Any) -> str:
    """The server's error message, else the start of its response body, in one line."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(message or error.response.text or error.response.reason_phrase).split())[:300]
