"""Who is let in, and with how large a body: refused before anything is read, parsed or tokenized."""

import http.client
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import orjson
import pytest

from tests.server.conftest import LiveServer, live_server
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret-key"
MAX_BYTES = 40_000
GET_ROUTES = ["/v1/models", "/v1/models/default", "/ready", "/ping", "/version", "/metrics", "/tokenizer_info"]
GET_ROUTES += ["/openapi.json", "/docs", "/nowhere"]


def ask(
    server: LiveServer, method: str, path: str, authorization: str | None, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Sends a header that ends in a space, as some clients do and httpx would not."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    connection.request(method, path, body if method == "POST" else None, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


@pytest.fixture(scope="module")
def guarded(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), api_key=KEY, max_request_bytes=MAX_BYTES) as server:
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
def test_without_the_key_every_route_but_health_is_a_401(guarded: LiveServer, header: str | None) -> None:
    routes = [("GET", path) for path in GET_ROUTES] + [("POST", path) for path in (COMPLETIONS, CHAT, "/tokenize")]
    for method, path in routes:
        response, content = ask(guarded, method, path, header, b"{")
        error = assert_openai_error(content)
        assert (response.status, error["code"]) == (401, "invalid_api_key"), path
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert KEY.encode() not in content
    assert ask(guarded, "GET", "/health", header)[0].status == 200


def test_with_the_key_it_answers(guarded: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    assert client.completions.create(model="default", prompt="hi", max_tokens=2).choices[0].text == "hi"
    guarded.engine.requests.clear()
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert ask(guarded, "GET", "/ready", f"bearer  {KEY} ")[0].status == 200


@pytest.mark.parametrize("header", ["Bearer ", "Bearer", "Bearer anything", "Basic x"])
def test_where_there_is_no_key_any_is_accepted(shared_server: LiveServer, header: str) -> None:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    assert ask(shared_server, "POST", COMPLETIONS, header, body)[0].status == 200


def padded_body(num_bytes: int) -> bytes:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    return body + b" " * (num_bytes - len(body))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_so_many_bytes_and_no_more(guarded: LiveServer, chunked: bool) -> None:
    def post(num_bytes: int) -> tuple[int, bytes]:
        content = padded_body(num_bytes)
        pieces = (content[start : start + 1000] for start in range(0, num_bytes, 1000))
        response = guarded.http.post(COMPLETIONS, content=pieces if chunked else content)
        return response.status_code, response.content

    assert post(MAX_BYTES)[0] == 200
    status, content = post(MAX_BYTES + 1)
    error = assert_openai_error(content)
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(MAX_BYTES) in error["message"]
    assert post(MAX_BYTES)[0] == 200
    guarded.engine.requests.clear()


def test_the_client_is_told_of_a_body_of_many_megabytes(guarded: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="default", prompt="a" * 20_000_000)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_what_is_too_large_is_answered_before_it_has_come(guarded: LiveServer, chunked: bool) -> None:
    """And the connection closed, or the rest would have to be read."""
    with socket.create_connection((urlsplit(guarded.url).hostname, urlsplit(guarded.url).port)) as connection:
        connection.settimeout(5)
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 10000000000"
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{length}\r\n\r\n".encode()
        )
        if chunked:
            connection.sendall(b"a000\r\n" + b" " * 0xA000 + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert_openai_error(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({"Content-Encoding": "identity"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "x" * 3000}, 415),
        ({"Content-Encoding": "gzip"}, 415),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_bodies_are_plain_json(shared_server: LiveServer, route: str, headers: dict[str, str], status: int) -> None:
    response = shared_server.http.post(route, content=orjson.dumps(minimal_body(route)), headers=headers)
    assert response.status_code == status
    if status == 415:
        error = assert_openai_error(response.content)
        assert error["code"] == "unsupported_media_type"
        assert len(error["message"]) < 300
