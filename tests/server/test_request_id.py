"""Every answer has a request id: the client's own if it is valid, else a fresh one."""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret"
FRESH = re.compile("req_[0-9a-f]{32}")
LINE = json.dumps({"custom_id": "1", "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)})


@pytest.fixture(scope="module")
def guarded(served_model: ServedModel) -> Iterator[LiveServer]:
    # leaves out the logprobs that a request asks for, which is an internal error
    engine = FakeEngine(script=lambda _request, _index: Reply([1, 2], None))
    with live_server(served_model, engine, api_key=KEY, max_request_bytes=1000) as server:
        yield server


PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-", RESPONSES: "resp_", "/v1/messages": "msg_"}


@pytest.mark.parametrize("route", PREFIXES)
@pytest.mark.parametrize("streams", [False, True])
def test_the_bodys_request_id_is_in_the_answers_id_and_the_header_names_the_http_request(
    shared_server: LiveServer, route: str, streams: bool
) -> None:
    for fields, expected in (({"request_id": "mine"}, f"{PREFIXES[route]}mine"), ({"rid": "all mine"}, "all mine")):
        body = minimal_body(route) | fields | {"stream": streams}
        answer = shared_server.http.post(route, json=body, headers={"X-Request-Id": "http"})
        assert answer.headers["x-request-id"] == "http"
        assert FRESH.fullmatch(shared_server.http.post(route, json=body).headers["x-request-id"])
        assert f'"id":"{expected}"' in answer.text
        line = json.dumps({"custom_id": "1", "url": route, "body": body | {"stream": False}})
        result = shared_server.http.post("/v1/bulk", content=line).json()
        assert result["response"]["body"]["id"] == expected


@pytest.mark.parametrize(
    ("method", "path", "fields", "status"),
    [
        ("GET", "/health", {}, 200),
        ("GET", "/metrics", {}, 200),
        ("GET", "/docs", {}, 200),
        ("POST", COMPLETIONS, {"json": minimal_body(COMPLETIONS)}, 200),
        ("POST", CHAT, {"json": minimal_body(CHAT)}, 200),
        ("POST", CHAT, {"json": minimal_body(CHAT) | {"stream": True}}, 200),
        ("POST", "/v1/bulk", {"content": LINE}, 200),
        ("POST", CHAT, {"content": "{"}, 400),
        ("POST", CHAT, {"json": minimal_body(CHAT) | {"n": 0}}, 400),
        ("GET", "/v1/models", {"headers": {"Authorization": "Bearer wrong"}}, 401),
        ("GET", "/nowhere", {}, 404),
        ("POST", CHAT, {"json": minimal_body(CHAT) | {"model": "other"}}, 404),
        ("GET", CHAT, {}, 405),
        ("POST", CHAT, {"content": " " * 1001}, 413),
        ("POST", CHAT, {"content": "hi", "headers": {"Content-Type": "text/plain"}}, 415),
        ("POST", COMPLETIONS, {"json": minimal_body(COMPLETIONS) | {"logprobs": 0}}, 500),
    ],
)
def test_every_answer_has_an_id(
    guarded: LiveServer, method: str, path: str, fields: dict[str, Any], status: int
) -> None:
    headers = {"Connection": "close", **fields.get("headers", {})}  # uvicorn closes it after an internal error anyway
    fields = {name: value for name, value in fields.items() if name != "headers"}
    first, second = (guarded.http.request(method, path, **fields, headers=headers) for _ in range(2))
    own = guarded.http.request(method, path, **fields, headers={**headers, "X-Request-Id": "mine 1"})
    ids = [response.headers.get_list("x-request-id") for response in (first, second, own)]
    assert [response.status_code for response in (first, second, own)] == [status] * 3
    assert all(len(found) == 1 for found in ids)
    assert all(FRESH.fullmatch(found[0]) for found in ids[:2])
    assert ids[0] != ids[1]
    assert ids[2] == ["mine 1"]


def test_an_answer_before_the_engine_is_ready_has_an_id(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), start_engine=False) as server:
        response = server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS))
        assert (response.status_code, bool(FRESH.fullmatch(response.headers["x-request-id"]))) == (503, True)


@pytest.mark.parametrize(
    ("given", "is_valid"),
    [
        (b"a", True),
        (b"!~ {}\"'", True),
        (b"x" * 200, True),
        (b"x" * 201, False),
        (b"", False),
        (b"   ", False),
        (b"a\tb", False),
        ("é".encode("latin-1"), False),
        ("é".encode(), False),
        (b"a\x80", False),
    ],
)
def test_only_printable_ascii_of_at_most_200_characters_is_echoed(
    shared_server: LiveServer, given: bytes, is_valid: bool
) -> None:
    address = urlsplit(shared_server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:  # clients refuse some of these
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: %b\r\n\r\n" % given
        connection.sendall(head)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    (shown,) = re.findall(rb"\r\nx-request-id: (.*)\r\n", answer)
    assert shown == given if is_valid else FRESH.fullmatch(shown.decode())


def test_openais_client_shows_the_id(shared_server: LiveServer) -> None:
    client = sync_client(shared_server)
    answer = client.completions.create(model="default", prompt="a", extra_headers={"X-Request-Id": "mine"})
    assert answer._request_id == "mine"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert FRESH.fullmatch(unknown.value.request_id or "")
