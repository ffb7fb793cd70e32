"""A small HTTP server with the page and a `/live` that sends given events, fast, slow or not at all."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from tests.helpers.limits import join
from tokasaurus.server.page import read_live_page
from tokasaurus.server.routes.pages import content_policy


@dataclass
class LivePages:
    """What the server sends; tests change it while it runs."""

    url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    interval_s: float = 0.0
    key: str | None = None
    status: int = 200
    """Of /live."""
    ends_after: int | None = None
    """The connection ends after as many events."""
    keys: list[str | None] = field(default_factory=list)
    """Of each request to /live, the header Authorization."""
    num_listening: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def live_pages() -> Iterator[LivePages]:
    pages = LivePages()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] == "/":
                page = read_live_page()
                policy = content_policy(page)
                self.answer(200, "text/html; charset=utf-8", page, **{"Content-Security-Policy": policy})
            elif self.path == "/live":
                self.send_events()
            else:
                self.answer(404, "application/json", b'{"error": {"message": "no such path"}}')

        def answer(self, status: int, content_type: str, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": content_type, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def send_events(self) -> None:
            given = self.headers.get("Authorization")
            pages.keys.append(given)
            if pages.key is not None and given != f"Bearer {pages.key}":
                return self.answer(401, "application/json", b'{"error": {"message": "the API key is missing"}}')
            if pages.status != 200:
                return self.answer(pages.status, "application/json", b'{"error": {"message": "not now"}}')
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            pages.num_listening += 1
            try:
                for event in pages.events[: pages.ends_after]:
                    self.wfile.write(b"data: " + orjson.dumps(event) + b"\n\n")
                    time.sleep(pages.interval_s)
                if pages.ends_after is None:
                    pages.is_over.wait()
            except OSError:
                pass  # the page has left
            finally:
                pages.num_listening -= 1
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pages.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield pages
    finally:
        pages.is_over.set()
        server.shutdown()
        join(thread)
        server.server_close()
