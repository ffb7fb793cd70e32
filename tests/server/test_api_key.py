"""API key: every route except /health refuses a request without it, before parsing or tokenizing the body."""

import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret-key"
UNLISTED_ROUTES = [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nowhere")]


def ask(
    server: LiveServer, method: str, path: str, authorization: str | None, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Sends one request; http.client can send a header value that ends in a space, as some clients do; httpx cannot."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    connection.request(method, path, body if method == "POST" else None, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


@pytest.fixture(scope="module")
def guarded(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), api_key=KEY) as server:
        yield server


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        "Bearer é",
        "Bearer none",
    ],
)
def test_every_route_except_health_returns_401_without_the_key(guarded: LiveServer, header: str | None) -> None:
    paths = guarded.http.get("/openapi.json").json()["paths"]
    listed = [(method.upper(), path) for path, methods in paths.items() for method in methods if path != "/health"]
    assert ("POST", CHAT) in listed
    for method, path in listed + UNLISTED_ROUTES:
        response, content = ask(guarded, method, path, header, b"{")
        error = assert_openai_error(content)
        assert (response.status, error["code"]) == (401, "invalid_api_key"), path
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert KEY.encode() not in content
    assert ask(guarded, "GET", "/health", header)[0].status == 200


def test_server_answers_a_request_with_the_key(guarded: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    assert client.completions.create(model="default", prompt="hi", max_tokens=2).choices[0].text == "hi"
    guarded.engine.requests.clear()
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert ask(guarded, "GET", "/ready", f"bearer  {KEY} ")[0].status == 200


@pytest.mark.parametrize("header", ["Bearer ", "Bearer", "Bearer anything", "Basic x"])
def test_server_without_a_key_accepts_any_authorization_header(shared_server: LiveServer, header: str) -> None:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    assert ask(shared_server, "POST", COMPLETIONS, header, body)[0].status == 200
