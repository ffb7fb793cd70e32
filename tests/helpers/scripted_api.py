"""An OpenAI-compatible API that answers by a script, in the test's own process: streams, errors, and other pages."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from socketserver import UnixStreamServer
from typing import Any

PAUSE_S = 0.05
"""Between two chunks of a slow answer."""


class ScriptedApi(BaseHTTPRequestHandler):
    """Answers with the request's own prompt, n times, in reverse order, in two chunks each. Prompts with a meaning:
    "fail" is a 400, "page" is no API, "slow" takes 1,000 chunks, "break" ends in an error, "think" has reasoning,
    "long" has room for an answer only without max_tokens."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
        is_chat = self.path.endswith("/v1/chat/completions")
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if prompt == "fail" or (prompt == "long" and "max_tokens" in body):
            error = {"message": "prompt is too long", "type": "invalid_request_error"}
            error |= {"code": "context_length_exceeded"} if prompt == "long" else {}
            self._send(400, json.dumps({"error": error}).encode())
        elif prompt == "page":
            self._send(200, b"<html>", "text/html")
        else:
            self._stream(prompt, is_chat, body.get("n", 1))

    def _send(self, status: int, payload: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _stream(self, prompt: str, is_chat: bool, n: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if prompt == "slow":
            for number in range(1000):
                try:
                    self._write({"index": 0, "finish_reason": None, "delta": {"content": f"{number} "}})
                    self.wfile.flush()
                except OSError:
                    self.server.ended_early.append(number)  # type: ignore[attr-defined]
                    return
                time.sleep(PAUSE_S)
        if prompt == "think":
            self._write({"index": 0, "finish_reason": None, "delta": {"reasoning_content": "well"}})
        for index in reversed(range(n)):
            for text in (f"{'chat' if is_chat else 'text'} {prompt}", f" {index}"):
                self._write(
                    {"index": index, "finish_reason": None}
                    | ({"delta": {"content": text}} if is_chat else {"text": text})
                )
        if prompt == "break":
            self.wfile.write(b'data: {"error": {"message": "the engine died", "type": "server_error"}}\n\n')
            return
        usage = {"prompt_tokens": 3, "completion_tokens": 40, "total_tokens": 43}
        self._write(usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def _write(self, choice: dict[str, Any] | None = None, usage: dict[str, int] | None = None) -> None:
        choices = [] if choice is None else [choice]
        chunk = {"id": "x", "object": "x", "created": 0, "model": "m", "choices": choices, "usage": usage}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_: object) -> None: ...


class UnixServer(UnixStreamServer):
    def __init__(self, path: str) -> None:
        super().__init__(path, ScriptedApi)
        self.requests: list[tuple[str, str, Any]] = []


@contextmanager
def scripted_api() -> Iterator[HTTPServer]:
    """Its `requests` are (path, Authorization, body); its `ended_early` the last chunks of stopped answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedApi)
    server.requests = []  # type: ignore[attr-defined]
    server.ended_early = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
