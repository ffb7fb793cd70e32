"""Connections of clients that waste them: they are closed in time, and keep nobody out.

`python -m torture.connections` prints the table.
"""

import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.tiny_model import save_tiny_model
from torture.helpers.connection_flood import connection_flood, raise_file_limit
from torture.helpers.raw_requests import connect, exchange, head, json_request, status_of
from torture.process_memory import MB, measure_growth, num_open_files, rss_bytes
from torture.rows import Row, add_row, print_table

PART = "connections"
KEY = "torture-key"
COMPLETIONS = "/v1/completions"
FLAGS = (f"api_key={KEY}", "dtype=float32", "kv_cache_num_tokens=65536")

NUM_SLOW = 20
"""Connections of each kind."""
CLOSED_LIMIT_S = 60.0
WATCH_S = 75.0

NUM_FLOOD = 20_000
NUM_REQUESTS = 40
REQUEST_LIMIT_S = 5.0
REQUEST_PAUSE_S = 0.7
FLOOD_LIMIT_BYTES = 300 * MB
BUILD_UP_S = 60.0


@dataclass
class SlowClient:
    """Sends `content`, then a byte a second of `drip`, until the server has closed the connection."""

    connection: socket.socket
    drip: bytes
    opened_s: float = field(default_factory=time.monotonic)
    status: bytes = b""
    closed_s: float | None = None
    """Seconds from the opening to the end, in both directions."""
    has_end: bool = False

    def step(self) -> None:
        """Called once a second."""
        try:
            while select.select([self.connection], [], [], 0)[0] and not self.has_end:
                received = self.connection.recv(65536)
                self.status = self.status or received[9:12]
                self.has_end = not received
            # Once the server has closed, what is sent is answered by a reset.
            self.connection.send(self.drip or (b"x" if self.has_end else b""))
        except OSError:
            self.closed_s = time.monotonic() - self.opened_s
            self.connection.close()


SLOW_KINDS: dict[str, tuple[bytes, bytes]] = {
    "silent": (b"", b""),
    "headers, a byte a second": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"x"),
    "a body, a byte a second": (
        head("POST", COMPLETIONS, KEY, "Content-Type: application/json", "Content-Length: 1000"),
        b" ",
    ),
    "a chunked body, a byte a second": (
        head("POST", "/v1/chat/completions", KEY, "Transfer-Encoding: chunked") + b"1000\r\n",
        b" ",
    ),
    "a body without a key, a byte a second": (
        head("POST", COMPLETIONS, None, "Content-Length: 1000").replace(b"Connection: close\r\n", b""),
        b" ",
    ),
}


def run_slow(toka: TokaProcess, rows: list[Row]) -> None:
    server = toka.children()["toka-server"]
    num_files = num_open_files(server)
    clients: dict[str, list[SlowClient]] = {kind: [] for kind in SLOW_KINDS}
    for kind, (content, drip) in SLOW_KINDS.items():
        for _ in range(NUM_SLOW):
            connection = connect(toka.port)
            connection.sendall(content)
            clients[kind].append(SlowClient(connection, drip))
    began_s = time.monotonic()
    everyone = [client for group in clients.values() for client in group]
    while time.monotonic() < began_s + WATCH_S and any(client.closed_s is None for client in everyone):
        for client in everyone:
            if client.closed_s is None:
                client.step()
        time.sleep(1)
    for kind, group in clients.items():
        seconds = [client.closed_s for client in group if client.closed_s is not None]
        statuses = sorted({client.status.decode() or "none" for client in group})
        longest = f"longest {max(seconds):.0f} s" if seconds else "none was closed"
        measured = f"{len(seconds)} of {NUM_SLOW} closed, {longest}, status {', '.join(statuses)}"
        is_in_time = len(seconds) == NUM_SLOW and max(seconds) <= CLOSED_LIMIT_S
        add_row(rows, PART, f"{NUM_SLOW} connections, {kind}", measured, f"{CLOSED_LIMIT_S:.0f} s", is_in_time)
    left = num_open_files(server) - num_files
    add_row(rows, PART, "file descriptors of the server after these", f"{left:+d}", "0", left <= 0)


def ask_once(toka: TokaProcess) -> float:
    """Seconds of a request over a connection of its own. Raises AssertionError unless it is answered with 200."""
    began_s = time.monotonic()
    answer = exchange(toka.port, [json_request(COMPLETIONS, KEY, model="default", prompt="hello", max_tokens=4)])
    assert status_of(answer) == 200, answer[:300]
    return time.monotonic() - began_s


def run_flood(toka: TokaProcess, rows: list[Row], num_connections: int = NUM_FLOOD) -> None:
    """Half of the requests come while the connections are opened, half once they are."""
    file_limit = raise_file_limit()
    seconds: list[float] = []
    wrong: list[str] = []
    counts: list[int] = []

    def ask(number_at_end: int, until: Callable[[], bool]) -> None:
        while len(seconds) + len(wrong) < number_at_end or not until():
            if len(seconds) + len(wrong) < number_at_end:
                try:
                    seconds.append(ask_once(toka))
                except (AssertionError, OSError) as error:
                    wrong.append(f"{type(error).__name__} {error}")
            time.sleep(REQUEST_PAUSE_S)

    def load() -> None:
        with connection_flood(toka.port, num_connections) as flood:
            wait_for(lambda: flood.total_opened > 0, BUILD_UP_S)  # the processes have started
            deadline_s = time.monotonic() + BUILD_UP_S
            ask(NUM_REQUESTS // 2, lambda: flood.total_opened >= num_connections or time.monotonic() > deadline_s)
            ask(NUM_REQUESTS, lambda: True)
            counts.extend([flood.total_open, flood.total_opened])

    server = toka.children()["toka-server"]
    growth = measure_growth(server, rss_bytes(server), load)
    num_open, num_opened = counts
    what = f"{num_connections:,} connections without a key (limit of open files {file_limit:,})"
    is_flooded = num_opened >= num_connections
    measured = f"{num_open:,} open at the end, {num_opened:,} opened in all"
    add_row(rows, PART, what, measured, f"{num_connections:,} opened", is_flooded)
    longest = f"longest {max(seconds):.2f} s" if seconds else "none was answered"
    measured = f"{len(seconds)} of {NUM_REQUESTS} answered 200, {longest}{'; ' + wrong[0] if wrong else ''}"
    is_served = len(seconds) == NUM_REQUESTS and max(seconds) <= REQUEST_LIMIT_S
    add_row(rows, PART, "requests with a key meanwhile", measured, f"{REQUEST_LIMIT_S:.0f} s", is_served)
    is_small = growth.peak < FLOOD_LIMIT_BYTES
    limit = f"{FLOOD_LIMIT_BYTES // MB} MB"
    add_row(rows, PART, "memory of the server under these connections", f"{growth}", limit, is_small)


def run_connections() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_tiny_model(model, "llama")
        raise_file_limit()
        with running_toka(f"model={model}", *FLAGS) as toka:
            ask_once(toka)
            run_slow(toka, rows)
            run_flood(toka, rows)
            assert toka.process.poll() is None, "toka has ended"
    return rows


if __name__ == "__main__":
    found = run_connections()
    print_table(found)
    sys.exit(0 if all(row.passed for row in found) else 1)
