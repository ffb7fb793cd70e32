"""A proxy that passes requests on, and loses or replaces some of the answers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


@dataclass
class Proxy:
    url: str = ""
    lost: list[str] = field(default_factory=list)
    """`METHOD path` of requests that reach the server, and whose next answer is lost; taken off one by one."""
    unavailable: int = 0
    """Number of next requests that are answered with 503 instead."""
    cut: int = 0
    """Number of next downloads that end in the middle."""
    passed: list[str] = field(default_factory=list)
    """`METHOD path` of all requests that reached the server."""


@contextmanager
def proxy_before(url: str) -> Iterator[Proxy]:
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if proxy.unavailable:
                proxy.unavailable -= 1
                self.send_error(503)
                return
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if self.headers[name]}
            name = f"{self.command} {self.path}"
            answer = httpx.request(self.command, url + self.path, content=content, headers=headers, timeout=60)
            proxy.passed.append(name)
            if name in proxy.lost:
                proxy.lost.remove(name)
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            if proxy.cut and self.path.endswith("/content"):
                proxy.cut -= 1
                self.wfile.write(answer.content[: len(answer.content) // 2])
                self.close_connection = True
                return
            self.wfile.write(answer.content)

        do_GET = do_POST = forward

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
