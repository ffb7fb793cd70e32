"""A server in a process of its own, and another process that measures how fast it answers /health meanwhile."""

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from tests.helpers.small_model import make_served_model
from tests.server.helpers.fake_engine import FakeEngine, hand_over
from tests.server.helpers.live_server import wait_until_ready
from tokasaurus.config import ServerConfig
from tokasaurus.server.app import HttpServer, create_app, http_config
from tokasaurus.server.connections.table import ConnectionTable
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.jobs.store.store import open_store
from tokasaurus.server.resources import collect_garbage_when_idle

_SPAWN = multiprocessing.get_context("spawn")
PROBE_INTERVAL_S = 0.02


def _serve(directory: Path, data_dir: Path | None, launcher: socket.socket, ports: Connection) -> None:
    model = make_served_model(directory)
    engine = EngineClient(launcher)
    collect_garbage_when_idle(lambda: engine.num_pending_requests == 0)
    with ExitStack() as stack:
        store = None if data_dir is None else stack.enter_context(open_store(data_dir, "a test"))
        app = create_app(model, engine, store=store)
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        ports.send(listener.getsockname()[1])
        connections = ConnectionTable(ServerConfig())
        HttpServer(http_config(app, connections), engine, connections).run([listener])


@contextmanager
def server_process(directory: Path, engine: FakeEngine, data_dir: Path | None = None) -> Iterator[httpx.Client]:
    """The engine runs in this process. Yields a client of the server, which is ready.

    directory: of the tokenizer. data_dir: None for a server without files and batches."""
    reader, writer = _SPAWN.Pipe(duplex=False)
    arguments = (directory, data_dir, hand_over(engine), writer)
    process = _SPAWN.Process(target=_serve, args=arguments)
    process.start()
    try:
        assert reader.poll(60), "the server did not start"
        with httpx.Client(base_url=f"http://127.0.0.1:{reader.recv()}", timeout=120) as http:
            wait_until_up(http)
            engine.start()
            wait_until_ready(http)
            yield http
    finally:
        engine.stop()
        process.terminate()
        process.join(timeout=20)
        process.kill()


def wait_until_up(http: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            http.get("/health")
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)


@dataclass
class Health:
    """Seconds that each GET /health took."""

    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        median = statistics.median(self.seconds)
        return f"/health: median {1000 * median:.1f} ms, longest {1000 * max(self.seconds):.0f} ms"


def _probe(url: str, started: Event, stop: Event, results: Connection) -> None:
    async def ask() -> list[float]:
        seconds = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await http.get("/health")  # connects
            started.set()
            while not stop.is_set():
                began = time.perf_counter()
                assert (await http.get("/health")).status_code == 200
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(PROBE_INTERVAL_S)
        return seconds

    results.send(asyncio.run(ask()))


@contextmanager
def probing_health(http: httpx.Client) -> Iterator[Health]:
    """Within the context, another process asks for /health again and again; the result is filled at its end."""
    reader, writer = _SPAWN.Pipe(duplex=False)
    started, stop = _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=_probe, args=(str(http.base_url), started, stop, writer))
    process.start()
    assert started.wait(60), "the prober did not start"
    health = Health()
    try:
        yield health
    finally:
        stop.set()
        health.seconds = reader.recv() if reader.poll(60) else []
        process.join(timeout=10)
