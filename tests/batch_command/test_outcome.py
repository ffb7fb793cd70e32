"""What the user is told of a batch that has ended."""

import json
from typing import Any

import pytest

from tokasaurus.batch_command.api import BatchView
from tokasaurus.batch_command.errors import InputRefused
from tokasaurus.batch_command.outcome import Outcome, why_failed


def failed(*errors: dict[str, Any]) -> BatchView:
    return BatchView("batch_1", "failed", 0, 0, 0, 0, list(errors), [], "24h")


@pytest.mark.parametrize("code", ["validation_failed", "input_file_missing"])
def test_a_failure_of_the_server_is_not_blamed_on_the_input(code: str) -> None:
    error = why_failed(failed({"code": code, "message": "the reason"}))
    assert str(error) == "batch_1 failed, not by its input: the reason; run the same command again"
    assert not isinstance(error, InputRefused)


def test_a_failure_without_errors_is_said_to_have_none() -> None:
    text = "batch_1 failed, and the server does not say why; run the same command again"
    assert str(why_failed(failed())) == text


def test_bad_lines_are_listed_up_to_twenty() -> None:
    errors = [{"code": "invalid_body", "message": "bad", "line": number, "param": "body"} for number in range(1, 24)]
    error = why_failed(failed({"code": "empty_file", "message": "empty"}, *errors, {"code": "more_errors"}))
    assert isinstance(error, InputRefused)
    lines = str(error).splitlines()
    assert lines[0] == "batch_1 failed, since its input is bad:"
    assert lines[1] == "the file: empty"
    assert lines[2:21] == [f"line {number}: body: bad" for number in range(1, 20)]
    assert lines[21:] == ["and at least 4 more"]


def result(status: int, body: dict[str, Any] | None, error: dict[str, Any] | None = None) -> bytes:
    response = None if body is None else {"status_code": status, "body": body}
    return json.dumps({"custom_id": "a", "response": response, "error": error}).encode()


def test_cut_lines_and_the_reasons_of_failed_ones_are_counted() -> None:
    """A line with n choices is cut once. A refused line has its error in the body, one that did not run beside it."""
    outcome = Outcome()
    for reasons in (["stop"], ["length", "length"], ["stop", "length"], ["tool_calls"], [None]):
        outcome.add(result(200, {"choices": [{"finish_reason": reason} for reason in reasons]}))
    for number in range(3):
        error = {"message": f"too\nlong by {number}", "code": "context_length_exceeded"}
        outcome.add(result(400, {"error": error}))
    outcome.add(result(0, None, {"code": "batch_expired", "message": "it took too long"}))
    outcome.add(result(500, {"error": {"message": "oh", "code": None}}))
    outcome.add(result(502, {}))
    assert outcome.num_cut == 2
    assert outcome.failures() == [
        "failed: 3 x context_length_exceeded: too long by 0",
        "failed: 1 x batch_expired: it took too long",
        "failed: 1 x oh",
        "failed: 1 x status 502",
    ]
