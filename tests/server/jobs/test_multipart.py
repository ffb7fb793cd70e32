"""The reader of forms: the same result wherever the body is cut."""

import random
from dataclasses import dataclass, field

import pytest

from tests.server.jobs.helpers.forms import BOUNDARY, FORM, PURPOSE, field_part, file_part, form
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.jobs.multipart import MAX_FIELD_BYTES, FormReader


@dataclass
class Received:
    fields: list[tuple[str, str]] = field(default_factory=list)
    filenames: list[str] = field(default_factory=list)
    content: bytes = b""

    def add_field(self, name: str, value: str) -> None:
        self.fields.append((name, value))

    def begin_file(self, filename: str) -> None:
        self.filenames.append(filename)

    def write(self, content: bytes) -> None:
        self.content += content


def read(body: bytes, cuts: list[int]) -> Received:
    received = Received()
    reader = FormReader(FORM, received)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        reader.feed(body[start:end])
    reader.finish()
    return received


# Contents that look like the end of a part, in whole or in part.
TRICKY = [
    b"",
    b"\r\n",
    b"\r\n--",
    f"\r\n--{BOUNDARY}x".encode(),
    f"\r\n--{BOUNDARY[:-1]}\r\n--{BOUNDARY}-\r\n".encode(),
    f"--{BOUNDARY}--\r\n".encode(),
    f"\n--{BOUNDARY}--\n".encode() * 3,
    b"\r\r\n\n--" * 20,
    bytes(range(256)) * 4,
]


@pytest.mark.parametrize("content", TRICKY)
def test_a_file_is_read_exactly_wherever_the_body_is_cut(content: bytes) -> None:
    body = form(PURPOSE, file_part(content), field_part("other", "1"))
    expected = Received([("purpose", "batch"), ("other", "1")], ["a.jsonl"], content)
    for cut in range(len(body) + 1):
        assert read(body, [cut]) == expected
    assert read(body, list(range(1, len(body)))) == expected
    rng = random.Random(3)
    for _ in range(50):
        assert read(body, sorted(rng.choices(range(len(body)), k=5))) == expected


def test_a_body_without_its_last_bytes_is_never_complete() -> None:
    body = form(PURPOSE, file_part(b"content"))
    complete_from = len(body) - len(b"\r\n")  # the line end after the last boundary may be missing
    for end in range(complete_from):
        with pytest.raises(InvalidRequest, match="ends before the last boundary"):
            read(body[:end], [])
    assert read(body[:complete_from], []).content == b"content"


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        ('form-data; name="file"; filename="a b.jsonl"', "a b.jsonl"),
        ("form-data; name=file; filename=a.jsonl", "a.jsonl"),
        ('form-data; filename="first;name=x.jsonl"; name="file"', "first;name=x.jsonl"),
        ('FORM-DATA; name="file"; filename="zwölf €.jsonl"', "zwölf €.jsonl"),
        ('form-data; name="file"; filename="a\\"b.jsonl"', 'a"b.jsonl'),
        ('form-data; name="file"; filename="a.jsonl"; filename*=UTF-8\'\'b', "a.jsonl"),
    ],
)
def test_filenames(disposition: str, filename: str) -> None:
    body = file_part(b"x").replace(b'form-data; name="file"; filename="a.jsonl"', disposition.encode())
    assert read(form(body), []).filenames == [filename]


def test_long_fields_and_headers_are_refused_before_they_are_complete() -> None:
    begun = field_part("purpose", "x" * MAX_FIELD_BYTES)
    assert read(form(begun), []).fields == [("purpose", "x" * MAX_FIELD_BYTES)]
    reader = FormReader(FORM, Received())
    reader.feed(begun.removesuffix(b"\r\n"))
    with pytest.raises(InvalidRequest, match="at most 1024 bytes"):
        reader.feed(b"xx" * 20)
    reader = FormReader(FORM, Received())
    reader.feed(f"--{BOUNDARY}\r\nX-Y: ".encode())
    with pytest.raises(InvalidRequest, match=r"the headers of a part may have at most|header size"):
        reader.feed(b"x" * 4200)


@pytest.mark.parametrize("content_type", ["", "multipart/form-data", f"multipart/form-data; boundary={'x' * 201}"])
def test_a_boundary_is_needed(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        FormReader(content_type, Received())
