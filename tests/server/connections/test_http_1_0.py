"""HTTP/1.0: its clients know no chunks, so an answer of unknown length ends where the connection does."""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tests.server.helpers.raw_http import connect, parse_answers, read_all
from tokasaurus.server.served_model import ServedModel

LINES = b"".join(
    orjson.dumps({"custom_id": str(number), "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)}) + b"\n"
    for number in range(20)
)


@pytest.fixture(scope="module")
def stored(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def ask(
    server: LiveServer, version: str, method: str, path: str, content: bytes, more: str = ""
) -> tuple[bytes, bytes]:
    """(head, body) of the answer, as they are on the wire until the server closes the connection."""
    end = "" if version == "1.0" else "Connection: close\r\n"
    head = f"{method} {path} HTTP/{version}\r\nHost: x\r\n{end}{more}Content-Length: {len(content)}\r\n\r\n"
    with connect(server.url) as connection:
        connection.sendall(head.encode() + content)
        received = read_all(connection)
    answered, _, body = received.partition(b"\r\n\r\n")
    return answered.lower(), body


@pytest.mark.parametrize("more", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_stream_has_no_chunks_and_ends_with_the_connection(stored: LiveServer, route: str, more: str) -> None:
    content = orjson.dumps(minimal_body(route) | {"stream": True, "seed": 1, "stream_options": {"include_usage": True}})
    head, body = ask(stored, "1.0", "POST", route, content, more)
    assert head.startswith(b"http/1.1 200")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    (answer,) = parse_answers(b"".join(ask_whole(stored, route, content)))
    expected = [orjson.loads(event.removeprefix(b"data: ")) for event in answer.body.split(b"\n\n")[:-2]]
    same = ("choices", "usage")
    assert [[chunk[name] for name in same] for chunk in chunks] == [[one[name] for name in same] for one in expected]


def ask_whole(server: LiveServer, route: str, content: bytes) -> tuple[bytes, bytes, bytes]:
    head, body = ask(server, "1.1", "POST", route, content)
    return head, b"\r\n\r\n", body


def test_bulk_results_have_no_chunks(stored: LiveServer) -> None:
    head, body = ask(stored, "1.0", "POST", "/v1/bulk", LINES)
    assert b"transfer-encoding" not in head
    assert sorted(int(orjson.loads(line)["custom_id"]) for line in body.splitlines()) == list(range(20))


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", COMPLETIONS, orjson.dumps(minimal_body(COMPLETIONS))),
        ("GET", "/v1/models", b""),
        ("HEAD", "/v1/models", b""),
        ("GET", "/nowhere", b""),
        ("POST", COMPLETIONS, b"{"),
    ],
)
def test_answers_of_known_length_say_it(stored: LiveServer, method: str, path: str, content: bytes) -> None:
    head, body = ask(stored, "1.0", method, path, content)
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert length > 0
    assert len(body) == (0 if method == "HEAD" else length)
    assert b"transfer-encoding" not in head


def test_a_file_is_downloaded_whole(stored: LiveServer, tmp_path: Path) -> None:
    content = bytes(range(256)) * 2000
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb") as file:
        uploaded = stored.http.post("/v1/files", files={"file": file}, data={"purpose": "batch"}).json()
    assert ask(stored, "1.0", "GET", f"/v1/files/{uploaded['id']}/content", b"")[1] == content


def test_a_client_that_leaves_in_a_stream_cancels_it(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine()) as server:
        server.engine.script = lambda *_: None
        content = orjson.dumps(minimal_body(CHAT) | {"stream": True})
        with connect(server.url) as connection:
            head = f"POST {CHAT} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            server.engine.wait_until(lambda engine: len(engine.requests) == 1)
        wait_until_clean(server)
