"""HTTP answers are counted by method, route and status."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokasaurus.server.answers import CLIENT_GONE, AnswerCounts, AnswersMiddleware, Routes


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(request.path_params), status_code=201 if request.method == "POST" else 200)


ROUTES = [
    Route("/things", _echo, methods=["GET", "POST"]),
    Route("/things/{name:path}", _echo, methods=["GET"]),
    Route("/things/{name}/parts", _echo, methods=["GET"]),
]


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/things", "/things"),
        ("/things/a/b", "/things/{name}"),
        ("/things/", "/things/{name}"),
        ("/other", "other"),
        ("/" + "x" * 5000, "other"),
        ("*", "other"),
    ],
)
def test_a_path_has_the_name_of_its_route(path: str, route: str) -> None:
    assert Routes(ROUTES).of(path) == route


def answer(app: Any, method: str, path: str) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: Any) -> None:
        pass

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))


def test_answers_are_counted_by_method_route_and_status() -> None:
    counts: AnswerCounts = {}
    app = AnswersMiddleware(Starlette(routes=ROUTES), Routes(ROUTES), counts)
    for method, path in (("GET", "/things/a"), ("GET", "/things/b"), ("POST", "/things"), ("POST", "/no")):
        answer(app, method, path)
    answer(app, "MAKEUP", "/things")
    assert counts == {
        ("GET", "/things/{name}", 200): 2,
        ("POST", "/things", 201): 1,
        ("POST", "other", 404): 1,
        ("other", "/things", 405): 1,
    }


@pytest.mark.parametrize("error", [None, asyncio.CancelledError, OSError])
def test_an_answer_that_never_began_counts_once(error: type[BaseException] | None) -> None:
    async def leave(_scope: Scope, _receive: Receive, _send: Send) -> None:
        if error is not None:
            raise error

    counts: AnswerCounts = {}
    with nullcontext() if error is None else pytest.raises(error):
        answer(AnswersMiddleware(leave, Routes(ROUTES), counts), "GET", "/things")
    assert counts == {("GET", "/things", CLIENT_GONE): 1}


def test_an_answer_of_status_499_counts_once() -> None:
    async def gone(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("", status_code=CLIENT_GONE)(scope, receive, send)

    counts: AnswerCounts = {}
    answer(AnswersMiddleware(gone, Routes(ROUTES), counts), "GET", "/things")
    assert counts == {("GET", "/things", CLIENT_GONE): 1}
