"""Batches of a real server whose processes are killed, beside the same batches undisturbed."""

import itertools
import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.end_to_end.helpers.batch_client import BatchClient
from tests.end_to_end.helpers.batch_lines import ENDPOINTS, find_faults, input_file
from tests.end_to_end.helpers.toka_process import TokaProcess, free_port, running_toka, starting_toka, wait_for
from tests.helpers.processes import assert_all_end, is_running

LAUNCHER, SERVER, WORKER = "launcher", "toka-server", "toka-worker-0"
VICTIMS = (SERVER, "toka-manager", WORKER, LAUNCHER)
FLAGS = ("dtype=float32", "kv_cache_num_tokens=65536", "max_seqs_per_forward=16", "max_restarts=1000")
_POLL_S = 0.01
_START_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 240.0
_MAX_BLIND_S = 3.0
_BLIND_SHARE = 0.25
_NUM_LIVE = 16
"""Live requests at a time."""


@dataclass
class RestartedToka:
    """Started again on its port whenever it has ended. Within the context of `stack`."""

    stack: ExitStack
    flags: tuple[str, ...]
    port: int = field(default_factory=free_port)
    kills: Counter[str] = field(default_factory=Counter)
    num_starts: int = 0
    _toka: TokaProcess | None = None
    _pids: set[int] = field(default_factory=set)

    @property
    def client(self) -> BatchClient:
        return BatchClient(f"http://127.0.0.1:{self.port}")

    def start(self) -> None:
        """If it does not run: starts it, and returns at once."""
        if self._toka is None or self._toka.process.poll() is not None:
            self._toka = self.stack.enter_context(starting_toka(self.port, *self.flags))
            self._pids = set()
            self.num_starts += 1

    def wait_for(self, title: str) -> int:
        """The id of a child process, as soon as there is one; toka is started again if it ends before."""
        found: list[int] = []

        def has_child() -> bool:
            self.start()
            children = self.toka.children()
            found.extend(pid for name, pid in children.items() if name == title)
            return bool(found)

        wait_for(has_child, _START_TIMEOUT_S)
        return found[0]

    def wait_until_it_answers(self) -> None:
        wait_for(lambda: self.is_answering, _START_TIMEOUT_S)

    @property
    def is_answering(self) -> bool:
        """Whether the HTTP server answers; toka is started if it has ended."""
        self.start()
        try:
            return httpx.get(f"{self.client.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def toka(self) -> TokaProcess:
        assert self._toka is not None
        return self._toka

    def kill(self, victim: str) -> None:
        """kill -9. When the launcher is gone, all others must end within seconds."""
        children: dict[str, int] = {}
        is_sent = False
        while not is_sent:
            pid = self.wait_for(SERVER if victim == LAUNCHER else victim)
            children = self.toka.children()
            if victim == LAUNCHER:
                pid = self.toka.process.pid
            # Of the process before it, which ended with the one that was killed last, only the id may be left.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                is_sent = True
        self.kills[victim] += 1
        if victim == LAUNCHER:
            self.toka.process.wait(timeout=20)
            assert_all_end(list(children.values()), within_s=20)
        else:
            wait_for(lambda: not is_running(pid), 20)


@dataclass
class Outcome:
    """Of batches that ran to their end."""

    url: str
    """Of the server that has them."""
    batches: list[dict[str, Any]]
    results: list[list[dict[str, Any]]]
    """Of each batch."""


class KilledBatches:
    """One batch for each endpoint, of the same lines."""

    def __init__(self, model: Path, directory: Path, num_lines: int, seed: int) -> None:
        """directory: for data directories."""
        self._flags = (f"model={model}", *FLAGS)
        self._own = directory / "killed"
        self._copy = directory / "undisturbed"
        self._num_lines = num_lines
        self._rng = random.Random(seed)
        self._ids: list[str] = []
        self.kills: Counter[str] = Counter()
        self.num_starts = 0
        self._max_seen = 0
        self.lost: list[str] = []
        """Results that a client had seen counted, and that were gone after a kill."""

    def prepare(self) -> None:
        """Validates the batches, with two kills. Then copies the data directory: seeds are drawn, and no line has run.

        The worker is stopped meanwhile, so that none can."""
        with ExitStack() as stack:
            toka = self._toka(stack)
            self._start_stopped(toka)
            client = toka.client
            files = [client.upload(input_file(endpoint, self._num_lines)) for endpoint in ENDPOINTS]
            created = [client.create(endpoint, file) for endpoint, file in zip(ENDPOINTS, files, strict=True)]
            self._ids = [batch["id"] for batch in created]
            time.sleep(self._rng.uniform(0.0, 0.3))
            toka.kill(SERVER)
            self._start_stopped(toka)
            validated = [client.wait(batch_id, ("in_progress", "failed"), 60) for batch_id in self._ids]
            toka.kill(LAUNCHER)
            self._count(toka)
        for batch in validated:
            assert batch["status"] == "in_progress", batch
            assert batch["request_counts"] == {"total": self._num_lines, "completed": 0, "failed": 0}
        shutil.copytree(self._own, self._copy)

    def run_undisturbed(self) -> list[list[dict[str, Any]]]:
        """The results of each batch of the copy, which no kill disturbs."""
        with running_toka(*self._flags, f"data_dir={self._copy}") as toka:
            outcome = self._wait_for_end(BatchClient(toka.url))
            assert toka.stop() == 0
        return outcome.results

    def ask_live(self, url: str) -> list[list[dict[str, Any]]]:
        """The answers to the same lines, in the form of results: live requests with the seeds of the copy."""
        query = "SELECT custom_id, seed FROM lines ORDER BY key"
        rows = iter(self._query(self._copy, query))
        answers = []
        for endpoint in ENDPOINTS:
            lines = [orjson.loads(line) for line in input_file(endpoint, self._num_lines).splitlines()]
            seeds = dict(itertools.islice(rows, self._num_lines))
            with ThreadPoolExecutor(_NUM_LIVE) as pool:
                answers.append(list(pool.map(partial(_ask, url, seeds), lines)))
        return answers

    @contextmanager
    def killed_run(self, victims: list[str], kill_at_end: bool = False) -> Iterator[Outcome]:
        """Kills the victims in turn, at random moments before nine tenths of the lines have a result. The server still
        runs within the context.

        kill_at_end: one more kill of the server, when the last line has its result."""
        num_all = len(ENDPOINTS) * self._num_lines
        moments = sorted(self._rng.uniform(0.0, 0.9 * num_all) for _ in victims)
        with ExitStack() as stack:
            toka = self._toka(stack)
            toka.start()
            for number, (victim, moment) in enumerate(zip(victims, moments, strict=True)):
                if number > 0 and self._rng.random() < _BLIND_SHARE:  # often while it starts
                    time.sleep(self._rng.uniform(0.0, _MAX_BLIND_S))
                else:
                    self._wait_for_results(toka, moment)
                toka.kill(victim)
            if kill_at_end:
                self._wait_for_results(toka, num_all)
                toka.kill(SERVER)
            self._wait_for_results(toka, num_all)
            outcome = self._wait_for_end(toka.client)
            toka.toka.wait_until_ready()
            yield outcome
            assert toka.toka.stop() == 0
            self._count(toka)

    def find_faults(self, outcome: Outcome, expected: list[list[dict[str, Any]]]) -> list[str]:
        """What is wrong with the batches, compared with the expected results, and with what their server, which has
        ended, left behind."""
        faults = list(self.lost)
        for batch, results, right in zip(outcome.batches, outcome.results, expected, strict=True):
            faults += [f"{batch['endpoint']}: {fault}" for fault in find_faults(batch, results, right, self._num_lines)]
        return faults + self._stored_faults()

    def integrity(self) -> str:
        """What SQLite finds in the database."""
        return str(self._query(self._own, "PRAGMA integrity_check")[0][0])

    def _stored_faults(self) -> list[str]:
        faults = [] if self.integrity() == "ok" else [self.integrity()]
        for table in ("lines", "results"):
            num_rows = self._query(self._own, f"SELECT count(*) FROM {table}")[0][0]
            faults += [f"{num_rows} rows are left in {table}"] if num_rows else []
        listed = {file_id for (file_id,) in self._query(self._own, "SELECT id FROM files")}
        stored = {path.name for path in (self._own / "files").iterdir()}
        return faults + ([] if stored == listed else [f"contents {stored}, files {listed}"])

    @staticmethod
    def _query(data_dir: Path, statement: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(data_dir / "database.sqlite")
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def _toka(self, stack: ExitStack) -> RestartedToka:
        return RestartedToka(stack, (*self._flags, f"data_dir={self._own}"))

    def _count(self, toka: RestartedToka) -> None:
        self.kills += toka.kills
        self.num_starts += toka.num_starts

    @staticmethod
    def _start_stopped(toka: RestartedToka) -> None:
        toka.start()
        os.kill(toka.wait_for(WORKER), signal.SIGSTOP)
        toka.wait_until_it_answers()

    def _wait_for_results(self, toka: RestartedToka, num_results: float) -> None:
        """Until so many lines of all batches have a result. Starts toka again whenever it has ended."""
        deadline_s = time.monotonic() + _RUN_TIMEOUT_S
        seen = 0
        while seen < num_results:
            assert time.monotonic() < deadline_s, f"{seen} results of {num_results}"
            toka.start()
            try:
                found = sum(_num_results(toka.client.read(batch_id)) for batch_id in self._ids)
            except httpx.TransportError:
                continue
            if found < self._max_seen:
                self.lost.append(f"{found} results, after {self._max_seen}")
            self._max_seen = seen = found
            time.sleep(_POLL_S)

    def _wait_for_end(self, client: BatchClient) -> Outcome:
        batches = [client.wait(batch_id, ("completed", "failed"), _RUN_TIMEOUT_S) for batch_id in self._ids]
        return Outcome(client.url, batches, [client.results(batch) for batch in batches])


def _ask(url: str, seeds: dict[str, int], line: dict[str, Any]) -> dict[str, Any]:
    """The live answer to an input line, as a result. seeds: signed 64 bits, by custom_id."""
    body = {"seed": seeds[line["custom_id"]], **line["body"]}
    answer = httpx.post(f"{url}{line['url']}", json=body, timeout=_START_TIMEOUT_S)
    response = {"status_code": answer.status_code, "body": answer.json()}
    return {"custom_id": line["custom_id"], "response": response, "error": None}


def _num_results(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"]) + int(counts["failed"])
