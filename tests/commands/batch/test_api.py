"""Answers that are no OpenAI API's."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tokasaurus.commands.batch.api import BatchApi
from tokasaurus.commands.batch.errors import CommandError


@contextmanager
def api_with_answers(*answers: object, status: int = 200) -> Iterator[BatchApi]:
    """The API of a server that gives these answers, the last one for ever. str: a page; else JSON."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            value = left.pop(0) if len(left) > 1 else left[0]
            content = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(value, str) else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    api = BatchApi(url, None, print, max_silence_s=0.1, is_local=True)
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
        lambda api: api.upload(Path(__file__)),
        lambda api: api.create("file-1", "/v1/completions", "24h"),
        lambda api: api.retrieve("batch_1"),
        lambda api: api.cancel("batch_1"),
    ],
)
def test_an_answer_of_another_kind_is_named(call: Callable[[BatchApi], object], answer: object) -> None:
    with api_with_answers(answer) as api, pytest.raises(CommandError, match=r"/v1: no OpenAI-compatible API: "):
        call(api)


@pytest.mark.parametrize("answer", ["<html>\n<body>\n", "", "[]", "{\n}", 3, {"data": []}, {"custom_id": 3}])
def test_an_answer_of_another_kind_has_no_results_so_far(answer: object) -> None:
    with api_with_answers(answer) as api:
        assert api.results_from("batch_1", 0) == []
    with api_with_answers('{"custom_id":"a"}\n{"custom_id":"b"}\n<html>\n') as api:
        assert api.results_from("batch_1", 0) == [b'{"custom_id":"a"}\n', b'{"custom_id":"b"}\n']


def test_only_the_id_and_the_status_of_a_batch_are_needed() -> None:
    with api_with_answers({"id": "batch_1", "status": "in_progress", "request_counts": None}) as api:
        batch = api.retrieve("batch_1")
    assert (batch.id, batch.status, batch.num_lines, batch.errors) == ("batch_1", "in_progress", 0, [])


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


def no_second_try(seconds: float) -> None:
    raise AssertionError(f"it must not be tried again, as in {seconds} s")


def refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:PORT/v1", "Connection refused; is the server running"),
        ("https://127.0.0.1:PORT/v1", "Connection refused; is the server running"),
        ("http://no.such.host.invalid/v1", "is the server running"),
        ("ftp://127.0.0.1/v1", "unsupported protocol"),
        ("127.0.0.1:10210/v1", "missing an 'http://' or 'https://' protocol"),
        ("http:///v1", "is the server running"),
    ],
)
def test_a_first_request_that_cannot_succeed_is_not_tried_again(url: str, message: str) -> None:
    url = url.replace("PORT", str(refused_port()))
    api = BatchApi(url, None, print, max_silence_s=300, is_local=False, wait=no_second_try)
    with pytest.raises(CommandError, match=message) as refused:
        api.retrieve("m")
    assert "\n" not in str(refused.value)
    api.close()


def test_tls_with_a_server_that_has_none_is_not_tried_again() -> None:
    with api_with_answers({"data": []}) as plain:
        url = plain._base_url.replace("http:", "https:")
        api = BatchApi(url, None, print, max_silence_s=300, is_local=False, wait=no_second_try)
        with pytest.raises(CommandError, match=f"^no answer from {url}: "):
            api.retrieve("m")
        api.close()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 421])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    with api_with_answers({"error": {"message": "no"}}, status=status) as server:
        api = BatchApi(server._base_url, None, print, max_silence_s=300, is_local=False)
        with pytest.raises(CommandError, match=f"answered {status}: no"):
            api.retrieve("m")
        api.close()


def test_a_server_that_has_answered_may_be_gone_for_a_while() -> None:
    notes: list[str] = []
    with api_with_answers({"id": "m", "status": "in_progress"}) as server:
        api = BatchApi(server._base_url, None, notes.append, max_silence_s=0.5, is_local=False)
        assert api.retrieve("m").id == "m"
    with pytest.raises(CommandError, match="Connection refused"):
        api.retrieve("m")
    (note,) = notes
    assert note.endswith("trying again for up to 0.5 s")
    api.close()


@pytest.mark.parametrize("url", ["http://x:port/v1", "http://[::1/v1"])
def test_what_is_no_url_is_one_line(url: str) -> None:
    with pytest.raises(CommandError) as refused:
        BatchApi(url, None, print, max_silence_s=300, is_local=False)
    assert str(refused.value).startswith(f"base_url={url}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x00"])
def test_a_key_that_cannot_be_sent_is_one_line(key: str) -> None:
    with pytest.raises(CommandError, match=r"^api_key: contains characters that cannot be sent"):
        BatchApi("http://127.0.0.1/v1", key, print, max_silence_s=300, is_local=False)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "nonsense://"])
def test_this_machine_is_reached_without_a_proxy(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)
    with api_with_answers({"id": "m", "status": "in_progress"}) as server:
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            url = server._base_url.replace("127.0.0.1", host)
            api = BatchApi(url, None, print, max_silence_s=300, is_local=False)
            assert api.retrieve("m").id == "m"
            api.close()
    is_usable = proxy.startswith("http")
    with pytest.raises(CommandError, match="through the proxy of http_proxy" if is_usable else "variable http_proxy"):
        BatchApi("http://192.0.2.1/v1", None, print, max_silence_s=300, is_local=False).retrieve("m")
