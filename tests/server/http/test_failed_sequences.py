"""A sequence that ends with an error fails the whole answer with status 400; no choice is reported as finished."""

from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import Reply
from tests.server.helpers.live_server import LiveServer
from tokasaurus.messages.generation import GenerateRequest

TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 100}
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"guided_regex": "a*"}, "guided_regex"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, TOOLS, "tools"),
]


def fail_one(_request: GenerateRequest, index: int) -> Reply:
    if index == 1:
        return Reply([65, 66, 67], None, "stop", error="too much work", error_code="grammar_too_complex")
    return Reply([65, 66], None, None)  # not finished


@pytest.mark.parametrize(("route", "grammar", "param"), GRAMMARS)
def test_a_failed_sequence_is_a_400_naming_its_grammar(
    server: LiveServer, route: str, grammar: dict[str, Any], param: str
) -> None:
    server.engine.script, server.engine.pause_s = fail_one, 0.02
    body = minimal_body(route) | grammar | {"n": 2}
    response = server.http.post(route, json=body)
    error = assert_openai_error(response.content)
    assert response.status_code == 400
    expected = {"type": "invalid_request_error", "param": param, "code": "grammar_too_complex"}
    assert error == expected | {"message": f"{param}: too much work"}
    events = server.http.post(route, json=body | {"stream": True}).text.strip().split("\n\n")
    assert assert_openai_error(events[-1].removeprefix("data: ").encode()) == error
    assert not any('"finish_reason":"stop"' in event for event in events)
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 2)  # both requests had an unfinished sequence


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_sequence_whose_numbers_are_not_finite_is_a_500(server: LiveServer, route: str) -> None:
    reply = Reply([65, 66, 67], None, "stop", error="NaN for this request", error_code="numerical_error")
    server.engine.script = lambda _request, _index: reply
    body = minimal_body(route)
    response = server.http.post(route, json=body)
    error = assert_openai_error(response.content)
    assert response.status_code == 500
    assert error == {
        "type": "server_error",
        "param": None,
        "code": "numerical_error",
        "message": "NaN for this request",
    }
    events = server.http.post(route, json=body | {"stream": True}).text.strip().split("\n\n")
    assert assert_openai_error(events[-1].removeprefix("data: ").encode()) == error
    line = {"custom_id": "x", "url": route, "body": body}
    result = orjson.loads(server.http.post("/v1/bulk", content=orjson.dumps(line)).content)
    assert (result["response"]["status_code"], result["error"]["code"]) == (500, "numerical_error")


def test_a_bulk_line_with_a_failed_sequence_has_the_error_as_its_result(server: LiveServer) -> None:
    server.engine.script = lambda request, index: fail_one(request, index + 1)
    body = minimal_body(COMPLETIONS) | {"guided_regex": "a*"}
    line = {"custom_id": "x", "url": COMPLETIONS, "body": body}
    response = server.http.post("/v1/bulk", content=orjson.dumps(line))
    result = orjson.loads(response.content)
    assert result["response"]["status_code"] == 400
    assert (result["error"]["param"], result["error"]["code"]) == ("guided_regex", "grammar_too_complex")
