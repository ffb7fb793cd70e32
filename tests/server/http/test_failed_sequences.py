"""A sequence that ends with an error fails the whole answer with status 400; no choice is reported as finished."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import Reply, start_again
from tests.server.helpers.live_server import LiveServer
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel

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


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_stream_whose_tokens_made_no_text_yet_outlives_its_engine(
    server: LiveServer, served_model: ServedModel, route: str
) -> None:
    """The first of a character's tokens has been read, but nothing has been sent: the answer comes from the engine's
    next start alone."""
    tokens = served_model.tokenizer.encode("\U0001f99c", add_special_tokens=False)
    assert len(tokens) > 1
    server.engine.script = lambda _request, index: Reply(tokens[:1], None, None) if index == 0 else None
    body = minimal_body(route) | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, route, json=body)
        server.engine.wait_until(lambda engine: len(engine.requests) == 1)
        time.sleep(0.3)  # for the first token to be read
        assert not answer.done()
        server.engine.die()
        server.engine.script = lambda _request, _index: Reply(tokens, None, "stop")
        second = start_again(server.engine)
        events = [line.removeprefix("data: ") for line in answer.result().text.split("\n\n") if line]
    second.stop()
    assert answer.result().status_code == 200
    chunks = [orjson.loads(event) for event in events[:-1]]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            texts[choice["index"]] += delta.get("text", delta.get("content")) or ""
    assert texts == {0: "\U0001f99c", 1: "\U0001f99c"}
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * len(tokens)
    assert events[-1] == "[DONE]"
