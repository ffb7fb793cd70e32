"""kill -9 of the HTTP server under load: it comes back behind the open port, batches are whole, and the engine goes on
with all memory free."""

import http.client
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from tests.end_to_end.helpers.batch_client import BatchClient
from tests.end_to_end.helpers.completions import complete, make_body, stream
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.leftovers import watched_leftovers
from tests.helpers.processes import assert_all_end, is_running
from tests.helpers.tiny_model import save_tiny_model

FLAGS = ("dtype=float32", "kv_cache_num_tokens=8192", "max_tokens_per_forward=256", "max_seqs_per_forward=8")
ENDPOINT = "/v1/completions"
NUM_NUMBERS = 6
"""Different live requests of each kind."""
NUM_CLIENTS = 2
"""Of each kind."""
HEALTHY_S = 10.5
"""A server that was ready for this long is started again without a pause."""


def body(number: int) -> dict[str, object]:
    return make_body(number, n=2, max_tokens=150)


def stream_body(number: int) -> dict[str, object]:
    return make_body(100 + number, max_tokens=300)


def batch_input(num_lines: int) -> bytes:
    """Lines with seeds, two samples each."""
    lines = (
        {"custom_id": f"line {n}", "method": "POST", "url": ENDPOINT, "body": make_body(200 + n, n=2, max_tokens=100)}
        for n in range(num_lines)
    )
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def batch_texts(client: BatchClient, batch_id: str) -> dict[str, list[str]]:
    """The texts of a batch's lines, each of which has one result, once it is completed."""
    batch = client.wait(batch_id, ("completed", "failed", "expired"), 300)
    results = client.results(batch)
    counts = Counter(result["custom_id"] for result in results)
    assert batch["request_counts"] == {"total": len(counts), "completed": len(counts), "failed": 0}
    assert set(counts.values()) == {1}
    bodies = [result["response"]["body"] for result in results]
    assert batch["usage"]["output_tokens"] == sum(one["usage"]["completion_tokens"] for one in bodies)
    return {
        result["custom_id"]: [choice["text"] for choice in one["choices"]]
        for result, one in zip(results, bodies, strict=True)
    }


@dataclass
class Load:
    """Clients that ask all the time. One whose connection is closed asks again."""

    toka: TokaProcess
    num_right: int = 0
    """Whole answers and streams."""
    num_cut: int = 0
    """Requests whose connection was closed."""
    num_connections: int = 0
    """Connections that were opened only to see whether one is refused."""
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        port = self.toka.port
        self._texts = [complete(port, body(number)).texts for number in range(NUM_NUMBERS)]
        self._streams = [stream(port, stream_body(number)).text for number in range(NUM_NUMBERS)]
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(2 * NUM_CLIENTS + 1) as pool:
            clients = [pool.submit(self._run, kind, n) for kind in ("whole", "stream") for n in range(NUM_CLIENTS)]
            clients.append(pool.submit(self._connect))
            try:
                yield
            finally:
                self._is_over.set()
        for client in clients:
            client.result()

    def _run(self, kind: str, number: int) -> None:
        while not self._is_over.wait(0.1):  # others need the processor too
            number = (number + 1) % NUM_NUMBERS
            is_cut, fault = False, ""
            try:
                fault = self._ask(kind, number)
            except ConnectionRefusedError as error:
                fault = str(error)
            except (OSError, http.client.HTTPException):
                is_cut = True
            with self._lock:
                self.num_cut += is_cut
                self.num_right += not is_cut and not fault
                self.faults += [f"{kind} {number}: {fault}"] if fault else []

    def _ask(self, kind: str, number: int) -> str:
        """What is wrong."""
        if kind == "whole":
            answer = complete(self.toka.port, body(number))
            if answer.status != 200:
                return f"{answer.status} {answer.body}"
            return "" if answer.texts == self._texts[number] else f"another text: {answer.texts}"
        streamed = stream(self.toka.port, stream_body(number))
        if streamed.status != 200 or streamed.error_codes:
            return str(streamed)
        if not streamed.is_done:
            begun = streamed.text.rstrip("\ufffd")  # the last character may be incomplete
            if self._streams[number].startswith(begun):
                raise ConnectionResetError("http.client says nothing of a stream that is cut")
        return "" if streamed.text == self._streams[number] else f"another text: {streamed.text}"

    def _connect(self) -> None:
        while not self._is_over.wait(0.05):
            with socket.create_connection(("127.0.0.1", self.toka.port), timeout=30):
                self.num_connections += 1


def kill_server(toka: TokaProcess) -> None:
    """As soon as there is one."""
    wait_for(lambda: "toka-server" in toka.children(), 60)
    pid = toka.children()["toka-server"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid), 20)


def num_ready_again(toka: TokaProcess) -> int:
    return sum(line.startswith("the server is ready again") for line in toka.lines)


def num_files(toka: TokaProcess) -> dict[str, int]:
    """Open files of each process but the server, whose clients come and go."""
    pids = {**toka.children(), "launcher": toka.process.pid}
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items() if name != "toka-server"}


@pytest.mark.parametrize(
    ("num_groups", "num_lines"), [(1, 60), pytest.param(7, 600, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_answers_and_batches_after_kills_of_the_server(num_groups: int, num_lines: int, tmp_path: Path) -> None:
    """Three kills in a group: of a server that works, of one that is just ready again, and of one that starts."""
    save_tiny_model(tmp_path / "model", "llama")
    rng = random.Random(1)
    flags = (f"model={tmp_path / 'model'}", *FLAGS, f"data_dir={tmp_path / 'data'}", "max_restarts=1000")
    with watched_leftovers() as leftovers, running_toka(*flags) as toka:
        client, load = BatchClient(toka.url), Load(toka)
        file = client.upload(batch_input(num_lines))
        expected = batch_texts(client, client.create(ENDPOINT, file)["id"])
        wait_for(lambda: toka.gauge("toka_requests_running") == 0, 60)
        before, files_before = toka.children(), num_files(toka)
        with load.running():
            batch_ids = [client.create(ENDPOINT, file)["id"]]
            for group in range(num_groups):
                if group:
                    time.sleep(HEALTHY_S)
                    batch_ids.append(client.create(ENDPOINT, file)["id"])
                wait_for(lambda: toka.gauge("toka_requests_running") > 0, 60)
                time.sleep(rng.uniform(0.0, 0.5))
                kill_server(toka)
                wait_for(lambda group=group: num_ready_again(toka) == 2 * group + 1, 60)  # type: ignore[misc]
                time.sleep(rng.uniform(0.0, 0.5))
                kill_server(toka)
                wait_for(lambda: "toka-server" in toka.children(), 60)
                time.sleep(rng.uniform(0.0, 1.0))
                kill_server(toka)
                wait_for(lambda group=group: num_ready_again(toka) == 2 * group + 2, 60)  # type: ignore[misc]
            num_right = load.num_right
            wait_for(lambda: load.num_right > num_right + 2 * NUM_CLIENTS, 60)
        # Without the load: live requests go first, and on a slow machine leave little for a batch.
        found = [batch_texts(client, batch_id) for batch_id in batch_ids]
        assert load.faults == []
        assert found == [expected] * num_groups
        assert min(load.num_right, load.num_cut, load.num_connections) > 0
        assert toka.gauge("toka_server_restarts_total") == 3 * num_groups
        for name in ("toka_requests_running", "toka_requests_waiting", "toka_kv_blocks_used"):
            wait_for(lambda name=name: toka.gauge(name) == 0, 60)  # type: ignore[misc]
        after = toka.children()
        assert after.keys() == before.keys()
        assert {name for name in after if after[name] != before[name]} == {"toka-server"}, "no model is loaded again"
        assert num_files(toka) == files_before
        assert toka.stop() == 0
        assert_all_end([*before.values(), *after.values()], within_s=1)
        assert leftovers.found(toka.port) == []


def test_a_server_killed_while_it_drains_ends_all_in_order(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    flags = (f"model={tmp_path / 'model'}", *FLAGS, f"data_dir={tmp_path / 'data'}")
    with running_toka(*flags) as toka, ThreadPoolExecutor(1) as pool:
        children = toka.children()
        asked = [pool.submit(complete, toka.port, make_body(1, n=8, max_tokens=450))]

        def is_seen_to_run() -> bool:
            if asked[-1].done():
                asked.append(pool.submit(complete, toka.port, make_body(1, n=8, max_tokens=450)))
            return toka.gauge("toka_requests_running") > 0

        wait_for(is_seen_to_run, 60)
        os.kill(children["toka-worker-0"], signal.SIGSTOP)  # so that the drain waits for the answer
        toka.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any(line.startswith("stopping") for line in toka.lines), 60)
        time.sleep(0.2)
        os.kill(children["toka-server"], signal.SIGKILL)
        os.kill(children["toka-worker-0"], signal.SIGCONT)
        assert toka.process.wait(timeout=30) == 0
        assert not any("restart" in line for line in toka.lines)
        assert_all_end([*children.values()], within_s=1)
