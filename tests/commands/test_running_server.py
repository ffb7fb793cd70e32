"""Streams of chunks as other servers write them: whatever lines and parts they consist of."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tokasaurus.commands.running_server import NotAnswered, stream_of

TEXTS = ["plain", "a\u2028b\u2029c\x85d", "\x0b\x0c\x1c\x1d\x1e", "é😀", ""]
CHUNKS = [{"choices": [{"index": 0, "text": text}]} for text in TEXTS]


def read(content: bytes, part_bytes: int = 1 << 20) -> Iterator[object]:
    """What a server's answer with this content means, if it arrives in parts of this size."""

    def parts() -> Iterator[bytes]:
        for start in range(0, len(content), part_bytes):
            yield content[start : start + part_bytes]

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=parts()))
    with httpx.Client(base_url="http://server/v1", transport=transport) as client:
        yield from stream_of(client, "completions", {})


def event(chunk: object, start: str = "data: ", indent: int | None = None, line_end: str = "\n") -> bytes:
    """As servers write it that escape nothing."""
    lines = json.dumps(chunk, ensure_ascii=False, indent=indent).split("\n")
    return "".join(f"{start}{line}{line_end}" for line in lines).encode() + line_end.encode()


@pytest.mark.parametrize("part_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["data: ", "data:"])
@pytest.mark.parametrize("indent", [None, 1])
def test_every_event_is_a_chunk(part_bytes: int, line_end: str, start: str, indent: int | None) -> None:
    between = f": a comment{line_end}event: chunk{line_end}id: 3{line_end}".encode()
    content = b"".join(between + event(chunk, start, indent, line_end) for chunk in CHUNKS)
    assert list(read(content + f"data: [DONE]{line_end}{line_end}".encode(), part_bytes)) == CHUNKS


@pytest.mark.parametrize("num_cut", [0, 1, 2])
def test_the_last_line_ends_may_be_missing(num_cut: int) -> None:
    content = b"".join(map(event, CHUNKS))
    assert list(read(content[: len(content) - num_cut])) == CHUNKS


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (b'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
        (b'data: {"choices": [{"ind\n\n', "sent an event that is no chunk"),
        (b"data: <html>\n\n", "sent an event that is no chunk"),
        (b'data: {"object": "other"}\n\n', "sent an event that is no chunk"),
    ],
)
def test_an_answer_that_breaks_is_not_taken_for_a_whole_one(last: bytes, reason: str) -> None:
    chunks = read(b"".join(map(event, CHUNKS)) + last)
    assert [next(chunks) for _ in CHUNKS] == CHUNKS
    with pytest.raises(NotAnswered, match=f"^{reason}$"):
        next(chunks)


@pytest.mark.parametrize("page", [b"", b"<html>", b"data: <html>\n\n", b"data: {}\n\n", b"data: [DONE]\n\n"])
def test_a_page_without_chunks_is_no_answer(page: bytes) -> None:
    with pytest.raises(NotAnswered, match=r"^no OpenAI-compatible API$"):
        list(read(page))
