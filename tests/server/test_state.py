"""HEAD: the status and the headers of GET, without a body."""

from collections.abc import Iterator

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import connect, read_all
from tests.server.jobs.helpers.uploads import FILES, upload
from tokasaurus.server.served_model import ServedModel


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    data = tmp_path_factory.mktemp("data")
    with live_server(served_model, FakeEngine(), data_dir=data, allowed_hosts="llm.example") as server:
        yield server


def check_head(server: LiveServer, path: str, **headers: str) -> int:
    """The status, which GET has too, and the other headers that depend on the resource."""
    got = server.http.get(path, headers=headers)
    head = server.http.head(path, headers=headers)
    assert head.content == b""
    assert head.status_code == got.status_code
    changing = {"date", "x-request-id"}
    if path == "/metrics":  # its values change
        changing |= {"content-length"}
    assert {name: value for name, value in head.headers.items() if name not in changing} == {
        name: value for name, value in got.headers.items() if name not in changing
    }
    assert head.headers["x-request-id"]
    assert "content-length" in head.headers
    return head.status_code


def test_every_get_route_answers_head(server: LiveServer) -> None:
    page = server.http.get("/openapi.json").json()
    file_id = upload(server)["id"]
    paths = [path for path, operations in page["paths"].items() if "get" in operations]
    paths.remove("/live")  # whose answer to GET has no end: test_live.py
    assert len(paths) >= 12
    for path in [*paths, "/openapi.json", "/docs"]:
        filled = path.format(file_id=file_id, batch_id="x_none", name="default", response_id="x_none")
        assert check_head(server, filled) == (404 if "x_none" in filled else 200)
    assert not [path for path, operations in page["paths"].items() if "head" in operations]


@pytest.mark.parametrize("path", ["/nowhere", "/v1/completions", "/v1/models/other", "/v1/batches?limit=x"])
def test_errors_have_the_status_of_get(server: LiveServer, path: str) -> None:
    assert check_head(server, path) in (400, 404, 405)


def test_head_is_guarded_like_get(server: LiveServer, served_model: ServedModel) -> None:
    assert check_head(server, "/health", host="rebound.example") == 421
    with live_server(served_model, FakeEngine(), api_key="k") as guarded:
        assert check_head(guarded, "/v1/models", authorization="Bearer x") == 401
        assert check_head(guarded, "/v1/models") == 200


def test_no_byte_follows_the_headers(server: LiveServer) -> None:
    with connect(server.url) as connection:
        ask = b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(ask + b"\r\n" + ask + b"Connection: close\r\n\r\n")
        content = read_all(connection)
    first, second, rest = content.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert rest == b""


def test_the_content_of_a_file_is_not_read(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = upload(server, b"x" * (1 << 20))
    path = f"{FILES}/{file['id']}/content"
    assert check_head(server, path) == 200

    def read(*_: object) -> bytes:
        raise AssertionError("it is read")

    monkeypatch.setattr("tokasaurus.server.routes.files.run_blocking", read)
    assert server.http.head(path).headers["content-length"] == str(1 << 20)
