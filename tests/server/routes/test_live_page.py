"""GET /: the live page, its headers, and who gets it."""

import base64
import hashlib
import re

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.routes.pages import content_policy
from tokasaurus.server.served_model import ServedModel


def test_the_page_is_html_with_all_that_it_needs(shared_server: LiveServer) -> None:
    answer = shared_server.http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    text = answer.text
    assert text.lower().startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert re.findall(r"""<(?:script|img|iframe)[^>]*\ssrc\s*=|<link[^>]*\shref\s*=\s*(?!["']?data:)""", text) == []


def test_the_policy_allows_the_scripts_of_the_page_and_its_own_server_alone(shared_server: LiveServer) -> None:
    answer = shared_server.http.get("/")
    parts = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    scripts = [part.split("</script>")[0].split(">", 1)[1] for part in answer.text.split("<script")[1:]]
    assert scripts
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert parts["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert parts["default-src"] == parts["frame-ancestors"] == parts["base-uri"] == "'none'"
    assert parts["connect-src"] == "'self'"
    assert "http" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("tag", [b"<script>", b'<script type="module">', b"<SCRIPT\n>"])
def test_the_policy_has_the_digest_of_each_script(tag: bytes) -> None:
    digest = base64.b64encode(hashlib.sha256(b"\na < b;\n").digest()).decode()
    assert f"script-src 'sha256-{digest}';" in content_policy(b"<p>" + tag + b"\na < b;\n</script>")


def test_a_browser_that_has_the_page_asks_again_and_gets_nothing(shared_server: LiveServer) -> None:
    first = shared_server.http.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = shared_server.http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    other = shared_server.http.get("/", headers={"If-None-Match": '"another"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_head_has_the_headers_of_get_and_post_is_refused(shared_server: LiveServer) -> None:
    get, head = shared_server.http.get("/"), shared_server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == get.headers["etag"]
    assert shared_server.http.post("/").status_code == 405


def test_hosts_are_checked_before_the_page(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), allowed_hosts="a.example") as server:
        assert server.http.get("/", headers={"Host": "rebound.example"}).status_code == 421
        assert server.http.get("/", headers={"Host": "a.example"}).status_code == 200
