"""Results in the order of the input, and what the user is told of them."""

import hashlib
import json
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.commands.batch.helpers.request_lines import request_line
from tests.helpers.examples import seeds
from tokasaurus.commands.batch.errors import CommandError, InputRefused
from tokasaurus.commands.batch.progress import BatchView
from tokasaurus.commands.batch.results import Outcome, ResultsSoFar, merged, why_failed


def result(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "response": {"body": f"of {custom_id}"}}).encode()


def merge(tmp_path: Path, asked: list[str], *files: bytes, is_complete: bool = True) -> tuple[bytes, str]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(request_line(custom_id) for custom_id in asked))
    output = ResultsSoFar(tmp_path / "partial").complete(
        lambda: merged(source, [BytesIO(file) for file in files], is_complete)
    )
    output.commit(tmp_path / "out.jsonl")
    return (tmp_path / "out.jsonl").read_bytes(), output.sha256


def test_line_ends_that_another_server_has_left_in_are_escaped(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "a\u2028", "response": "\u2029\x85"}, ensure_ascii=False).encode()
    written, _ = merge(tmp_path, ["a\u2028"], line)
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written) == json.loads(line)


@pytest.mark.parametrize("seed", seeds(10))
def test_any_order_in_any_file_becomes_the_order_of_the_input(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    asked = [f"é{chance.getrandbits(40)}" for _ in range(chance.randint(1, 200))]
    shuffled = chance.sample(asked, len(asked))
    cut = chance.randint(0, len(asked))
    files = [b"\n".join(map(result, part)) for part in (shuffled[:cut], shuffled[cut:])]
    written, digest = merge(tmp_path, asked, *files, b"\r\n")
    assert written == b"".join(result(custom_id) + b"\n" for custom_id in asked)
    assert digest == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([result("a")], "no result of the line with the custom_id 'b'"),
        ([result("a") + b"\n" + result("b"), result("a")], "two results of the line with the custom_id 'a'"),
        ([b"\n".join(map(result, "abc"))], "a result of 'c' that is of no line of the input, or a second one"),
        ([b"\n".join(map(result, "aba"))], "a result of 'a' that is of no line of the input, or a second one"),
        ([b"{}"], "a line of the server's results has no custom_id"),
        ([b"{"], "a line of the server's results has no custom_id"),
    ],
)
def test_without_exactly_one_result_for_each_line_there_is_no_output(
    tmp_path: Path, files: list[bytes], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        merge(tmp_path, ["a", "b"], *files)
    assert not (tmp_path / "out.jsonl").exists()


def test_files_in_the_order_of_the_input_are_read_no_further_than_the_results_that_are_asked_for(
    tmp_path: Path,
) -> None:
    source, num_lines = tmp_path / "in.jsonl", 1000
    source.write_text("".join(request_line(str(number)) for number in range(num_lines)))
    completed = [number for number in range(num_lines) if not 300 < number < 600]
    parts = completed, [number for number in range(num_lines) if number not in completed]
    files = [BytesIO(b"".join(result(str(number)) + b"\n" for number in part)) for part in parts]
    for number, line in enumerate(merged(source, files, is_complete=True)):
        assert json.loads(line)["custom_id"] == str(number)
        ahead = sum(file.getvalue()[: file.tell()].count(b"\n") for file in files) - number
        assert ahead <= 3


def test_an_incomplete_batch_gives_the_results_there_are_in_the_order_of_the_input(tmp_path: Path) -> None:
    files = result("d") + b"\n" + result("a"), result("c")
    written, _ = merge(tmp_path, ["a", "b", "c", "d"], *files, is_complete=False)
    assert written == b"".join(result(custom_id) + b"\n" for custom_id in "acd")


LINES = [result(f"c{number}") + b"\n" for number in range(10)]


def test_results_so_far_grow_and_become_the_output(tmp_path: Path) -> None:
    """Its name is given only once: each result is written once."""
    path, notes = tmp_path / "partial", list[str]()
    path.write_text("of a killed run")
    so_far = ResultsSoFar(path)
    for num_done in (0, 3, 3, 7):
        so_far.update(lambda first, num_done=num_done: LINES[first:num_done][:2], num_done, notes.append)
        assert path.read_bytes() == (b"".join(LINES[:num_done]) or b"of a killed run")
    file_number = path.stat().st_ino
    so_far.complete(lambda: LINES).commit(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"".join(LINES)
    assert (tmp_path / "out").stat().st_ino == file_number
    assert notes == [f"results so far, in the order of the input: {path}"]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("mine")])
def test_what_somebody_has_done_to_the_results_so_far_is_not_in_the_output(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    so_far = ResultsSoFar(tmp_path / "partial")
    so_far.update(lambda first: LINES[first:5], 5, print)
    harm(tmp_path / "partial")
    so_far.complete(lambda: LINES).commit(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"".join(LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_told_once_and_tried_again_at_the_end(tmp_path: Path) -> None:
    notes: list[str] = []
    so_far = ResultsSoFar(tmp_path / "absent" / "partial")
    for num_done in (3, 5):
        so_far.update(lambda first: LINES[first:], num_done, notes.append)
    assert notes == [
        f"{tmp_path / 'absent' / 'partial'}: No such file or directory; the results so far are not written"
    ]
    (tmp_path / "absent").mkdir()
    so_far.complete(lambda: LINES).commit(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"".join(LINES)


def failed(*errors: dict[str, Any]) -> BatchView:
    return BatchView("batch_1", "failed", 0, 0, 0, 0, list(errors))


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


def result_with(status: int, body: dict[str, Any] | None, error: dict[str, Any] | None = None) -> bytes:
    response = None if body is None else {"status_code": status, "body": body}
    return json.dumps({"custom_id": "a", "response": response, "error": error}).encode()


def test_cut_lines_and_the_reasons_of_failed_ones_are_counted() -> None:
    """A line with n choices is cut once. A refused line has its error in the body, one that did not run beside it."""
    outcome = Outcome()
    for reasons in (["stop"], ["length", "length"], ["stop", "length"], ["tool_calls"], [None]):
        outcome.add(result_with(200, {"choices": [{"finish_reason": reason} for reason in reasons]}))
    for number in range(3):
        error = {"message": f"too\nlong by {number}", "code": "context_length_exceeded"}
        outcome.add(result_with(400, {"error": error}))
    outcome.add(result_with(0, None, {"code": "batch_expired", "message": "it took too long"}))
    outcome.add(result_with(500, {"error": {"message": "oh", "code": None}}))
    outcome.add(result_with(502, {}))
    assert outcome.num_cut == 2
    assert outcome.failures.lines() == [
        "failed: 3 x context_length_exceeded: too long by 0",
        "failed: 1 x batch_expired: it took too long",
        "failed: 1 x oh",
        "failed: 1 x status 502",
    ]
