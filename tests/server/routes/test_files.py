"""/v1/files: lists, downloads, deletion, and ids that are unknown."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.jobs.helpers.forms import PURPOSE, file_part, form
from tests.server.jobs.helpers.uploads import CONTENT, FILES, check_stored, post, upload
from tokasaurus.server.served_model import ServedModel


@pytest.fixture
def server(served_model: ServedModel, tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        yield server


def test_content_that_was_cut_off_is_not_sent(server: LiveServer) -> None:
    assert server.store is not None
    file = upload(server)
    server.store.data_dir.content_path(file["id"]).write_bytes(CONTENT[:-1])
    answer = server.http.get(f"{FILES}/{file['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "storage_failed")
    assert f"it has {len(CONTENT) - 1} bytes and should have {len(CONTENT)}" in answer.json()["error"]["message"]


def test_a_download_continues_while_the_file_is_deleted(server: LiveServer) -> None:
    """The file is larger than the buffers of the connection, which may grow to 36 MiB on Linux."""
    content = bytes(range(256)) * (64 << 12)
    file = upload(server, content)
    with server.http.stream("GET", f"{FILES}/{file['id']}/content") as download:
        parts = download.iter_raw()
        begun = next(parts)
        deleted = server.http.delete(f"{FILES}/{file['id']}")
        assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
        check_stored(server)
        assert begun + b"".join(parts) == content


def test_a_download_that_is_given_up_closes_the_file(server: LiveServer, tmp_path: Path) -> None:
    file = upload(server, b"x" * (64 << 20))
    with server.http.stream("GET", f"{FILES}/{file['id']}/content") as download:
        parts = download.iter_raw()  # kept: httpx closes the connection when the iterator is gone
        next(parts)
        assert open_files(tmp_path) == 1
    deadline = time.monotonic() + 60
    while open_files(tmp_path) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_files(data_dir: Path) -> int:
    """How many contents of files this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(link.readlink())
    return sum(target.parent == data_dir / "files" for target in targets)


def test_pages_join_to_the_whole_list(server: LiveServer) -> None:
    ids = [upload(server)["id"] for _ in range(7)]
    assert server.http.get(FILES, params={"order": "asc"}).json() == {
        "object": "list",
        "data": [server.http.get(f"{FILES}/{file_id}").json() for file_id in ids],
        "has_more": False,
        "first_id": ids[0],
        "last_id": ids[-1],
    }
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        for limit in (1, 3, 7, 8):
            seen: list[str] = []
            has_more = True
            while has_more:
                params = {"order": order, "limit": limit, "purpose": "batch"} | ({"after": seen[-1]} if seen else {})
                page = server.http.get(FILES, params=params).json()
                assert len(page["data"]) <= limit
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                seen += [file["id"] for file in page["data"]]
                has_more = page["has_more"]
            assert seen == expected
    empty = server.http.get(FILES, params={"purpose": "fine-tune"}).json()
    assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=10001", 400, "limit"),
        ("limit=x", 400, "limit"),
        ("order=up", 400, "order"),
        ("surprise=1", 400, "surprise"),
        ("after=file-x", 404, "after"),
    ],
)
def test_a_wrong_query_is_refused(shared_server: LiveServer, query: str, status: int, param: str) -> None:
    answer = shared_server.http.get(f"{FILES}?{query}")
    assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (status, param)


@pytest.mark.parametrize("file_id", ["file-x", "%00", "é", "x" * 1000, "..%2F..%2Fdatabase.sqlite", "lock"])
def test_an_unknown_file_is_not_found(shared_server: LiveServer, file_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = shared_server.http.request(method, f"{FILES}/{file_id}{path}")
        assert answer.status_code == 404
        assert len(assert_openai_error(answer.content)["message"]) < 300


def test_a_server_without_a_data_dir_says_so(server_without_data_dir: LiveServer) -> None:
    http = server_without_data_dir.http
    asked = [("GET", FILES), ("GET", f"{FILES}/x"), ("GET", f"{FILES}/x/content"), ("DELETE", f"{FILES}/x")]
    asked += [("GET", "/v1/batches"), ("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel")]
    answers = [http.request(method, path) for method, path in asked]
    answers.append(post(server_without_data_dir, form(PURPOSE, file_part(CONTENT))))
    body = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}
    answers.append(http.post("/v1/batches", json=body))
    for answer in answers:
        assert (answer.status_code, assert_openai_error(answer.content)["code"]) == (501, "data_dir_missing")


@pytest.fixture(scope="module")
def server_without_data_dir(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine()) as server:
        yield server
