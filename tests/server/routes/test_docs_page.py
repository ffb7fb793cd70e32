"""The page at /docs: it loads only files of this server, and every body that it offers to send is accepted."""

import dataclasses
import gzip
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.jobs.helpers.forms import batch_line
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.server.docs_page import ASSETS, read_asset
from tokasaurus.server.endpoints import POOLING_ENDPOINTS
from tokasaurus.server.routes.pages import content_policy
from tokasaurus.server.served_model import ServedModel


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = dataclasses.replace(served_model, rl=True)
    with live_server(model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def test_the_page_loads_only_files_of_this_server(server: LiveServer) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert sorted(sources) == sorted(["data:,", *(f"/docs/{name}" for name in ASSETS)])
    assert "http" not in page.text
    policy = page.headers["content-security-policy"]
    assert policy == content_policy(page.content, "'self'", "'self' 'unsafe-inline'")
    assert re.search(r"script-src 'self' 'sha256-[^']+';", policy)
    for name, kind in ASSETS.items():
        for encoding in ("gzip", "identity"):
            answer = server.http.get(f"/docs/{name}", headers={"Accept-Encoding": encoding})
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers.get("content-encoding") == ("gzip" if encoding == "gzip" else None)
            assert answer.content == gzip.decompress(read_asset(name, compressed=True))
    assert b"SwaggerUIBundle" in read_asset("swagger-ui-bundle.js", compressed=False)
    assert server.http.get("/docs/other.js").status_code == 404
    assert server.http.get("/redoc").status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/docs/swagger-ui.css"])
def test_a_copy_that_the_browser_has_is_not_sent_again(server: LiveServer, path: str) -> None:
    first = server.http.get(path)
    again = server.http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def bodies_on_page(server: LiveServer) -> dict[str, tuple[str, Any]]:
    """Path → (content type, example) of each POST route whose body the page shows."""
    paths = server.http.get("/openapi.json").json()["paths"]
    found = {}
    for path, operations in paths.items():
        for kind, content in operations.get("post", {}).get("requestBody", {}).get("content", {}).items():
            found[path] = (kind, content.get("example"))
    return found


def test_every_body_that_the_page_offers_is_accepted(server: LiveServer) -> None:
    offered = bodies_on_page(server)
    for path, (kind, shown) in offered.items():
        if shown is None:
            continue
        if path == "/v1/batches":  # a file that exists
            shown = shown | {"input_file_id": upload(server, batch_line("1", url=shown["endpoint"]))["id"]}
        content = {"content": shown} if isinstance(shown, str) else {"json": shown}
        answer = server.http.post(path, headers={"Content-Type": kind}, **content)
        if path in POOLING_ENDPOINTS:  # the body is right, and the model another one's
            assert answer.json()["error"]["code"] == "wrong_task"
            continue
        assert answer.status_code == 200, (path, answer.text)
        if path == "/v1/bulk":
            assert answer.json()["response"]["status_code"] == 200
    without = {path for path, (_, example) in offered.items() if example is None}
    assert without.isdisjoint({"/tokenize", "/detokenize", "/generate", "/inference/v1/generate"})
    # of files, and of the commands of a trainer, whose directories no example can name
    assert {path for path in without if path.startswith("/v1/") and "lora" not in path} == {"/v1/files"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics", "/", "/docs", "/v1/models"])
def test_head_is_answered_as_get_without_the_body(server: LiveServer, path: str) -> None:
    whole, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":  # whose numbers change
        assert head.headers["content-length"] == whole.headers["content-length"]
