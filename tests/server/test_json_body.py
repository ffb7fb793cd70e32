"""Limits on request bodies: size, media type and JSON. Refusals are immediate."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import openai
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body, refused_quickly
from tests.server.helpers.fake_engine import FakeEngine, echo, never
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import connect, parse_answers, read_all
from tokasaurus.server.served_model import ServedModel

MAX_BYTES = 40_000


@pytest.fixture(scope="module")
def limited(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), max_request_bytes=MAX_BYTES) as server:
        yield server


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"model": "default", "prompt": "a", "temperature": NaN}',
        b'{"model": "default", "prompt": "a", "temperature": Infinity}',
        b'{"model": "default", "prompt": "a", "temperature": 1e999}',
        b'{"model": "default", "prompt": "a", "top_p": -1e999}',
        b'{"model": "default", "prompt": "\\ud800"}',
        b'{"model": "default", "prompt": "\xff"}',
        b'{"model": "default", "\\ud800": "a"}',
        b'{"model": "default", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "default", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": "default", "prompt": "a", "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
        b'{"model": "default", "prompt": "a", "' + b"x" * 100_000 + b'": 1}',
        b'{"model": "default", "prompt": "a", "stop": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "default", "prompt": "a"' + b"".join(b',"x%d":1' % number for number in range(100_000)) + b"}",
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_body_that_is_not_a_json_object_of_known_fields_returns_400(
    shared_server: LiveServer, route: str, content: bytes
) -> None:
    response = refused_quickly(shared_server, route, content)
    error = assert_openai_error(response.content)
    assert response.status_code == 400
    assert len(error["message"]) < 500


def padded_body(num_bytes: int) -> bytes:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    return body + b" " * (num_bytes - len(body))


@pytest.mark.parametrize("chunked", [False, True])
def test_body_is_limited_to_max_request_bytes(limited: LiveServer, chunked: bool) -> None:
    def post(num_bytes: int) -> tuple[int, bytes]:
        content = padded_body(num_bytes)
        chunks = (content[start : start + 1000] for start in range(0, num_bytes, 1000))
        response = limited.http.post(COMPLETIONS, content=chunks if chunked else content)
        return response.status_code, response.content

    assert post(MAX_BYTES)[0] == 200
    status, content = post(MAX_BYTES + 1)
    error = assert_openai_error(content)
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(MAX_BYTES) in error["message"]
    assert post(MAX_BYTES)[0] == 200
    limited.engine.requests.clear()


def test_openai_client_gets_413_for_a_body_of_many_megabytes(limited: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="default", prompt="a" * 20_000_000)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body_is_refused_before_all_of_it_arrives(limited: LiveServer, chunked: bool) -> None:
    """The server then closes the connection; otherwise it would have to read the rest of the body."""
    with socket.create_connection((urlsplit(limited.url).hostname, urlsplit(limited.url).port)) as connection:
        connection.settimeout(5)
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 10000000000"
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        if chunked:
            connection.sendall(b"a000\r\n" + b" " * 0xA000 + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert_openai_error(answer.partition(b"\r\n\r\n")[2])


def upload(num_bytes: int, num_sent: int) -> bytes:
    """The first bytes of a request with a body of `num_bytes`, of which `num_sent` are sent."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
    return head.encode() + padded_body(num_bytes)[:num_sent]


@pytest.mark.parametrize("max_request_bytes", [None, MAX_BYTES])
def test_bodies_being_received_are_limited_together(served_model: ServedModel, max_request_bytes: int | None) -> None:
    limits = {"max_request_bytes": max_request_bytes, "max_body_bytes_in_all": 2 * MAX_BYTES}
    with live_server(served_model, FakeEngine(), **limits) as server, ExitStack() as stack:
        slow = [stack.enter_context(connect(server.url)) for _ in range(3)]
        for connection in slow:
            connection.sendall(upload(MAX_BYTES, 30_000))
            time.sleep(0.2)
        (answer,) = parse_answers(read_all(slow[2]))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert assert_openai_error(answer.body)["code"] == "too_many_bodies"
        assert server.http.post(COMPLETIONS, content=padded_body(15_000)).status_code == 200
        slow[1].close()  # half received: its bytes no longer count
        assert wait_for_status(server, padded_body(MAX_BYTES), 200)
        slow[0].sendall(padded_body(MAX_BYTES)[30_000:])
        assert slow[0].recv(65536).startswith(b"HTTP/1.1 200")


def wait_for_status(server: LiveServer, content: bytes, status: int) -> bool:
    for _ in range(50):
        if server.http.post(COMPLETIONS, content=content).status_code == status:
            return True
        time.sleep(0.1)
    return False


def test_parsed_bodies_do_not_count_while_their_requests_run(served_model: ServedModel) -> None:
    limits = {"max_body_bytes_in_all": 2 * MAX_BYTES}
    with live_server(served_model, FakeEngine(), **limits) as server, ExitStack() as stack:
        server.engine.script = never
        for count in range(1, 6):
            stack.enter_context(connect(server.url)).sendall(upload(MAX_BYTES, MAX_BYTES))
            server.engine.wait_until(lambda engine, count=count: len(engine.requests) == count)
        server.engine.script = echo
        assert server.http.post(COMPLETIONS, content=padded_body(2 * MAX_BYTES)).status_code == 200


def test_body_larger_than_the_limit_of_all_is_413(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), max_request_bytes=None, max_body_bytes_in_all=MAX_BYTES) as server:
        response = server.http.post(COMPLETIONS, content=padded_body(MAX_BYTES + 1))
        assert response.status_code == 413
        assert f"at most {MAX_BYTES} bytes" in assert_openai_error(response.content)["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({"Content-Encoding": "identity"}, 200),
        ({"Content-Type": "text/plain"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 200),
        ({"Content-Type": ""}, 200),
        ({"Content-Type": "x" * 3000}, 200),
        ({"Content-Encoding": "br"}, 415),
        ({"Content-Encoding": "zstd"}, 415),
        ({"Content-Encoding": "gzip, gzip"}, 415),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, "/tokenize"])
def test_json_is_read_whatever_its_content_type(
    shared_server: LiveServer, route: str, headers: dict[str, str], status: int
) -> None:
    body = {"prompt": "a"} if route == "/tokenize" else minimal_body(route)
    response = shared_server.http.post(route, content=orjson.dumps(body), headers=headers)
    assert response.status_code == status
    if status == 415:
        error = assert_openai_error(response.content)
        assert error["code"] == "unsupported_media_type"
        assert headers["Content-Encoding"] in error["message"]
        assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("content_type", "content", "status"),
    [
        ("application/x-www-form-urlencoded", b"prompt=hello&max_tokens=2", 415),
        ("text/plain", b"hello", 415),
        ("multipart/form-data; boundary=x", b"--x--", 415),
        ("x" * 3000, b"hello", 415),
        ("text/plain", b'"hello"', 400),
        ("application/json", b"hello", 400),
        (None, b"hello", 400),
    ],
)
def test_what_is_no_json_is_refused_by_its_type(
    shared_server: LiveServer, content_type: str | None, content: bytes, status: int
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = shared_server.http.post(COMPLETIONS, content=content, headers=headers)
    error = assert_openai_error(response.content)
    assert response.status_code == status
    assert len(error["message"]) < 400
    if status == 415:
        assert (content_type or "")[:30] in error["message"]
