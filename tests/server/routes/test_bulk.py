"""POST /v1/bulk, compared with the routes that its lines name."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tokasaurus.messages.generation import GenerateRequest, SequenceProgress
from tokasaurus.messages.status import StepCost
from tokasaurus.server.engine_client.limits import QueueLimits
from tokasaurus.server.jobs import line_runner
from tokasaurus.server.routes import bulk
from tokasaurus.server.served_model import ServedModel

BULK = "/v1/bulk"


def line_of(custom_id: object, body: object, url: object = COMPLETIONS, **fields: object) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "url": url, "body": body, **fields}) + b"\n"


def ask(server: LiveServer, content: bytes) -> list[dict[str, Any]]:
    """The results, after checking the shape of each."""
    answer = server.http.post(BULK, content=content)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    results = [orjson.loads(line) for line in answer.content.splitlines()]
    for result in results:
        assert result.keys() == {"id", "custom_id", "response", "error"}
        assert result["response"].keys() == {"status_code", "request_id", "body"}
        if result["response"]["status_code"] == 200:
            assert result["error"] is None
        else:
            assert_openai_error(orjson.dumps(result["response"]["body"]))
            assert result["error"] == result["response"]["body"]["error"]
    assert len({result["id"] for result in results}) == len(results)
    return results


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": ["hello world", "é"], "n": 2, "logprobs": 0}),
    (COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 30, "stop": "xxxx"}),
    (COMPLETIONS, {"prompt": [list(b"x") * 400] * 100}),  # long enough to be parsed outside the event loop
    (COMPLETIONS, {"model": "nobody"}),
    (COMPLETIONS, {"max_tokens": 10_000}),
    (COMPLETIONS, {"n": 0}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"surprise": 1}),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"echo": True, "logprobs": 99}),
    (CHAT, {}),
    (CHAT, {"n": 3, "logprobs": True}),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user"}]}),
]


def test_each_line_gets_the_same_answer_as_from_its_route(shared_server: LiveServer) -> None:
    bodies = [(url, minimal_body(url) | fields) for url, fields in REQUESTS]
    content = b"".join(line_of(str(number), body, url) for number, (url, body) in enumerate(bodies))
    results = {int(result["custom_id"]): result["response"] for result in ask(shared_server, content)}
    assert sorted(results) == list(range(len(REQUESTS)))
    for number, (url, body) in enumerate(bodies):
        answer = shared_server.http.post(url, json=body)
        assert results[number]["status_code"] == answer.status_code, body
        assert without_ids(results[number]["body"]) == without_ids(answer.json())
    assert sorted({result["status_code"] for result in results.values()}) == [200, 400, 404]


GOOD = minimal_body(COMPLETIONS)
BAD_LINES: list[tuple[bytes, object, str | None]] = [
    (b"{\n", None, None),
    (b'{"custom_id": "\xff"}\n', None, None),
    (b"[" * 2000 + b"\n", None, None),
    (b'{"custom_id": "x\\u00e9\\"", "url": oops}\n', 'xé"', None),
    (b'{"url": oops, "custom_id": "x"}\n', None, None),
    (b"[]\n", None, None),
    (b"null\n", None, None),
    (b'"custom_id"\n', None, None),
    (orjson.dumps({"url": COMPLETIONS, "body": GOOD}) + b"\n", None, "custom_id"),
    (line_of(None, GOOD), None, "custom_id"),
    (line_of(7, GOOD), None, "custom_id"),
    (line_of("", GOOD), "", "custom_id"),
    (line_of("i" * 513, GOOD), "i" * 512, "custom_id"),
    (line_of("first", GOOD), "first", "custom_id"),  # a repeated custom_id
    (line_of("x", GOOD, "/v1/moderations"), "x", "url"),
    (line_of("x", GOOD, None), "x", "url"),
    (line_of("x", GOOD, method="GET"), "x", "method"),
    (line_of("x", GOOD, colour="red"), "x", "colour"),
    (line_of("x", None), "x", "body"),
    (line_of("x", []), "x", "body"),
    (orjson.dumps({"custom_id": "x", "url": COMPLETIONS}) + b"\n", "x", "body"),
    (line_of("x", GOOD | {"stream": True}), "x", "stream"),
    (line_of("x", minimal_body(CHAT) | {"stream": True}, CHAT), "x", "stream"),
]


@pytest.mark.parametrize(("bad_line", "custom_id", "param"), BAD_LINES)
def test_invalid_line_gets_an_error_and_the_others_are_answered(
    shared_server: LiveServer, bad_line: bytes, custom_id: object, param: str | None
) -> None:
    num_requests = len(shared_server.engine.requests)
    content = line_of("first", GOOD) + b"\r\n \n" + bad_line + line_of("last", GOOD, method="POST").rstrip()
    results = ask(shared_server, content)
    (bad,) = [result for result in results if result["response"]["status_code"] != 200]
    assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]["param"]) == (custom_id, 400, param)
    assert custom_id is not None or bad["error"]["message"].startswith("line 4: ")
    good = [result for result in results if result is not bad]
    assert sorted(result["custom_id"] for result in good) == ["first", "last"]
    shared_server.engine.wait_until(lambda engine: len(engine.requests) == num_requests + 2)


def test_a_line_is_limited(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), max_line_bytes=1000) as server:
        padded = line_of("long", GOOD).rstrip().ljust(1000)
        content = line_of("a", GOOD) + padded + b"\n" + padded.replace(b"long", b"longer") + b"\n" + line_of("b", GOOD)
        results = {result["custom_id"]: result for result in ask(server, content)}
        assert {name: result["response"]["status_code"] for name, result in results.items()} == {
            "a": 200,
            "long": 200,
            "longer": 413,
            "b": 200,
        }
        assert results["longer"]["error"]["code"] == "request_too_large"
        assert "more than 1000 bytes" in results["longer"]["error"]["message"]
        assert "line 3 " in results["longer"]["error"]["message"]
        many = b"".join(line_of(str(number), GOOD) for number in range(100))  # the body as a whole has no limit
        assert len(many) > 5000
        assert {result["response"]["status_code"] for result in ask(server, many)} == {200}


def test_empty_body_has_no_results(shared_server: LiveServer) -> None:
    assert ask(shared_server, b"") == ask(shared_server, b"\n \r\n") == []


@pytest.mark.parametrize(
    "media_type", ["application/x-ndjson", "application/json", "application/x-www-form-urlencoded", "text/plain", ""]
)
def test_lines_are_read_under_every_media_type(shared_server: LiveServer, media_type: str) -> None:
    answer = shared_server.http.post(BULK, content=line_of("a", GOOD), headers={"Content-Type": media_type})
    assert answer.status_code == 200
    assert orjson.loads(answer.content)["response"]["status_code"] == 200


def test_bulk_is_refused_without_the_key_or_before_the_engine_is_ready(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), api_key="secret") as server:
        assert len(ask(server, line_of("a", GOOD))) == 1
        refused = server.http.post(BULK, content=line_of("a", GOOD), headers={"Authorization": "Bearer wrong"})
        assert (refused.status_code, assert_openai_error(refused.content)["code"]) == (401, "invalid_api_key")
    with live_server(served_model, FakeEngine(), start_engine=False) as server:
        refused = server.http.post(BULK, content=line_of("a", GOOD))
        assert (refused.status_code, assert_openai_error(refused.content)["code"]) == (503, "engine_not_ready")


def test_internal_error_affects_only_its_own_line(shared_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise KeyError("a secret prompt")

    monkeypatch.setitem(line_runner.ALL_ENDPOINTS, CHAT, replace(line_runner.ALL_ENDPOINTS[CHAT], build=broken))
    results = ask(shared_server, line_of("broken", minimal_body(CHAT), CHAT) + line_of("whole", GOOD))
    assert {result["custom_id"]: result["response"]["status_code"] for result in results} == {
        "broken": 500,
        "whole": 200,
    }
    assert b"secret" not in orjson.dumps(results)


def test_lines_wait_while_the_queue_is_full(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "QUEUE_RETRY_S", 0.05)
    with live_server(served_model, FakeEngine(), queue_limits=QueueLimits(max_queued_requests=2)) as server:
        results = ask(server, b"".join(line_of(str(number), GOOD) for number in range(200)))
        assert [result["response"]["status_code"] for result in results] == [200] * 200


@pytest.mark.parametrize("limits", [QueueLimits(max_queued_sequences=2), QueueLimits(max_queued_tokens=10)])
def test_lines_wait_at_the_hard_limits_unless_they_can_never_fit(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, limits: QueueLimits
) -> None:
    monkeypatch.setattr(bulk, "QUEUE_RETRY_S", 0.05)
    with live_server(served_model, FakeEngine(), queue_limits=limits) as server:
        lines = [line_of(str(number), GOOD) for number in range(50)]
        never_fits = line_of("never", GOOD | {"prompt": ["a" * 6, "a" * 5], "n": 2})
        results = ask(server, b"".join([never_fits, *lines]))
        codes = {result["custom_id"]: result["response"]["status_code"] for result in results}
        assert codes == {"never": 400} | {str(number): 200 for number in range(50)}


def test_all_lines_of_a_connection_belong_to_one_client(server: LiveServer) -> None:
    for _ in range(2):
        with httpx.Client(base_url=server.url) as connection:
            content = line_of("a", GOOD) + line_of("b", minimal_body(CHAT), CHAT) + line_of("c", GOOD)
            assert connection.post(BULK, content=content).status_code == 200
    clients = [request.client for request in server.engine.requests]
    assert clients == [clients[0]] * 3 + [clients[3]] * 3
    assert "" != clients[0] != clients[3] != ""


class Caller:
    """Sends a body in chunks and reads result lines while sending."""

    def __init__(self, server: LiveServer, header: str = "Accept: */*") -> None:
        self._socket = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port))
        self._socket.settimeout(60)
        self.answer = self._socket.makefile("rb")
        head = f"POST {BULK} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{header}\r\n\r\n"
        self._socket.sendall(head.encode())

    def send(self, content: bytes) -> None:
        self._socket.sendall(b"%x\r\n%b\r\n" % (len(content), content))

    def next_results(self, count: int) -> list[str]:
        """The custom_ids of the next `count` results."""
        results: list[str] = []
        while len(results) < count:
            line = self.answer.readline()
            assert line, "the answer has ended"
            if line.startswith(b"{"):
                results.append(orjson.loads(line)["custom_id"])
        return results

    def close(self) -> None:
        self.answer.close()
        self._socket.close()


@pytest.fixture
def caller(server: LiveServer) -> Iterator[Caller]:
    caller = Caller(server)
    yield caller
    caller.close()


def test_results_arrive_while_the_body_is_still_being_sent(caller: Caller) -> None:
    line = line_of("one", GOOD)
    caller.send(line[:20])
    caller.send(line[20:])
    assert caller.next_results(1) == ["one"]
    caller.send(line_of("two", GOOD) + line_of("three", GOOD)[:-1])
    assert caller.next_results(1) == ["two"]
    caller.send(b"\n")
    assert caller.next_results(1) == ["three"]
    caller.send(b"")
    while (line := caller.answer.readline()) != b"0\r\n":  # the last chunk
        assert line


def test_caller_that_expects_100_continue_gets_it(server: LiveServer) -> None:
    caller = Caller(server, "Expect: 100-continue")
    assert caller.answer.readline() == b"HTTP/1.1 100 Continue\r\n"
    caller.send(line_of("one", GOOD))
    assert caller.next_results(1) == ["one"]
    caller.close()


@pytest.mark.parametrize("has_sent_all", [True, False])
def test_disconnecting_caller_cancels_unanswered_lines(server: LiveServer, caller: Caller, has_sent_all: bool) -> None:
    def slow_if_odd(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if request.max_new_tokens % 2 == 0 else never(request, index)

    server.engine.script = slow_if_odd
    caller.send(b"".join(line_of(str(number), GOOD | {"max_tokens": 1 + number}) for number in range(10)))
    assert sorted(caller.next_results(5)) == ["1", "3", "5", "7", "9"]
    if has_sent_all:
        caller.send(b"")
    server.engine.wait_until(lambda engine: len(engine.requests) == 10)
    assert server.engine.cancelled == []
    caller.close()
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 5)
    unanswered = {request.request_id for request in server.engine.requests if request.max_new_tokens % 2 == 1}
    assert set(server.engine.cancelled) == unanswered
    wait_until_clean(server)
    time.sleep(0.05)
    assert len(server.engine.cancelled) == 5


def test_progress_is_what_the_engine_tells_of_the_unfinished_lines(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PROGRESS_S", 0.05)
    seen = []

    def reply(request: GenerateRequest, index: int) -> Reply:
        seen.append(request)
        return never(request, index)

    with live_server(served_model, FakeEngine(reply)) as server:
        lines = [line_of(str(number), minimal_body(COMPLETIONS)) for number in range(3)]
        with server.http.stream("POST", f"{BULK}?progress=true", content=b"".join(lines)) as answer:
            reports = (orjson.loads(line)["progress"] for line in answer.iter_lines())
            assert next(report for report in reports if report["requests"] == 3)["expected_tokens"] is None
            (job,) = {request.job for request in seen}
            pace = server.client._jobs[job]
            pace.num_lines = 5
            for number, (pending, expected) in enumerate(zip(server.client._pending.values(), (10, 20), strict=False)):
                pending.progress[0] = SequenceProgress(pending.request.request_id, 0, number + 1, expected)
            pace.look(time.monotonic(), StepCost())
            report = next(report for report in reports if report["expected_tokens"] is not None)
            low, high = report.pop("seconds_left")
            assert report == {"requests": 3, "generated_tokens": 3, "expected_tokens": 5 * 15}
            assert 0 < low < high
        wait_until_clean(server)
