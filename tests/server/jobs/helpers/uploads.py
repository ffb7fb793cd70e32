"""Files of a server, by plain HTTP."""

import time
from collections.abc import Collection, Iterator
from typing import Any

import httpx

from tests.server.helpers.live_server import LiveServer
from tests.server.jobs.helpers.forms import FORM, PURPOSE, batch_line, file_part, form

FILES = "/v1/files"
CONTENT = batch_line("1") + batch_line("2")


def post(server: LiveServer, body: bytes | Iterator[bytes], content_type: str = FORM, **headers: str) -> httpx.Response:
    return server.http.post(FILES, content=body, headers={"Content-Type": content_type, **headers})


def upload(server: LiveServer, content: bytes = CONTENT, *parts: bytes) -> dict[str, Any]:
    answer = post(server, form(PURPOSE, *parts, file_part(content)))
    assert answer.status_code == 200, answer.text
    file: dict[str, Any] = answer.json()
    return file


def stored_names(server: LiveServer) -> set[str]:
    assert server.store is not None
    return {path.name for path in (server.store.data_dir.root / "files").iterdir()}


def check_stored(server: LiveServer, ids: Collection[str] = ()) -> None:
    """Asserts that the server has just these files, and nothing of others."""
    deadline = time.monotonic() + 60  # a client that has gone does not see when the server notices
    while stored_names(server) != set(ids):
        assert time.monotonic() < deadline, stored_names(server)
        time.sleep(0.01)
    assert {file["id"] for file in server.http.get(FILES).json()["data"]} == set(ids)
