"""A real HTTP server on a free port, in front of a scripted engine."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from tests.helpers.flags import config_with
from tests.server.helpers.fake_engine import FakeEngine, hand_over
from tokasaurus.addresses import URL_OF_SOCKETS, bind, listening_at, socket_of, url_of
from tokasaurus.messages.status import FIRST_SERVER, Predecessors
from tokasaurus.server.access import allowed_hosts, read_api_keys
from tokasaurus.server.app import HttpServer, create_app, http_config
from tokasaurus.server.connections.table import ConnectionTable
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.limits import NO_LIMITS, QueueLimits
from tokasaurus.server.jobs.store.store import Store, open_store
from tokasaurus.server.served_model import ServedModel


@dataclass
class LiveServer:
    url: str
    engine: FakeEngine
    client: EngineClient
    http: httpx.Client
    store: Store | None = None
    """Its files and batches."""


class _Server(HttpServer):
    """Ends when it is told to, instead of a tenth of a second later: hundreds of tests have one of their own."""

    async def main_loop(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        counter = 0
        while not self._ended.is_set() and not await self.on_tick(counter):
            counter += 1
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 0.1)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)


@contextmanager
def http_server(app: ASGIApp, engine: EngineClient | None = None, **flags: Any) -> Iterator[str]:
    """Runs the server's own HTTP server in a thread; yields what `url_of` says. flags: of ServerConfig; with
    unix_socket, it has no port."""
    config = config_with(**flags)
    connections = ConnectionTable(config)
    server = _Server(http_config(app, connections), engine or EngineClient(socket.socketpair()[0]), connections)
    with bind("127.0.0.1", 0) if config.unix_socket is None else listening_at(Path(config.unix_socket)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = url_of(listener)
        try:
            while not server.started:
                assert thread.is_alive(), "the HTTP server did not start"
                time.sleep(0.01)
            yield url
        finally:
            server.end()
            thread.join(timeout=60)


@contextmanager
def live_server(
    model: ServedModel,
    engine: FakeEngine,
    start_engine: bool = True,
    api_key: str | None = None,
    queue_limits: QueueLimits = NO_LIMITS,
    data_dir: Path | None = None,
    store: Store | None = None,
    predecessors: Predecessors = FIRST_SERVER,
    **flags: Any,
) -> Iterator[LiveServer]:
    """data_dir, store: without either, the server has no files and batches. flags: of ServerConfig."""
    logged_model = model.name if flags.get("request_log") else None
    client = EngineClient(
        hand_over(engine), queue_limits=queue_limits, logged_model=logged_model, predecessors=predecessors
    )
    keys = read_api_keys(api_key, flags.get("api_keys_file"))
    hosts = flags.get("allowed_hosts")
    names = None if hosts is None else allowed_hosts("0.0.0.0", hosts)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    if start_engine:
        engine.start()
    with ExitStack() as stack:
        if data_dir is not None:
            store = stack.enter_context(open_store(data_dir, "a test"))
        app = create_app(model, client, keys, names, store, config=config_with(**flags))
        url = stack.enter_context(http_server(app, client, **flags))
        path = socket_of(url)
        transport = None if path is None else httpx.HTTPTransport(uds=path)
        base_url = url if path is None else URL_OF_SOCKETS
        # verify: the certificates that HTTP does not need take longer to read than the server to start
        http = stack.enter_context(
            httpx.Client(base_url=base_url, timeout=60, headers=headers, transport=transport, verify=False)
        )
        if start_engine:
            wait_until_ready(http)
        try:
            yield LiveServer(url, engine, client, http, store)
        finally:
            engine.stop()


def wait_until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, "the server is not ready after 60 s"
        time.sleep(0.01)


def wait_until_clean(server: LiveServer) -> None:
    deadline = time.monotonic() + 60
    while server.client.num_pending_requests > 0:
        assert time.monotonic() < deadline, "requests are still pending after 60 s"
        time.sleep(0.01)
