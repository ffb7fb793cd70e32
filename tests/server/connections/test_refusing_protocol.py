"""Limits of sizes, malformed requests, and requests to upgrade, by raw sockets against the real server."""

import json
import logging
import select
import socket
from collections.abc import Iterator

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import ask, completion, connect, parse_answers, read_all, read_answer
from tokasaurus.server.connections.protocol import MAX_HEADERS, MAX_PIPELINED
from tokasaurus.server.served_model import ServedModel

MAX_HEADER_BYTES, MAX_URL_BYTES = 2000, 300
GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.fixture(scope="module")
def limited(served_model: ServedModel) -> Iterator[LiveServer]:
    limits = {"max_header_bytes": MAX_HEADER_BYTES, "max_url_bytes": MAX_URL_BYTES}
    with live_server(served_model, FakeEngine(), max_request_bytes=100_000, **limits) as server:
        yield server


def test_headers_up_to_the_limit_are_accepted(limited: LiveServer) -> None:
    fixed = len("Host: x\r\nConnection: close\r\n")
    for size, status in ((MAX_HEADER_BYTES - fixed, 200), (MAX_HEADER_BYTES - fixed + 1, 431)):
        answer = ask(limited.url, GET + b"A: " + b"a" * (size - len("A: \r\n")) + b"\r\n\r\n")
        assert answer.status == status
    assert answer.error_code == "headers_too_large"


@pytest.mark.parametrize(
    "endless",
    [
        b"X-Long: " + b"a" * (1 << 20),
        b"a" * (1 << 20),
        b"A: b\r\n" * 200_000,
    ],
    ids=["value", "name", "many"],
)
def test_headers_without_an_end_are_refused(limited: LiveServer, endless: bytes) -> None:
    answer = ask(limited.url, GET + endless)
    assert (answer.status, answer.error_code) == (431, "headers_too_large")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/count_tokens?a=b", b"//v1//messages/", b"/messages"])
def test_refusals_of_messages_have_their_form(limited: LiveServer, path: bytes) -> None:
    start = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n"
    for rest, status, kind in (
        (b"A: b\r\n" * 2000, 431, "invalid_request_error"),
        (b"A b\r\n\r\n", 400, "invalid_request_error"),
    ):
        answer = ask(limited.url, start + rest)
        assert answer.status == status
        assert int(answer.headers["content-length"]) == len(answer.body)
        error = json.loads(answer.body)
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["error"]["message"]


@pytest.mark.parametrize("path", [b"/v1/messages_of_others", b"/v1/models?x=/v1/messages", b"/"])
def test_refusals_of_other_paths_have_openais_form(limited: LiveServer, path: bytes) -> None:
    answer = ask(limited.url, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nA b\r\n\r\n")
    assert (answer.status, answer.error_code) == (400, "malformed_request")


def test_the_number_of_headers_is_limited(shared_server: LiveServer) -> None:
    for count, status in ((MAX_HEADERS - 2, 200), (MAX_HEADERS - 1, 431)):  # two are in GET
        assert ask(shared_server.url, GET + b"a: b\r\n" * count + b"\r\n").status == status


@pytest.mark.parametrize("pieces", [1, 50])
def test_url_up_to_the_limit_is_accepted(limited: LiveServer, pieces: int) -> None:
    for size, status in ((MAX_URL_BYTES, 200), (MAX_URL_BYTES + 1, 414)):
        url = b"/health?" + b"q" * (size - len("/health?"))
        request = b"GET " + url + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with connect(limited.url) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(request), -(-len(request) // pieces)):
                connection.sendall(request[start : start + -(-len(request) // pieces)])
            (answer,) = parse_answers(read_all(connection))
        assert answer.status == status
    assert answer.error_code == "url_too_long"


def test_endless_url_is_refused(limited: LiveServer) -> None:
    assert ask(limited.url, b"GET /" + b"a" * (1 << 20)).error_code == "url_too_long"


def test_endless_trailers_and_chunk_extensions_are_refused(limited: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for endless in (b"2\r\n{}\r\n0\r\nTrailer: " + b"a" * (1 << 20), b"2;" + b"e" * (1 << 20)):
        assert ask(limited.url, head + endless).error_code == "headers_too_large"


@pytest.mark.parametrize("chunk_bytes", [None, 1, 1000])
def test_a_body_does_not_count_as_the_next_requests_headers(limited: LiveServer, chunk_bytes: int | None) -> None:
    """They arrive together, and the headers are complete only later."""
    body = b"[]" + b" " * 90_000
    framing = b"Content-Length: %d" % len(body)
    if chunk_bytes is not None:
        body = body[: 100 * chunk_bytes]
        parts = [body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
        framing = b"Transfer-Encoding: chunked"
    with connect(limited.url) as connection:
        post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % framing
        connection.sendall(post + body + GET[:-2])
        assert read_answer(connection).status == 400
        connection.sendall(b"\r\n\r\n")
        (answer,) = parse_answers(read_all(connection))
        assert answer.status == 200


def test_headers_without_an_end_are_refused_after_a_body(limited: LiveServer) -> None:
    body = b"[]" + b" " * 90_000
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(limited.url) as connection:
        connection.sendall(post + body + GET + b"A: " + b"a" * 20_000)
        answers = parse_answers(read_all(connection))
    assert [answer.status for answer in answers] == [400, 431]


def test_headers_and_url_up_to_their_limits_may_precede_a_body_that_arrives_later(limited: LiveServer) -> None:
    head = b"POST /v1/completions?%s HTTP/1.1\r\n" % (b"q" * (MAX_URL_BYTES - len("/v1/completions?")))
    fields = b"Host: x\r\nConnection: close\r\nContent-Length: 2\r\n"
    padding = b"A: " + b"a" * (MAX_HEADER_BYTES - len(fields) - len("A: \r\n")) + b"\r\n"
    with connect(limited.url) as connection:
        connection.sendall(head + fields + padding + b"\r\n")
        assert not select.select([connection], [], [], 0.2)[0]
        connection.sendall(b"[]")
        (answer,) = parse_answers(read_all(connection))
    assert answer.status == 400


def test_trailers_do_not_become_headers(limited: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    answer = ask(limited.url, head + b"2\r\n{}\r\n0\r\nX-Request-Id: trailed\r\n\r\n")
    assert answer.status == 400
    assert answer.headers["x-request-id"] != "trailed"


def test_client_that_sends_on_after_a_refusal_still_reads_it(limited: LiveServer) -> None:
    """413 by the application, 431 by the protocol: closing with unread input would reset the connection."""
    body = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    assert ask(limited.url, body + b" " * (8 << 20)).error_code == "request_too_large"
    assert ask(limited.url, GET + b"a" * (8 << 20)).error_code == "headers_too_large"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nA: \x01\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}x",
    ],
)
def test_malformed_request_is_400(limited: LiveServer, request_bytes: bytes) -> None:
    answer = ask(limited.url, request_bytes)
    assert (answer.status, answer.error_code) == (400, "malformed_request")
    assert limited.engine.requests == []


def test_malformed_request_keeps_the_clients_request_id(limited: LiveServer) -> None:
    answer = ask(limited.url, b"POST /v1/bulk2 HTTP/1.1\r\nX-Request-Id: mine\r\nA: b\r\nno colon\r\n\r\n")
    assert (answer.status, answer.headers["x-request-id"]) == (400, "mine")


def test_a_refusal_waits_for_the_answers_to_earlier_requests(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for bad in (b"nonsense\r\n\r\n", head + b"zz\r\n"):
        with connect(server.url) as connection:
            connection.sendall(completion() + completion() + bad)
            answers = parse_answers(read_all(connection))
        assert [answer.status for answer in answers] == [200, 200, 400]
        assert answers[-1].error_code == "malformed_request"


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(server: LiveServer) -> None:
    names = [f"n{number}" for number in range(2 * MAX_PIPELINED)]
    for count, last in ((MAX_PIPELINED, 200), (2 * MAX_PIPELINED, 400)):
        requests = [b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: %s\r\n\r\n" % n.encode() for n in names[:count]]
        with connect(server.url) as connection:
            connection.sendall(b"".join(requests))
            connection.shutdown(socket.SHUT_WR)
            answers = parse_answers(read_all(connection))
        assert answers[-1].status == last
        good = answers if last == 200 else answers[:-1]
        assert [answer.headers["x-request-id"] for answer in good] == names[: len(good)]
    assert len(answers) >= MAX_PIPELINED


def test_warnings_have_one_kind_per_code(limited: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """The log writes one line per kind and second, and tells kinds apart by the unformatted message."""
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        for request in (b"nonsense\r\n\r\n", b"other nonsense\r\n\r\n", b"GET /" + b"a" * 400 + b" HTTP/1.1\r\n\r\n"):
            ask(limited.url, request)
    kinds = {record.msg for record in caplog.records if record.name == "uvicorn.error"}
    assert len(kinds) == 2


@pytest.mark.parametrize("split", [False, True])
def test_upgrade_to_http_2_is_ignored_and_the_body_is_read(server: LiveServer, split: bool) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    head, _, body = completion(prompt="upgraded", max_tokens=100).partition(b"\r\n\r\n")
    request = head + b"\r\n" + offer + b"\r\n" + body
    with connect(server.url) as connection:
        for part in (request[:-10], request[-10:]) if split else (request,):
            connection.sendall(part)
        # the connection stays usable, and a request without a body may offer the same
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n" + GET + b"\r\n")
        answers = parse_answers(read_all(connection))
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert b'"upgraded"' in answers[0].body
