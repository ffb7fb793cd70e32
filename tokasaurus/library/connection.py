"""How a program reaches a server: a session of HTTP, and what is wrong in one line.

Imports little: commands that only watch a server need no bodies of requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import orjson

from tokasaurus.addresses import leads_here

_CONNECT_S = 30.0


class ServerError(Exception):
    """The server cannot be reached, is not a tokasaurus server, or refuses to serve this client. One line says why."""


class Server:
    """How a server is reached. Create and use it on one event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        socket_path: str | None = None,
        wait_until_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """base_url: with or without /v1. socket_path: of the Unix socket that is used in place of the URL's host.
        wait_until_up: waits, after a lost connection, until the server is there again; raises ServerError if it will
        not be. By default, connecting is tried again for `MAX_SILENCE_S`."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.wait_until_up = wait_until_up
        key = api_key if api_key is not None else os.environ.get("TOKA_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.UnixConnector(socket_path, limit=0) if socket_path else aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=socket_path is None and not leads_here(self.url),  # proxies
            read_bufsize=1 << 20,
        )

    async def find_model(self) -> str:
        """The name of the model that it serves. Raises ServerError."""
        try:
            async with self.http.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(_CONNECT_S)) as response:
                content = await response.read()
                if response.status != 200:
                    raise ServerError(f"{self.url} answered {response.status}: {error_reason(content)}")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise ServerError(
                f"no answer from {self.url}: {error or type(error).__name__}; is the server running?"
            ) from None
        except ValueError as error:
            raise ServerError(f"{self.url} is no URL that can be used: {error}") from None
        try:
            return str(orjson.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url} answered something else than a list of models") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that changes the server, however long it takes. Raises ServerError."""
        try:
            async with self.http.post(f"{self.url}{path}", json=body, timeout=aiohttp.ClientTimeout()) as response:
                content = await response.read()
                if response.status != 200:
                    raise ServerError(f"{self.url}{path} answered {response.status}: {error_reason(content)}")
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"no answer from {self.url}{path}: {error or type(error).__name__}") from None
        answer: dict[str, Any] = orjson.loads(content)
        return answer

    async def close(self) -> None:
        await self.http.close()


def error_reason(content: bytes) -> str:
    """Why the server has answered an error, in one line."""
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(content[:200].decode(errors="replace").split()) or "no reason"
