"""The input of a run."""

import hashlib
from pathlib import Path

import pytest

from tests.batch_command.helpers.request_lines import request_line
from tokasaurus.batch_command.errors import CommandError, InputRefused
from tokasaurus.batch_command.input_file import Fingerprint, custom_ids, find_endpoint, fingerprint


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
