"""A real HTTP server on a free port, in front of a scripted engine."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE, save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tokasaurus.server.app import create_app
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


@dataclass
class LiveServer:
    url: str
    engine: FakeEngine
    client: EngineClient
    http: httpx.Client


@contextmanager
def http_server(app: FastAPI) -> Iterator[str]:
    """Runs uvicorn in a thread; gives the base URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the HTTP server did not start"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def served_model(tokenizer_directory: Path) -> ServedModel:
    return ServedModel(
        name="org/small",
        tokenizer=Tokenizer.load(tokenizer_directory),
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(EOS_IDS),
        created=1_700_000_000,
        system_fingerprint="fp_test",
        allow_logprobs=True,
        max_top_logprobs=20,
    )


@contextmanager
def live_server(
    model: ServedModel,
    engine: FakeEngine,
    start_engine: bool = True,
    api_key: str | None = None,
    max_request_bytes: int | None = None,
    max_queued_requests: int | None = None,
) -> Iterator[LiveServer]:
    client = EngineClient([engine.request_channel], [engine.update_channel], max_queued_requests=max_queued_requests)
    app = create_app(model, client, api_key, max_request_bytes)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    if start_engine:
        engine.start()
    with http_server(app) as url, httpx.Client(base_url=url, timeout=20, headers=headers) as http:
        if start_engine:
            wait_until_ready(http)
        try:
            yield LiveServer(url, engine, client, http)
        finally:
            engine.stop()


def wait_until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 10
    while http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, "never ready"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def shared_server(served_model: ServedModel) -> Iterator[LiveServer]:
    """One server for all tests that leave no trace: its engine echoes."""
    with live_server(served_model, FakeEngine()) as server:
        yield server


@pytest.fixture
def server(served_model: ServedModel) -> Iterator[LiveServer]:
    """A server of one's own: its engine may be given a script."""
    with live_server(served_model, FakeEngine()) as server:
        yield server
