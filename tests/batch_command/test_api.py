"""Answers that are no OpenAI API's."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tokasaurus.batch_command.api import BatchApi
from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.own_server import GivenServer


@contextmanager
def api_with_answers(*answers: object) -> Iterator[BatchApi]:
    """The API of a server that gives these answers, the last one for ever. str: a page; else JSON."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            value = left.pop(0) if len(left) > 1 else left[0]
            content = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if isinstance(value, str) else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    api = BatchApi(url, None, GivenServer(), print, max_silence_s=0.1, is_local=True)
    try:
        yield api
    finally:
        api.close()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", ["<html>", "", "[]", 3, [], {}, {"data": [3]}, {"data": {}}, {"id": 3, "data": 3}])
@pytest.mark.parametrize(
    "call",
    [
        BatchApi.model_name,
        lambda api: api.upload(Path(__file__)),
        lambda api: api.create("file-1", "/v1/completions", "24h"),
        lambda api: api.retrieve("batch_1"),
        lambda api: api.cancel("batch_1"),
    ],
)
def test_an_answer_of_another_kind_is_named(call: Callable[[BatchApi], object], answer: object) -> None:
    with api_with_answers(answer) as api, pytest.raises(CommandError, match=r"/v1: no OpenAI-compatible API: "):
        call(api)


def test_only_the_id_and_the_status_of_a_batch_are_needed() -> None:
    with api_with_answers({"id": "batch_1", "status": "in_progress", "request_counts": None}) as api:
        batch = api.retrieve("batch_1")
    assert (batch.id, batch.status, batch.num_lines, batch.errors, batch.completion_window) == (
        *("batch_1", "in_progress", 0, []),
        None,
    )


def test_a_batch_is_found_on_a_later_page() -> None:
    pages = [
        {
            "data": [{"id": f"batch_{page}", "status": "completed", "input_file_id": f"file-{page}"}],
            "has_more": page < 3,
        }
        for page in range(4)
    ]
    with api_with_answers(*pages) as api:
        found = api.find("file-2")
        assert found is not None
        assert found.id == "batch_2"
    with api_with_answers(*pages) as api:
        assert api.find("file-4") is None
