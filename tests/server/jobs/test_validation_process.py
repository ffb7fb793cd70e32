"""What is found in input files, by hand-made cases and against a slow reader."""

import codecs
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.limits import read_line
from tokasaurus.server.jobs.validation_process import MAX_SHOWN_ERRORS, InputError, InputReader

ENDPOINT = "/v1/completions"
MAX_LINES = 20
MAX_LINE_BYTES = 300


def line(custom_id: object = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "é"}} | changes
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def read(
    content: bytes, max_lines: int = MAX_LINES, max_line_bytes: int = MAX_LINE_BYTES
) -> tuple[list[tuple[str, int, int]], list[InputError]]:
    """(lines, errors); each line is where it is said to be."""
    reader = InputReader(ENDPOINT, max_lines, max_line_bytes)
    lines = list(reader.lines(io.BytesIO(content)))
    assert reader.num_errors == len(reader.errors)
    for custom_id, start, size in lines:
        assert orjson.loads(content[start : start + size])["custom_id"] == custom_id
        assert content[start + size : start + size + 1] in (b"", b"\n", b"\r")
    return lines, reader.errors


def codes(content: bytes) -> list[tuple[str, int | None, str | None]]:
    """(code, line, param) of each error."""
    _, errors = read(content)
    return [(error.code, error.line, error.param) for error in errors]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_a_byte_order_mark(end: bytes, start: bytes, last: bool) -> None:
    content = start + end.join([line("a"), b"", b" \t", line("b"), line("ä" * 512)]) + (end if last else b"")
    lines, errors = read(content, max_line_bytes=2000)
    assert [custom_id for custom_id, _, _ in lines] == ["a", "b", "ä" * 512]
    assert not errors


BAD_JSON = {
    "no JSON": b"{",
    "not UTF-8": line("a").replace("é".encode(), b"\xff"),
    "UTF-16": line("a").decode().encode("utf-16"),
    "a lone surrogate": line("a").replace("é".encode(), rb"\ud800"),
    "NaN": line("a").replace('"é"'.encode(), b"NaN"),
    "Infinity": line("a").replace('"é"'.encode(), b"-Infinity"),
    "a control character": line("a").replace("é".encode(), b"\x01"),
    "two values": line("a") + line("b"),
    "too deep": line("a").replace('"é"'.encode(), b"[" * 100 + b"]" * 99),
    "a list": b"[1]",
    "null": b"null",
    "a byte order mark in a later line": codecs.BOM_UTF8 + line("a"),
}


@pytest.mark.parametrize("bad", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_line_that_is_no_json_object_is_named(bad: bytes) -> None:
    assert codes(line("first") + b"\n\n" + bad + b"\n" + line("last")) == [("invalid_json_line", 3, None)]


BAD_FIELDS = [
    (line(None), "missing_required_parameter", "custom_id"),
    (line(method=None), "missing_required_parameter", "method"),
    (line(url=None), "missing_required_parameter", "url"),
    (line(body=None), "missing_required_parameter", "body"),
    (line(7), "invalid_custom_id", "custom_id"),
    (line(""), "invalid_custom_id", "custom_id"),
    (line("ä" * 513), "invalid_custom_id", "custom_id"),
    (line(method="GET"), "invalid_method", "method"),
    (line(url="/v1/chat/completions"), "mismatched_endpoint", "url"),
    (line(body=[]), "invalid_body", "body"),
    (line(later=1), "unknown_parameter", "later"),
    (line("first"), "duplicate_custom_id", "custom_id"),
]


@pytest.mark.parametrize(("bad", "code", "param"), BAD_FIELDS)
def test_a_bad_field_is_named(bad: bytes, code: str, param: str) -> None:
    reader = InputReader(ENDPOINT, MAX_LINES, 2000)
    lines = list(reader.lines(io.BytesIO(b"\n".join([line("first"), bad, line("last")]))))
    assert [(error.code, error.line, error.param) for error in reader.errors] == [(code, 2, param)]
    assert [custom_id for custom_id, _, _ in lines] == ["first", "last"]


def test_all_that_is_wrong_with_a_line_is_said() -> None:
    bad = orjson.dumps({"custom_id": 5, "methd": "POST", "body": [], "other": 1})
    assert codes(line("first") + b"\n" + bad) == [
        ("unknown_parameter", 2, "methd"),  # and so `method` is not said to be missing
        ("unknown_parameter", 2, "other"),
        ("invalid_custom_id", 2, "custom_id"),
        ("missing_required_parameter", 2, "url"),
        ("invalid_body", 2, "body"),
    ]


def test_the_last_of_duplicate_keys_counts() -> None:
    """As in the parser that reads the line again when it runs."""
    twice = line("a")[:-1] + b',"custom_id":"b"}'
    assert [custom_id for custom_id, _, _ in read(twice)[0]] == ["b"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("excess", [-1, 0, 1, 2, 3, 1 << 21])
def test_lines_of_the_greatest_size(end: bytes, excess: int) -> None:
    short = line("long", body={"prompt": ""})
    long = line("long", body={"prompt": "x" * (MAX_LINE_BYTES + excess - len(short))})
    assert len(long) == MAX_LINE_BYTES + excess
    lines, errors = read(line("first") + b"\n" + long + end + (line("last") if end else b""))
    assert [custom_id for custom_id, _, _ in lines] == ["first", *["long"] * (excess <= 0), *["last"] * bool(end)]
    assert [(error.code, error.line) for error in errors] == [("line_too_long", 2)] * (excess > 0)


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\n\t", codecs.BOM_UTF8])
def test_a_file_without_lines(content: bytes) -> None:
    assert codes(content) == [("empty_file", None, None)]


def test_too_many_lines() -> None:
    fits = b"\n".join(line(str(number)) for number in range(MAX_LINES))
    assert codes(fits + b"\n") == []
    assert codes(fits + b"\n" + line("one more")) == [("too_many_lines", None, None)]
    assert codes(b"\n" * MAX_LINES + fits) == []


@pytest.mark.parametrize("content", [b"\n", b"x\n", b'{"custom_id":"a"}\n'])
def test_a_file_of_many_useless_lines_is_not_read_to_its_end(content: bytes) -> None:
    file = io.BytesIO(content * 1_000_000)
    reader = InputReader(ENDPOINT, MAX_LINES, MAX_LINE_BYTES)
    assert list(reader.lines(file)) == []
    assert reader.errors[-1].code == "too_many_lines"
    assert {error.line for error in reader.errors[:-1]} <= set(range(1, MAX_LINES + 1))
    assert file.tell() < 1000


SEGMENTS = st.one_of(
    st.builds(line, st.sampled_from(["a", "b", "c", "é", "d" * 40, 5])),
    st.builds(lambda size: line("big", body={"x": "y" * size}), st.integers(200, 400)),
    st.sampled_from([b"", b" ", b"{", b"\xff", b"\r", b"null", b"\x00", *BAD_JSON.values()]),
    st.binary(max_size=8),
)


@given(
    st.lists(st.tuples(SEGMENTS, st.sampled_from([b"\n", b"\r\n", b"\n\n", b""])), max_size=12),
    st.sampled_from([b"", codecs.BOM_UTF8]),
)
def test_random_files_against_a_slow_reader(parts: list[tuple[bytes, bytes]], mark: bytes) -> None:
    content = mark + b"".join(segment + end for segment, end in parts)
    reader = InputReader(ENDPOINT, 1000, MAX_LINE_BYTES)
    lines = list(reader.lines(io.BytesIO(content)))
    expected, bad_lines = slow_read(content)
    assert lines == expected
    assert [error.line for error in reader.errors if error.code != "empty_file"] == bad_lines


def slow_read(content: bytes) -> tuple[list[tuple[str, int, int]], list[int]]:
    """(lines, numbers of bad lines) with Python's JSON parser, which reads what is no JSON too."""
    lines: list[tuple[str, int, int]] = []
    bad: list[int] = []
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    for number, raw in enumerate(content[start:].split(b"\n"), 1):
        text = raw.rstrip(b"\r\n")
        if len(text) > MAX_LINE_BYTES:
            bad.append(number)
        elif raw.strip():
            try:
                value = json.loads(text.decode(), parse_constant={}.__getitem__)
                json.dumps(value, ensure_ascii=False).encode()
                known = isinstance(value["custom_id"], str) and value["custom_id"] not in [one[0] for one in lines]
                if not known or value["method"] != "POST" or value["url"] != ENDPOINT:
                    raise ValueError
                lines.append((value["custom_id"], start, len(text)))
            except (ValueError, KeyError, TypeError):
                bad.append(number)
        start += len(raw) + 1
    return lines, bad


def run_process(path: Path, max_lines: int = 1000) -> list[Any]:
    command = [sys.executable, "-m", "tokasaurus.server.jobs.validation_process"]
    done = subprocess.run(
        [*command, str(path), ENDPOINT, str(max_lines), "1000"], stdout=subprocess.PIPE, check=True, timeout=240
    )
    return [orjson.loads(part) for part in done.stdout.splitlines()]


def test_the_process_says_the_places_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"".join(line(str(number)) + b"\n" for number in range(1000)))
    *parts, end = run_process(path)
    assert [len(part) for part in parts] == [500, 500]
    assert [custom_id for part in parts for custom_id, _, _ in part] == [str(number) for number in range(1000)]
    assert end == {"errors": [], "num_errors": 0}


def test_the_process_counts_errors_that_it_does_not_show(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"x\n" * 1500)
    (end,) = run_process(path, max_lines=2000)
    assert end["num_errors"] == 1500
    assert [error["line"] for error in end["errors"]] == list(range(1, MAX_SHOWN_ERRORS + 1))


def test_the_process_ends_with_its_reader(tmp_path: Path) -> None:
    """Without a traceback, as if the server was killed."""
    path = tmp_path / "input"
    path.write_bytes(b"".join(line(str(number)) + b"\n" for number in range(20_000)))
    command = [
        sys.executable,
        "-m",
        "tokasaurus.server.jobs.validation_process",
        str(path),
        ENDPOINT,
        "20000",
        "1000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    read_line(process, process.stdout)
    process.stdout.close()
    assert process.wait(120) == -signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
