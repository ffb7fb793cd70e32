"""Requests that ask for far too much memory: each is refused, and the server process stays small.

`python -m torture.limits` prints the table.
"""

import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.tiny_model import save_tiny_model
from torture.helpers.raw_requests import (
    as_chunks,
    connect,
    exchange,
    filling,
    head,
    json_request,
    status_of,
)
from torture.process_memory import MB, measure_growth, rss_bytes
from torture.rows import Row, add_row, print_table

PART = "limits"
LIMIT_BYTES = 200 * MB
KEY = "torture-key"
WRITE_TIMEOUT_S = 5
NUM_HELD = 5000
"""Connections that each hold nearly as many headers as are allowed."""
FLAGS = (f"api_key={KEY}", "dtype=float32", "kv_cache_num_tokens=65536", "max_seqs_per_forward=256")
CONSTANTS = {"max_answer_values": 10_000, "write_timeout_seconds": WRITE_TIMEOUT_S}
"""So that little is enough to reach them."""
SHORT_QUEUE = ("max_queued_sequences=1000",)
UNREAD_SAMPLES, UNREAD_TOKENS = 1024, 400

JSON, NDJSON = "Content-Type: application/json", "Content-Type: application/x-ndjson"
CHUNKED = "Transfer-Encoding: chunked"


@dataclass(frozen=True)
class Load:
    what: str
    run: Callable[[TokaProcess], str]
    """Returns the outcome."""
    expected: str
    """The outcome that is right."""


def one_long_header(toka: TokaProcess) -> str:
    pieces = [b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: "]
    return f"{status_of(exchange(toka.port, itertools.chain(pieces, filling(300 * MB))))}"


def many_headers(toka: TokaProcess) -> str:
    lines = (b"".join(b"X-%d-%d: %s\r\n" % (block, line, b"v" * 80) for line in range(1000)) for block in range(3200))
    pieces = [b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"]
    return f"{status_of(exchange(toka.port, itertools.chain(pieces, lines)))}"


def headers_of_many_connections(toka: TokaProcess) -> str:
    """Each connection stays below the limit for one. Those that the server closes are no longer held."""
    content = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 60_000
    held = []
    for _ in range(NUM_HELD):
        connection = connect(toka.port)
        connection.sendall(content)
        held.append(connection)
    health = httpx.get(f"{toka.url}/health", timeout=30).status_code
    for connection in held:
        connection.close()
    return f"/health {health}"


def long_url(toka: TokaProcess) -> str:
    pieces = itertools.chain([b"GET /v1/models?"], filling(50 * MB), [b" HTTP/1.1\r\nHost: localhost\r\n\r\n"])
    return f"{status_of(exchange(toka.port, pieces))}"


def large_body(toka: TokaProcess, key: str | None, is_chunked: bool) -> str:
    size = CHUNKED if is_chunked else f"Content-Length: {400 * MB}"
    body = as_chunks(filling(400 * MB)) if is_chunked else filling(400 * MB)
    start = head("POST", "/v1/chat/completions", key, JSON, size)
    return f"{status_of(exchange(toka.port, itertools.chain([start], body)))}"


def long_bulk_line(toka: TokaProcess) -> str:
    body = itertools.chain([b'{"custom_id": "'], filling(400 * MB), [b'"}\n'])
    pieces = itertools.chain([head("POST", "/v1/bulk", KEY, NDJSON, CHUNKED)], as_chunks(body))
    answer = exchange(toka.port, pieces)
    line = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    return f"{status_of(answer)}, of the line {line['response']['status_code']}"


def long_text_to_tokenize(toka: TokaProcess) -> str:
    return f"{status_of(exchange(toka.port, [json_request('/tokenize', KEY, prompt='hello ' * 3_400_000)]))}"


def long_stop_string(toka: TokaProcess) -> str:
    request = json_request("/v1/completions", KEY, model="default", prompt="a", stop="s" * 1_000_000)
    return f"{status_of(exchange(toka.port, [request]))}"


def unread_stream(toka: TokaProcess) -> str:
    fields = {"n": UNREAD_SAMPLES, "max_tokens": UNREAD_TOKENS, "ignore_eos": True, "logprobs": 20, "stream": True}
    num_before = _metrics(toka)["toka_generation_tokens_total"]
    with connect(toka.port, receive_buffer=4096) as connection:
        connection.sendall(json_request("/v1/completions", KEY, model="default", prompt="a", **fields))
        wait_for(lambda: _num_sequences(toka) > 0, 20)
        wait_for(lambda: _num_sequences(toka) == 0, WRITE_TIMEOUT_S + 30)
    num_tokens = _metrics(toka)["toka_generation_tokens_total"] - num_before
    return "closed" if num_tokens < UNREAD_SAMPLES * UNREAD_TOKENS else "open until the last token"


def too_large_answer(toka: TokaProcess) -> str:
    fields = {"n": 65_536, "max_tokens": 16, "ignore_eos": True}
    answer = exchange(toka.port, [json_request("/v1/completions", KEY, model="default", prompt="a", **fields)])
    wait_for(lambda: _num_sequences(toka) == 0, 60)
    return f"{status_of(answer)}"


def too_many_samples(toka: TokaProcess) -> str:
    request = json_request("/v1/completions", KEY, model="default", prompt="a", n=65_536)
    return f"{status_of(exchange(toka.port, [request]))}"


def too_many_prompts(toka: TokaProcess) -> str:
    request = json_request("/v1/completions", KEY, model="default", prompt=["a"] * 50_000, n=2)
    return f"{status_of(exchange(toka.port, [request]))}"


def full_queue(toka: TokaProcess) -> str:
    """100 clients at once, each of which asks for all that the queue has place for."""
    request = json_request("/v1/completions", KEY, model="default", prompt="a", n=1000, max_tokens=100, ignore_eos=True)
    with ThreadPoolExecutor(100) as pool:
        found = Counter(status_of(answer) for answer in pool.map(lambda _: exchange(toka.port, [request]), range(100)))
    return ", ".join(f"{count} times {status}" for status, count in sorted(found.items()))


LOADS = [
    Load("one header of 300 MB, without a key", one_long_header, "431"),
    Load("300 MB of headers, without a key", many_headers, "431"),
    Load(f"300 MB of headers on {NUM_HELD:,} connections, without a key", headers_of_many_connections, "/health 200"),
    Load("a URL of 50 MB, without a key", long_url, "414"),
    Load("a body of 400 MB", lambda toka: large_body(toka, KEY, False), "413"),
    Load("a body of 400 MB without content-length", lambda toka: large_body(toka, KEY, True), "413"),
    Load("a body of 400 MB, without a key", lambda toka: large_body(toka, None, False), "401"),
    Load("the same without content-length", lambda toka: large_body(toka, None, True), "401"),
    Load("a bulk line of 400 MB", long_bulk_line, "200, of the line 413"),
    Load("/tokenize with 20 MB", long_text_to_tokenize, "400"),
    Load("a stop string of 1,000,000 characters", long_stop_string, "400"),
    Load("a stream of 409,600 tokens with 20 logprobs each, never read", unread_stream, "closed"),
    Load("n=65,536 where an answer may have 10,000 values", too_large_answer, "400"),
]
QUEUE_LOADS = [
    Load("n=65,536 with max_queued_sequences=1,000", too_many_samples, "400"),
    Load("50,000 prompts with n=2, the same flag", too_many_prompts, "400"),
    Load("100 bodies with n=1,000 at once, the same flag", full_queue, "1 times 200, 99 times 429"),
]


def _metrics(toka: TokaProcess) -> dict[str, float]:
    answer = exchange(toka.port, [head("GET", "/metrics", KEY)])
    lines = answer.decode().partition("\r\n\r\n")[2].splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}


def _num_sequences(toka: TokaProcess) -> float:
    """Running and waiting."""
    metrics = _metrics(toka)
    return metrics["toka_requests_running"] + metrics["toka_requests_waiting"]


def _warm_up(toka: TokaProcess) -> None:
    for path in ("/v1/completions", "/tokenize"):
        fields = {"n": 8, "max_tokens": 8, "logprobs": 2} if path == "/v1/completions" else {}
        request = json_request(path, KEY, model="default", prompt="hello", **fields)
        assert status_of(exchange(toka.port, [request])) == 200


def _run_loads(
    model: Path, flags: tuple[str, ...], loads: list[Load], rows: list[Row], constants: Mapping[str, int]
) -> None:
    with running_toka(f"model={model}", *FLAGS, *flags, **constants) as toka:
        _warm_up(toka)
        server = toka.children()["toka-server"]
        base_bytes = rss_bytes(server)
        for load in loads:
            outcomes: list[str] = []

            def run(load: Load = load, outcomes: list[str] = outcomes) -> None:
                try:
                    outcomes.append(load.run(toka))
                except (AssertionError, OSError, httpx.HTTPError, ValueError, LookupError) as error:
                    outcomes.append(f"{type(error).__name__} {error}")

            growth = measure_growth(server, base_bytes, run)
            is_small = growth.peak < LIMIT_BYTES and growth.later < LIMIT_BYTES
            limit = f"{LIMIT_BYTES // MB} MB; {load.expected}"
            passed = is_small and outcomes == [load.expected]
            add_row(rows, PART, load.what, f"{growth}; {outcomes[0]}", limit, passed)
        assert toka.process.poll() is None, "toka has ended"


def run_limits() -> list[Row]:
    """Memory of the server process, over its memory after a first request."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_tiny_model(model, "llama")
        _run_loads(model, (), LOADS, rows, CONSTANTS)
        _run_loads(model, SHORT_QUEUE, QUEUE_LOADS, rows, {})
    return rows


if __name__ == "__main__":
    found = run_limits()
    print_table(found)
    sys.exit(0 if all(row.passed for row in found) else 1)
