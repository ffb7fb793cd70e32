"""Web pages: a page of another site can use the server only if cors_origins allows it, and then in all ways."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import orjson
import pytest

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagError
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret-key"
PAGE, OTHER = "http://localhost:3000", "https://evil.example"
POSTED = {
    COMPLETIONS: orjson.dumps(minimal_body(COMPLETIONS)),
    "/v1/bulk": orjson.dumps({"custom_id": "1", "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)}),
    "/v1/files": b"",
    "/tokenize": b'{"prompt": "a"}',
    "/nowhere": b"",
}
# Those that a browser sends without asking, and one before which it asks.
TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None, "application/json")


@pytest.fixture(scope="module")
def opened(served_model: ServedModel) -> Iterator[LiveServer]:
    flags = {"cors_origins": f"{PAGE}, https://ui.example"}
    with live_server(served_model, FakeEngine(), api_key=KEY, allowed_hosts="a.example", **flags) as server:
        yield server


def post(server: LiveServer, path: str, content_type: str | None, **headers: str) -> httpx.Response:
    if content_type is not None:
        headers["Content-Type"] = content_type
    return server.http.post(path, content=POSTED[path], headers=headers)


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": OTHER},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": OTHER, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_what_pages_of_other_sites_send_is_refused(
    shared_server: LiveServer, path: str, content_type: str | None, headers: dict[str, str]
) -> None:
    num_requests = len(shared_server.engine.requests)
    answer = post(shared_server, path, content_type, **headers)
    error = assert_openai_error(answer.content)
    assert (answer.status_code, error["code"]) == (403, "cross_site_request")
    assert "cors_origins" in error["message"]
    assert "access-control-allow-origin" not in answer.headers
    assert len(shared_server.engine.requests) == num_requests
    if headers.get("Origin") not in (None, "null"):
        assert f"cors_origins={headers['Origin']}" in error["message"]


@pytest.mark.parametrize("content_type", TYPES)
def test_other_clients_and_pages_of_the_server_itself_are_served(
    shared_server: LiveServer, content_type: str | None
) -> None:
    host = shared_server.url.removeprefix("http://")
    for headers in (
        {},
        {"Origin": shared_server.url},
        {"Origin": f"https://{host}"},  # a proxy with TLS in front
        {"Origin": shared_server.url, "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://ui.example", "Sec-Fetch-Site": "same-origin"},  # a proxy that changes Host
        {"Sec-Fetch-Site": "none"},
    ):
        assert post(shared_server, COMPLETIONS, content_type, **headers).status_code == 200


def test_pages_of_other_sites_may_read_nothing_but_are_answered(shared_server: LiveServer) -> None:
    """A browser keeps the answer from the page; requests that change nothing are not refused."""
    answer = shared_server.http.get("/v1/models", headers={"Origin": OTHER, "Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/flush_cache", "//flush_cache/", "/v1/health_generate"])
def test_pages_of_other_sites_may_not_get_what_does_something(served_model: ServedModel, path: str) -> None:
    with live_server(replace(served_model, rl=True), FakeEngine()) as server:
        for headers, status in (({}, 200), ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Origin": OTHER}, 403)):
            assert httpx.get(f"{server.url}{path}", headers=headers).status_code == status


def preflight(server: LiveServer, path: str, origin: str, **headers: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(f"{server.url}{path}", headers={"Origin": origin, **asked, **headers})


@pytest.mark.parametrize("path", [CHAT, "//v1/chat/completions/", "/v1/files/x", "/nowhere"])
@pytest.mark.parametrize("origin", [PAGE, "https://ui.example"])
def test_a_browser_may_ask_without_the_key(opened: LiveServer, path: str, origin: str) -> None:
    answer = preflight(opened, path, origin)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in answer.headers
    private = preflight(opened, path, origin, **{"Access-Control-Request-Private-Network": "true"})
    assert private.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost:3001", "http://localhost:3000.evil.example"])
def test_a_browser_may_not_ask_for_other_pages(opened: LiveServer, origin: str) -> None:
    answer = preflight(opened, CHAT, origin)
    assert (answer.status_code, assert_openai_error(answer.content)["code"]) == (403, "cross_site_request")
    assert "access-control-allow-origin" not in answer.headers
    assert opened.http.post(CHAT, json=minimal_body(CHAT), headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "fields", "status"),
    [
        ("POST", CHAT, {"json": minimal_body(CHAT)}, 200),
        ("POST", CHAT, {"json": minimal_body(CHAT) | {"stream": True}}, 200),
        ("POST", COMPLETIONS, {"json": minimal_body(COMPLETIONS) | {"stream": True}}, 200),
        ("POST", "/v1/bulk", {"content": POSTED["/v1/bulk"]}, 200),
        ("GET", "/v1/models", {}, 200),
        ("HEAD", "/v1/models", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/docs", {}, 200),
        ("POST", CHAT, {"content": "{"}, 400),
        ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}, 401),
        ("POST", CHAT, {"json": minimal_body(CHAT) | {"model": "other"}}, 404),
        ("GET", "/v1/moderations", {}, 404),
        ("GET", CHAT, {}, 405),
        ("POST", CHAT, {"content": "{}", "headers": {"Content-Encoding": "br"}}, 415),
        ("GET", "/v1/models", {"headers": {"Host": "rebound.example"}}, 421),
        ("POST", COMPLETIONS, {"json": minimal_body(COMPLETIONS) | {"logprobs": 0}}, 500),
    ],
)
def test_every_answer_tells_the_browser_that_the_page_may_read_it(
    opened: LiveServer, method: str, path: str, fields: dict[str, object], status: int
) -> None:
    own = fields.get("headers", {})
    assert isinstance(own, dict)
    rest = {name: value for name, value in fields.items() if name != "headers"}
    headers = {"Connection": "close", "Origin": PAGE, "Sec-Fetch-Site": "cross-site", **own}
    if status == 500:
        opened.engine.script = lambda *_: Reply([97, IM_END])  # without the logprobs that are asked for
    answer = opened.http.request(method, path, headers=headers, **rest)  # type: ignore[arg-type]
    assert answer.status_code == status
    assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
    assert "Origin" in answer.headers["vary"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    plain = opened.http.request(method, path, headers={"Connection": "close", **own}, **rest)  # type: ignore[arg-type]
    assert plain.status_code == status
    assert "access-control-allow-origin" not in plain.headers


def test_a_star_allows_every_page(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), cors_origins="*") as server:
        for origin in (OTHER, PAGE, "null"):
            assert preflight(server, CHAT, origin).headers["access-control-allow-origin"] == "*"
            answer = post(server, COMPLETIONS, "text/plain", Origin=origin)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ("*", True),
        ("http://localhost:3000", True),
        ("http://localhost:3000,https://ui.example , null", True),
        ("app://obsidian.md,vscode-webview://x", True),
        ("http://[::1]:3000", True),
        ("localhost:3000", False),
        ("http://localhost:3000/", False),
        ("http://*.example", False),
        ("*,http://a.example", False),
        ("http://a.example http://b.example", False),
        (",", False),
    ],
)
def test_the_flag_takes_origins_as_browsers_write_them(value: str, is_valid: bool) -> None:
    if is_valid:
        assert ServerConfig.parse([f"cors_origins={value}"]).cors_origins == value
    else:
        with pytest.raises(FlagError, match="cors_origins"):
            ServerConfig.parse([f"cors_origins={value}"])
