"""Bodies compressed with gzip or deflate: read as if they were not compressed, within the same limits."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from random import Random

import openai
import orjson
import pytest

from tests.helpers.examples import seeds
from tests.server.helpers.bodies_and_errors import COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import connect, parse_answers, read_all
from tokasaurus.server.compressed_bodies import PART_BYTES, Decompressor
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.served_model import ServedModel

MAX_BYTES = 40_000


def raw_deflate(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(content) + stream.flush()


FORMATS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "two files": ("gzip", lambda content: gzip.compress(content[:5]) + gzip.compress(content[5:])),
    "stored": ("gzip", lambda content: gzip.compress(content, 0)),
    "zlib": ("deflate", zlib.compress),
    "raw": ("deflate", raw_deflate),
}


@pytest.fixture(scope="module")
def limited(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("data")
    with live_server(served_model, FakeEngine(), max_request_bytes=MAX_BYTES, data_dir=directory) as server:
        yield server


def compressed(server: LiveServer, path: str, name: str, content: bytes, **headers: str) -> tuple[int, bytes]:
    encoding, compress = FORMATS[name]
    answer = server.http.post(path, content=compress(content), headers={"Content-Encoding": encoding, **headers})
    return answer.status_code, answer.content


@pytest.mark.parametrize("name", FORMATS)
def test_a_compressed_body_is_answered_like_a_plain_one(limited: LiveServer, name: str) -> None:
    for padding in (0, MAX_BYTES // 2):
        content = orjson.dumps(minimal_body(COMPLETIONS) | {"max_tokens": 5}) + b" " * padding
        status, answer = compressed(limited, COMPLETIONS, name, content)
        assert status == 200, answer
        assert orjson.loads(answer)["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("name", FORMATS)
def test_the_limit_counts_decompressed_bytes(limited: LiveServer, name: str) -> None:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    for num_bytes, expected in ((MAX_BYTES, 200), (MAX_BYTES + 1, 413), (300 * MAX_BYTES, 413)):
        status, answer = compressed(limited, COMPLETIONS, name, body + b" " * (num_bytes - len(body)))
        assert status == expected
        if expected == 413:
            assert "max_request_bytes" in assert_openai_error(answer)["message"]


def test_a_bomb_is_refused_after_the_limit(limited: LiveServer) -> None:
    """Far less is decompressed than the gigabyte that it holds, or the answer would take seconds of CPU time."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    bomb = buffer.getvalue() * 16  # files, joined: a gigabyte
    assert len(bomb) < 2 << 20
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
    with connect(limited.url) as connection:
        connection.sendall(head.encode() + bomb[:100_000])
        (answer,) = parse_answers(read_all(connection))
    assert (answer.status, answer.error_code) == (413, "request_too_large")


def test_bodies_together_count_decompressed_bytes(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), max_request_bytes=None, max_body_bytes_in_all=MAX_BYTES) as server:
        status, answer = compressed(server, COMPLETIONS, "gzip", b" " * (MAX_BYTES + 1))
        assert status == 413
        assert f"at most {MAX_BYTES} bytes" in assert_openai_error(answer)["message"]


DAMAGED = {
    "cut": lambda content: content[:-10],
    "checksum": lambda content: content[:-8] + bytes(4) + content[-4:],
    "no gzip": lambda content: b"hello" + content,
    "more after it": lambda content: content + b"hello",
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/v1/batches"])
def test_a_damaged_body_is_a_400(limited: LiveServer, path: str, damage: str) -> None:
    content = DAMAGED[damage](gzip.compress(orjson.dumps(minimal_body(COMPLETIONS))))
    answer = limited.http.post(path, content=content, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert "gzip" in assert_openai_error(answer.content)["message"]


def test_uploads_and_bulk_lines_may_be_compressed(limited: LiveServer) -> None:
    line = orjson.dumps({"custom_id": "1", "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)}) + b"\n"
    for name in FORMATS:
        status, answer = compressed(limited, "/v1/bulk", name, line * 1 + b"\n" * 100_000)
        assert status == 200
        assert orjson.loads(answer)["response"]["status_code"] == 200
        form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + line + b"\r\n--x--\r\n"
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        status, answer = compressed(limited, "/v1/files", name, form, **headers)
        assert status == 200, answer
        stored = orjson.loads(answer)["id"]
        assert limited.http.get(f"/v1/files/{stored}/content").content == line


def test_a_bulk_body_that_is_damaged_later_keeps_the_results_so_far(limited: LiveServer) -> None:
    line = orjson.dumps({"custom_id": "1", "url": COMPLETIONS, "body": minimal_body(COMPLETIONS)}) + b"\n"
    first = gzip.compress(line)
    head = b"POST /v1/bulk HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(limited.url) as connection:
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(first), first))
        received = b""
        while b'"status_code":200' not in received:
            received += connection.recv(65536)
        connection.sendall(b"5\r\nhello\r\n")
        rest = read_all(connection)
    assert not rest.endswith(b"0\r\n\r\n"), "the answer is cut off"


def test_a_get_with_the_header_and_no_body_is_served(limited: LiveServer) -> None:
    assert limited.http.get("/v1/models", headers={"Content-Encoding": "gzip"}).status_code == 200


def test_openais_client_may_compress(limited: LiveServer) -> None:
    """As a transport that compresses would: the client's own call with another body."""
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="none", max_retries=0)
    content = gzip.compress(orjson.dumps(minimal_body(COMPLETIONS)))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert client.post("/completions", content=content, cast_to=dict, options={"headers": headers})["choices"]


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("name", FORMATS)
def test_parts_join_to_the_content_however_the_body_is_cut(name: str, seed: int) -> None:
    random = Random(seed)
    content = random.choice((b"", b"x", random.randbytes(1000), b"ab" * 3 * PART_BYTES, random.randbytes(PART_BYTES)))
    encoding, compress = FORMATS[name]
    body = compress(content)
    decompressor = Decompressor(is_gzip=encoding != "deflate")
    cuts = sorted(random.choices(range(len(body) + 1), k=random.randrange(8)))
    parts = [
        part
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        for part in decompressor.parts(body[start:end])
    ]
    decompressor.finish()
    assert b"".join(parts) == content
    assert max(map(len, parts), default=0) <= PART_BYTES
    shorter = Decompressor(is_gzip=encoding != "deflate")
    list(shorter.parts(body[:-1]))
    with pytest.raises(InvalidRequest, match="ends before the end"):
        shorter.finish()
