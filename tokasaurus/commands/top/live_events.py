"""The samples of a running server, over lost connections and restarts of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from tokasaurus.commands.top.samples import NotASample, Sample, read_sample
from tokasaurus.library.connection import Server, error_reason

_CONNECT_S = 10.0
_MAX_SILENCE_S = 15.0
"""Longest time without a byte of a server, which sends a sample once a second."""
_PAUSES_S = (0.5, 1.0, 2.0)
_MAX_EVENT_BYTES = 64 << 20
_MAY_PASS = (429, 500, 502, 503, 504)


class CannotWatch(Exception):
    """One line says why; trying again would not help."""


@dataclass(frozen=True, slots=True)
class Received:
    sample: Sample
    line: bytes
    """Its JSON, as the server has sent it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no connection; another one will be tried."""

    reason: str
    """What the server did."""
    why: str
    """The same in short, as the reason for having no figures."""


async def follow(server: Server, name: str) -> AsyncIterator[Received | Lost]:
    """Samples as they come, without end. name: of the server in messages. Raises CannotWatch if the server refuses, is
    none that has samples, or was not there at first."""
    num_failures = 0
    was_there = False
    while True:
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_MAX_SILENCE_S)
            headers = {"Accept": "text/event-stream"}
            async with server.http.get(f"{server.url}/live", headers=headers, timeout=timeout) as response:
                if response.status in _MAY_PASS:
                    reason = why = f"answered {response.status}: {error_reason(await response.read())}"
                else:
                    await _check(response, name)
                    async for data in _events(response.content):
                        num_failures = 0
                        yield Received(read_sample(data), data)
                    reason, why = "has ended the connection", "connection ended"
                was_there = True
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise CannotWatch(f"base_url={name}: no URL that can be used: {error}") from None
        except NotASample as error:
            raise CannotWatch(f"{name} has sent something else than a sample: {error}") from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            why = _explain(error)
            reason = f"does not answer: {why}"
            if not was_there:
                raise CannotWatch(f"{name} {reason}; is toka running?") from None
        except ValueError as error:  # a key that cannot be sent
            raise CannotWatch(f"{name}: {error}") from None
        yield Lost(reason, why)
        await asyncio.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
        num_failures += 1


async def _check(response: aiohttp.ClientResponse, name: str) -> None:
    """Raises CannotWatch if the answer is no stream of events."""
    if response.status in (401, 403):
        reason = error_reason(await response.read())
        raise CannotWatch(
            f"{name} answered {response.status}: {reason}; api_key=, or the variable TOKA_API_KEY, gives the key"
        )
    if response.status == 404:
        raise CannotWatch(f"{name} has no /live: it is an older toka, or another server")
    if response.status != 200:
        raise CannotWatch(f"{name} answered {response.status}: {error_reason(await response.read())}")
    if response.content_type != "text/event-stream":
        raise CannotWatch(f"{name} answered /live with {response.content_type}: it is another server")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    rest = bytearray()
    data: list[bytes] = []
    async for chunk in content.iter_any():
        rest += chunk
        *lines, last = rest.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(bytes(line[5:].removeprefix(b" ")))
            elif not line and data:
                yield b"\n".join(data)
                data = []
        rest = last
        if len(rest) + sum(map(len, data)) > _MAX_EVENT_BYTES:
            raise NotASample(f"an event of more than {_MAX_EVENT_BYTES >> 20} MiB")


def _explain(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"nothing within {_MAX_SILENCE_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno) if error.os_error.errno > 0 else error.os_error.strerror or str(error)
    return str(error) or type(error).__name__
