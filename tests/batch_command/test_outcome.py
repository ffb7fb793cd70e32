"""What the user is told of a batch that has failed."""

from typing import Any

import pytest

from tokasaurus.batch_command.api import BatchView
from tokasaurus.batch_command.errors import InputRefused
from tokasaurus.batch_command.outcome import why_failed


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
