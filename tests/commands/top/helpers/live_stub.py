"""A small HTTP server that answers GET /live with made-up samples, as quickly as a test wants."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.commands.top.helpers.scripted_samples import line, sample
from tests.helpers.limits import join


@dataclass
class Script:
    """What the server does; a test may change it meanwhile."""

    make: Callable[[int], dict[str, Any]] = sample
    interval_s: float = 0.02
    status: int = 200
    """Of the answer; another one than 200 has an error as its body."""
    content_type: str = "text/event-stream"
    api_key: str | None = None
    next_second: int = 0
    has_ended: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)

    def refusal(self, key: str | None) -> int | None:
        """The status of an answer that is no stream."""
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return 401
        return None if self.status == 200 else self.status


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        script = self.server.script
        script.paths.append(self.path)
        refused = script.refusal(self.headers.get("Authorization"))
        if refused is not None:
            body = json.dumps({"error": {"message": "no, not now", "type": "t"}}).encode()
            self.send_response(refused)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Type", script.content_type)
        self.end_headers()
        try:
            while not script.has_ended.is_set():
                data = line(script.make(script.next_second))
                script.next_second += 1
                self.wfile.write(b": a comment\r\n\r\ndata: " + data + b"\n")
                self.wfile.flush()
                time.sleep(script.interval_s)
        except OSError:  # the client has gone
            return

    def log_message(self, *_arguments: Any) -> None: ...

    def address_string(self) -> str:
        return "client"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Any, script: Script) -> None:
        self.script = script
        super().__init__(address, _Handler)


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0


@contextmanager
def serving(script: Script, port: int = 0, unix_socket: Path | None = None) -> Iterator[str]:
    """Yields the URL. At the end, the port is closed and streams end."""
    script.has_ended.clear()
    server = _Server(("127.0.0.1", port), script) if unix_socket is None else _UnixServer(str(unix_socket), script)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        script.has_ended.set()
        server.shutdown()
        server.server_close()
        join(thread)
