"""Who sends a request."""

import asyncio

import pytest
from fastapi import Request

from tests.server.helpers.prepared_requests import completion
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
