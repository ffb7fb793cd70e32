"""POST /v1/files: bodies as they arrive, and what is left of an upload that fails."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import connect, read_all
from tests.server.jobs.helpers.forms import FORM, PURPOSE, field_part, file_part, form, part
from tests.server.jobs.helpers.uploads import CONTENT, FILES, check_stored, post, stored_names, upload
from tokasaurus.server.jobs import files
from tokasaurus.server.routes.files import PART_BYTES
from tokasaurus.server.served_model import ServedModel

MAX_BYTES = 1_000_000


def running(served_model: ServedModel, directory: Path) -> AbstractContextManager[LiveServer]:
    """Bodies of other routes may have only 1,000 bytes."""
    limits = {"max_request_bytes": 1000, "max_body_bytes_in_all": 1000, "max_file_bytes": MAX_BYTES}
    return live_server(served_model, FakeEngine(), data_dir=directory, **limits)


@pytest.fixture
def server(served_model: ServedModel, tmp_path: Path) -> Iterator[LiveServer]:
    with running(served_model, tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def server_without_files(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """For uploads that leave nothing."""
    with running(served_model, tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, MAX_BYTES])
@pytest.mark.parametrize("is_file_first", [False, True])
def test_content_is_stored_byte_by_byte(server: LiveServer, size: int, is_file_first: bool) -> None:
    content = (b"\r\n--" + bytes(range(256)) * (MAX_BYTES // 256 + 1))[:size]
    parts = [file_part(content, "name.jsonl"), PURPOSE][:: 1 if is_file_first else -1]
    before = int(time.time())
    answer = post(server, form(*parts))
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert before <= file["created_at"] <= time.time()
    expected = {"object": "file", "bytes": size, "filename": "name.jsonl", "purpose": "batch", "status": "processed"}
    times = {"created_at": file["created_at"], "expires_at": file["created_at"] + 30 * 86_400}
    assert file == {"id": file["id"], **expected, **times}
    assert server.http.get(f"{FILES}/{file['id']}").json() == file
    download = server.http.get(f"{FILES}/{file['id']}/content")
    assert download.content == content
    assert download.headers["content-length"] == str(size)
    assert download.headers["content-type"] == "application/octet-stream"
    check_stored(server, [file["id"]])


def test_a_body_without_content_length_is_read_as_it_arrives(server: LiveServer) -> None:
    body = form(PURPOSE, file_part(CONTENT * 500))

    def parts() -> Iterator[bytes]:
        for start in range(0, len(body), 999):
            yield body[start : start + 999]

    file = post(server, parts()).json()
    assert server.http.get(f"{FILES}/{file['id']}/content").content == CONTENT * 500


def test_expires_after(server: LiveServer) -> None:
    fields = field_part("expires_after[anchor]", "created_at"), field_part("expires_after[seconds]", "7200")
    file = upload(server, CONTENT, *fields)
    assert file["expires_at"] == file["created_at"] + 7200


FILE = file_part(CONTENT)
ANCHOR = field_part("expires_after[anchor]", "created_at")
NOT_CLOSED = form(PURPOSE, FILE).removesuffix(b"--\r\n")
MALFORMED: dict[str, tuple[bytes, str, str | None]] = {
    "empty": (b"", "ends before the last boundary", None),
    "no parts": (form(), "file is required", "file"),
    "no file": (form(PURPOSE), "file is required", "file"),
    "two files": (form(PURPOSE, FILE, FILE), "two parts named file", "file"),
    "file is a field": (form(PURPOSE, field_part("file", "x")), "must be a file", "file"),
    "empty filename": (form(PURPOSE, file_part(CONTENT, "")), "must be a file", "file"),
    "long filename": (form(PURPOSE, file_part(CONTENT, "x" * 513)), "at most 512 characters", "file"),
    "control character": (form(PURPOSE, file_part(CONTENT, "a\x00b")), "printable", "file"),
    "no purpose": (form(FILE), "purpose is required", "purpose"),
    "two purposes": (form(PURPOSE, PURPOSE, FILE), "given twice", "purpose"),
    "other purpose": (form(field_part("purpose", "fine-tune"), FILE), "must be 'batch'", "purpose"),
    "other purpose at the end": (form(FILE, field_part("purpose", "vision")), "must be 'batch'", "purpose"),
    "long purpose": (form(field_part("purpose", "x" * 2000), FILE), "at most 1024 bytes", "purpose"),
    "unknown field": (form(PURPOSE, field_part("surprise", "1"), FILE), "unknown field 'surprise'", "surprise"),
    "unknown file": (form(PURPOSE, FILE, file_part(b"", name="b")), "unknown field 'b'", "b"),
    "several fields": (
        form(field_part("surprise", "1"), field_part("purpose", "vision"), FILE),
        "2 problems: (1) unknown field 'surprise'; (2) purpose must be 'batch', not 'vision': ",
        "surprise",
    ),
    "several at the end": (
        form(PURPOSE, PURPOSE, ANCHOR, field_part("expires_after[seconds]", "5")),
        "3 problems: (1) purpose is given twice; (2) file is required: the body has no part of this name; "
        "(3) expires_after.seconds must be at least 3600",
        "purpose",
    ),
    "very many": (form(*(field_part(f"z{number}", "1") for number in range(500))), "10 problems: ", "z0"),
    "only anchor": (form(PURPOSE, ANCHOR, FILE), "seconds is required", "expires_after.seconds"),
    "seconds": (form(PURPOSE, ANCHOR, field_part("expires_after[seconds]", "3599"), FILE), "3600", None),
    "words": (form(PURPOSE, ANCHOR, field_part("expires_after[seconds]", "an hour"), FILE), "whole number", None),
    "anchor": (form(PURPOSE, field_part("expires_after[anchor]", "now"), FILE), "created_at", None),
    "not closed": (NOT_CLOSED, "ends before the last boundary", None),
    "cut in the file": (NOT_CLOSED[:-30], "ends before the last boundary", None),
    "preamble": (b"hello" + form(PURPOSE, FILE), "not valid multipart/form-data", None),
    "other boundary": (form(PURPOSE, FILE).replace(b"b0undary", b"b1undary"), "not valid multipart/form-data", None),
    "no name": (form(part(b"x", "Content-Disposition: form-data\r\n")), "content-disposition", None),
    "no headers": (form(PURPOSE, part(b"x", "")), "content-disposition", None),
    "encoded part": (form(PURPOSE, part(b"eA==", "Content-Transfer-Encoding: base64\r\n")), "encoded", None),
    "JSON": (b'{"purpose": "batch"}', "not valid multipart/form-data", None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_refused_and_leaves_nothing(server_without_files: LiveServer, name: str) -> None:
    body, message, param = MALFORMED[name]
    answer = post(server_without_files, body)
    assert answer.status_code == 400
    error = assert_openai_error(answer.content)
    assert message in error["message"]
    assert param is None or error["param"] == param
    check_stored(server_without_files)


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content_type": "multipart/form-data"}, 400, "boundary"),
        ({"content_type": f"multipart/form-data; boundary={'x' * 300}"}, 400, "boundary"),
        ({"content_type": f'multipart/form-data; {";" * 5000} boundary="x"'}, 400, "4096"),
        ({"content_type": "application/json"}, 415, "must be multipart/form-data"),
        ({"Content-Encoding": "zstd"}, 415, "compressed"),
        ({"Content-Encoding": "gzip"}, 400, "not valid gzip"),
    ],
)
def test_wrong_headers_are_refused(
    server_without_files: LiveServer, headers: dict[str, str], status: int, message: str
) -> None:
    answer = post(server_without_files, form(PURPOSE, FILE), **headers)
    assert answer.status_code == status
    assert message in assert_openai_error(answer.content)["message"]
    check_stored(server_without_files)


def test_a_connection_can_be_used_again_after_a_refused_upload(server: LiveServer) -> None:
    """The rest of the body is read, so that clients that send it first get the answer."""
    for _ in range(3):
        body = form(field_part("purpose", "vision"), file_part(b"x" * (MAX_BYTES - 1)))
        assert post(server, body).status_code == 400
    assert upload(server)["bytes"] == len(CONTENT)


@pytest.mark.parametrize("num_more_bytes", [1, 300_000])
def test_a_file_above_the_limit_is_refused(server: LiveServer, num_more_bytes: int) -> None:
    body = form(PURPOSE, file_part(b"x" * (MAX_BYTES + num_more_bytes)))
    for sent in (body, iter([body[:500_000], body[500_000:]])):  # with and without content-length
        answer = post(server, sent)
        assert answer.status_code == 413
        assert "max_file_bytes" in assert_openai_error(answer.content)["message"]
        check_stored(server)


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_arrives(server: LiveServer) -> None:
    with connect(server.url) as connection:
        head = f"POST {FILES} HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM}\r\nContent-Length: {MAX_BYTES * 2}\r\n\r\n"
        connection.sendall(head.encode())
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_bytes", [0, 100, 400_000])
def test_a_client_that_goes_away_leaves_nothing(server: LiveServer, num_bytes: int) -> None:
    body = form(PURPOSE, file_part(b"x" * 500_000))
    with connect(server.url) as connection:
        head = f"POST {FILES} HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:num_bytes])
        if num_bytes > PART_BYTES:
            deadline = time.monotonic() + 60
            while not stored_names(server):  # it is being written
                assert time.monotonic() < deadline
                time.sleep(0.01)
    check_stored(server)


@pytest.mark.parametrize("size", [100, 3 * PART_BYTES])
def test_a_disk_that_is_full_while_the_content_is_written(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A small content reaches the device when it is committed, a large one before."""
    assert server.store is not None
    kept = {upload(server)["id"]}
    name = "file-full"
    with monkeypatch.context() as patch:
        patch.setattr(files, "new_file_id", lambda: name)
        server.store.data_dir.content_path(f"{name}.part").symlink_to("/dev/full")
        answer = post(server, form(PURPOSE, file_part(b"x" * size)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        assert "no space is left" in assert_openai_error(answer.content)["message"]
    check_stored(server, kept)
    assert upload(server)["bytes"] == len(CONTENT)


def test_a_disk_that_is_full_when_the_database_is_written(server: LiveServer) -> None:
    assert server.store is not None

    def limit_pages(most: int) -> None:
        server.store.database.submit(lambda connection: connection.pragma("max_page_count", most)).result()

    limit_pages(1)  # SQLite takes the present size instead, if that is more
    kept = set()
    answer = post(server, form(PURPOSE, file_part(CONTENT, "x" * 500)))
    while answer.status_code == 200:  # the last page has some space left
        kept.add(answer.json()["id"])
        assert len(kept) < 100
        answer = post(server, form(PURPOSE, file_part(CONTENT, "x" * 500)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    check_stored(server, kept)
    limit_pages(100_000)
    kept.add(upload(server)["id"])
    check_stored(server, kept)


def test_a_data_directory_that_disappears_is_an_error_and_not_a_crash(server: LiveServer, tmp_path: Path) -> None:
    file = upload(server)
    (tmp_path / "files").rename(tmp_path / "moved")
    for answer in (post(server, form(PURPOSE, FILE)), server.http.get(f"{FILES}/{file['id']}/content")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "storage_failed")
    (tmp_path / "moved").rename(tmp_path / "files")
    check_stored(server, [file["id"]])


def test_a_server_that_stops_refuses_what_is_arriving_and_keeps_nothing(
    served_model: ServedModel, tmp_path: Path
) -> None:
    body = form(PURPOSE, file_part(b"x" * 500_000))
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        connection = connect(server.url)
        head = f"POST {FILES} HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:400_000])
        deadline = time.monotonic() + 60
        while not stored_names(server):  # it is being written
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        assert read_all(connection).startswith(b"HTTP/1.1 503 ")
    assert list((tmp_path / "files").iterdir()) == []
