"""The input of a run."""

import hashlib
import time
from pathlib import Path

import pytest

from tests.commands.batch.helpers.request_lines import request_line
from tokasaurus.commands.batch.errors import CommandError, InputRefused
from tokasaurus.commands.batch.input_file import (
    Fingerprint,
    InputLimits,
    check_input,
    custom_ids,
    find_endpoint,
    fingerprint,
)


def test_a_fingerprint_changes_with_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    content = b"x" * (3 << 20)
    path.write_bytes(content)
    before = fingerprint(path)
    assert before == Fingerprint(len(content), hashlib.sha256(content).hexdigest())
    path.write_bytes(content[:-1] + b"y")
    assert fingerprint(path) != before


def test_the_endpoint_is_the_first_lines_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n \n" + request_line("a", url="/v1/chat/completions") + "\r\n" + request_line("b"))
    assert find_endpoint(path) == "/v1/chat/completions"
    assert list(custom_ids(path)) == ["a", "b"]


def test_a_byte_order_mark_is_accepted_at_the_start_as_the_server_does(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for blank in ("", "\r\n"):
        path.write_text(blank + request_line("a") + request_line("b"), encoding="utf-8-sig")
        assert path.read_bytes().startswith(b"\xef\xbb\xbf")
        assert find_endpoint(path) == "/v1/completions"
        assert list(custom_ids(path)) == ["a", "b"]
    path.write_bytes(b"\n\xef\xbb\xbf" + request_line("a").encode())
    with pytest.raises(InputRefused, match=r"^line 2: must be a JSON object$"):
        find_endpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n{\n", "line 2: must be a JSON object"),
        (b"[1]\n", "line 1: must be a JSON object"),
        (b'{"url": 3}', "line 1: url: must be the endpoint, such as /v1/chat/completions"),
        (b"\xff", "line 1: must be a JSON object"),
        (b"\n\n", "the file has no lines"),
        (b"", "the file has no lines"),
    ],
)
def test_a_file_without_an_endpoint_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputRefused) as refused:
        find_endpoint(path)
    assert str(refused.value).endswith(message)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (fingerprint, find_endpoint, lambda path: list(custom_ids(path))):
        with pytest.raises(CommandError, match=r"^input=.*absent: No such file or directory$"):
            read(tmp_path / "absent")


LIMITS = InputLimits(("/v1/completions", "/v1/chat/completions"), 60_000, 1000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: the line is not valid JSON: "),
        (request_line("a"), "line 3: custom_id is also that of line 1"),
        (request_line("c", url="/v1/chat/completions"), "line 3: url must be the batch's endpoint, /v1/completions"),
        (request_line("c").replace("POST", "GET"), "line 3: method must be POST"),
        (request_line("c", prompt="x" * 1000), "line 3: the line may have at most 1000 bytes"),
        (request_line("c").replace('"url"', '"ur"'), "line 3: unknown field 'ur': did you mean 'url'?"),
    ],
)
def test_each_bad_line_is_one_line_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(request_line("a") + request_line("b") + line.strip() + "\n" + request_line("d") + "[]\n")
    with pytest.raises(InputRefused) as refused:
        check_input(path, find_endpoint(path), LIMITS)
    heading, first, second = str(refused.value).splitlines()
    assert heading == f"input={path} is bad:"
    assert first.startswith(message)
    assert second == "line 5: the line must be a JSON object"


def test_the_limits_are_those_of_the_server_that_will_run_it(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(request_line("a", url="/v1/moderations").replace("{", '{"more": 1, ', 1))
    with pytest.raises(InputRefused, match="must be /v1/completions or /v1/chat/completions"):
        check_input(path, find_endpoint(path), LIMITS)
    check_input(path, find_endpoint(path), None)  # the server at base_url= may know more
    path.write_text("".join(request_line(str(number)) for number in range(3)))
    with pytest.raises(InputRefused, match=r"at most 2 lines \(max_batch_lines\)"):
        check_input(path, find_endpoint(path), InputLimits(LIMITS.endpoints, 2, 1000))


def test_fifty_thousand_lines_are_checked_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(request_line(f"c{index}", prompt="word " * 40) for index in range(50_000)))
    began_s = time.process_time()
    check_input(path, find_endpoint(path), LIMITS)
    assert time.process_time() - began_s < 5
