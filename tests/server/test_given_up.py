"""A sequence that the engine gives up fails the whole answer: nothing is shown as if it were finished."""

import pytest

from tests.fake_engine import Reply
from tests.server.conftest import LiveServer
from tests.server.test_validation import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tokasaurus.messages.generation import GenerateRequest


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_sequence_that_is_given_up_is_a_500_or_an_error_event(server: LiveServer, route: str) -> None:
    def give_one_up(_request: GenerateRequest, index: int) -> Reply:
        if index == 1:
            return Reply([65, 66, 67], None, "stop", error="too much work")
        return Reply([65, 66], None, None)  # still at work

    server.engine.script = give_one_up
    body = minimal_body(route) | {"n": 2}
    response = server.http.post(route, json=body)
    error = assert_openai_error(response.content)
    assert (response.status_code, error["code"], error["message"]) == (500, "generation_failed", "too much work")
    events = server.http.post(route, json=body | {"stream": True}).text.strip().split("\n\n")
    assert assert_openai_error(events[-1].removeprefix("data: ").encode()) == error
    assert not any('"finish_reason":"stop"' in event for event in events)
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 2)  # what was left of each request
