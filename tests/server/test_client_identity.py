"""Who sends a request."""

import asyncio
import tempfile

import httpx
import pytest
from fastapi import Request

from tests.server.helpers.bodies_and_errors import COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tests.server.helpers.prepared_requests import completion
from tokasaurus.addresses import URL_OF_SOCKETS
from tokasaurus.server.access import client_of, set_client
from tokasaurus.server.served_model import ServedModel


@pytest.fixture
def scope() -> dict[str, object]:
    return {"type": "http", "headers": [], "client": ("10.1.2.3", 456)}


def test_client_is_its_key_or_else_its_connection(scope: dict[str, object]) -> None:
    assert client_of(Request(scope)) == "10.1.2.3:456"
    set_client(scope, "alice")
    assert client_of(Request(scope)) == "alice"
    assert client_of(Request({"type": "http", "headers": [], "client": None})) == "unknown"


def test_salt_belongs_to_the_task_that_set_it_and_to_its_children(
    scope: dict[str, object], served_model: ServedModel
) -> None:
    async def salt_in(client: str) -> str:
        set_client(dict(scope), client, client)
        await asyncio.sleep(0.01)

        async def line() -> str:
            (request,) = completion(served_model).requests
            return request.cache_salt

        return await asyncio.create_task(line())

    async def salts() -> list[str]:
        return await asyncio.gather(*(salt_in(client) for client in ("a", "b", "")))

    assert asyncio.run(salts()) == ["a:", "b:", ""]


def test_connections_to_a_unix_socket_are_clients_of_their_own(served_model: ServedModel) -> None:
    engine = FakeEngine()
    with (
        tempfile.TemporaryDirectory() as directory,
        live_server(served_model, engine, unix_socket=f"{directory}/socket"),
    ):
        for _ in range(2):
            transport = httpx.HTTPTransport(uds=f"{directory}/socket")
            with httpx.Client(transport=transport, base_url=URL_OF_SOCKETS, timeout=60) as client:
                for _ in range(2):
                    assert client.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 200
    first, second, third, fourth = (request.client for request in engine.requests)
    assert first == second
    assert third == fourth
    assert first != third
    assert first.startswith("unix:")
