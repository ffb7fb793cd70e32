"""A server whose data_dir is on a full disk: it says so, loses nothing, and continues when there is space."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_ready
from tests.server.jobs.helpers.batch_service import input_lines
from tests.server.jobs.helpers.records import integrity, new_batch
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.jobs.store.data_dir import StorageFull
from tokasaurus.server.jobs.store.records import add_batch, get_batch
from tokasaurus.server.jobs.store.store import open_store
from tokasaurus.server.served_model import ServedModel

DISK_MB = 12
NUM_LINES = 300


class Disk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, num_free: int = 0) -> None:
        """num_free: bytes that stay free, at least."""
        self.free()
        with suppress(OSError), self._filler.open("wb", buffering=0) as filler:  # the server writes too
            left = shutil.disk_usage(self.path).free - num_free
            while left > 0:
                left -= filler.write(bytes(min(left, 1 << 16)))
        assert shutil.disk_usage(self.path).free - num_free < 8192

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    size = f"size={DISK_MB}m"
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", size, "tmpfs", path], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield Disk(path)
        database = path / "data" / "database.sqlite"
        assert not database.exists() or integrity(database) == "ok"
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class Gate:
    """Lets the engine answer requests whose number is below `limit`, and those that wait when it rises."""

    def __init__(self) -> None:
        self._may_answer = threading.Condition()
        self._limit = 0
        self._num_begun = 0

    def open_for(self, count: int) -> None:
        with self._may_answer:
            self._limit = count
            self._may_answer.notify_all()

    def __call__(self, request: GenerateRequest, index: int) -> Reply:
        with self._may_answer:
            self._num_begun += 1
            number = self._num_begun
            self._may_answer.wait_for(lambda: number <= self._limit, 120)
        return echo(request, index)


def upload(server: LiveServer, content: bytes) -> Any:
    return server.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})


def create(server: LiveServer, file_id: str) -> Any:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return server.http.post("/v1/batches", json=body)


def begin(server: LiveServer, num_lines: int = NUM_LINES) -> str:
    """The id of a batch."""
    content = input_lines(
        *({"prompt": f"line {number} " + "x" * 200, "max_tokens": 250} for number in range(num_lines))
    )
    answer = create(server, upload(server, content).json()["id"])
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def wait_for(server: LiveServer, batch_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while not condition(batch := server.http.get(f"/v1/batches/{batch_id}").json()):
        assert time.monotonic() < deadline_s, str(batch)
        time.sleep(0.02)
    return dict(batch)


def check_problem(server: LiveServer, batch_id: str, status: str) -> None:
    """The batch says why it waits."""
    batch = wait_for(server, batch_id, lambda batch: "problem" in batch)
    assert batch["status"] == status
    assert batch["problem"] == "no space is left on the device of data_dir"


def check_completed(server: LiveServer, batch_id: str) -> None:
    """Each line has one result, with the text of its prompt."""
    batch = wait_for(server, batch_id, lambda batch: batch["status"] == "completed")
    assert "problem" not in batch
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    content = server.http.get(f"/v1/files/{batch['output_file_id']}/content").content
    lines = [orjson.loads(line) for line in content.splitlines()]
    assert [line["custom_id"] for line in lines] == [str(number) for number in range(NUM_LINES)]
    for number, line in enumerate(lines):
        assert line["response"]["body"]["choices"][0]["text"].startswith(f"line {number} xxx")
    total = sum(line["response"]["body"]["usage"]["total_tokens"] for line in lines)
    assert batch["usage"]["total_tokens"] == total


def check_full(answer: Any) -> None:
    assert answer.status_code == 507, answer.text
    error = answer.json()["error"]
    assert error["code"] == "storage_full"
    assert "no space is left" in error["message"]


def test_an_upload_that_does_not_fit(served_model: ServedModel, disk: Disk) -> None:
    with live_server(served_model, FakeEngine(), data_dir=disk.path / "data") as server:
        kept = upload(server, b"kept").json()["id"]
        disk.fill(num_free=1 << 20)
        check_full(upload(server, b"x" * (3 << 20)))
        assert [path.name for path in (disk.path / "data" / "files").iterdir()] == [kept]
        assert [file["id"] for file in server.http.get("/v1/files").json()["data"]] == [kept]
        disk.fill()
        check_full(upload(server, b"small"))  # neither content nor row has space
        assert server.http.get("/health").status_code == 200
        assert server.http.get(f"/v1/files/{kept}/content").content == b"kept"
        disk.free()
        again = upload(server, b"x" * (3 << 20))
        assert again.status_code == 200
        assert len(server.http.get(f"/v1/files/{again.json()['id']}/content").content) == 3 << 20


def test_a_batch_that_cannot_be_created(served_model: ServedModel, disk: Disk) -> None:
    with live_server(served_model, FakeEngine(), data_dir=disk.path / "data") as server:
        file_id = upload(server, input_lines({"prompt": "a"})).json()["id"]
        disk.fill()
        check_full(create(server, file_id))
        assert server.http.get("/v1/batches").json()["data"] == []
        disk.free()
        batch_id = create(server, file_id).json()["id"]
        wait_for(server, batch_id, lambda batch: batch["status"] == "completed")


def test_lines_that_cannot_be_claimed(served_model: ServedModel, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    with live_server(served_model, engine, start_engine=False, data_dir=disk.path / "data") as server:
        batch_id = begin(server)
        wait_for(server, batch_id, lambda batch: batch["status"] == "in_progress")
        disk.fill()
        engine.start()
        wait_until_ready(server.http)
        deadline_s = time.monotonic() + 60
        while "cannot be started, trying again every second: no space is left" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert not engine.requests
        check_problem(server, batch_id, "in_progress")
        disk.free()
        check_completed(server, batch_id)


def test_results_that_cannot_be_recorded(
    served_model: ServedModel, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    with live_server(served_model, FakeEngine(script=gate), data_dir=disk.path / "data") as server:
        batch_id = begin(server)
        gate.open_for(100)
        wait_for(server, batch_id, lambda batch: batch["request_counts"]["completed"] >= 90)
        disk.fill()
        gate.open_for(1 << 30)
        deadline_s = time.monotonic() + 60
        while "results of batches cannot be stored, trying again every second: no space is left" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert server.http.get("/health").status_code == 200
        assert server.http.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] < NUM_LINES
        check_problem(server, batch_id, "in_progress")
        disk.free()
        check_completed(server, batch_id)
        assert len(server.engine.requests) == NUM_LINES, "no line ran twice"


def test_output_that_cannot_be_written(served_model: ServedModel, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with live_server(served_model, FakeEngine(script=gate), data_dir=disk.path / "data") as server:
        batch_id = begin(server)
        gate.open_for(NUM_LINES - 1)
        wait_for(server, batch_id, lambda batch: batch["request_counts"]["completed"] == NUM_LINES - 1)
        disk.fill(num_free=100_000)  # enough for a few rows, but not for the output
        gate.open_for(NUM_LINES)
        wait_for(server, batch_id, lambda batch: batch["status"] == "finalizing")
        deadline_s = time.monotonic() + 60
        while f"{batch_id} waits, since its data cannot be stored: no space is left" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        check_problem(server, batch_id, "finalizing")
        disk.free()
        check_completed(server, batch_id)


def test_a_server_that_ends_while_the_disk_is_full(served_model: ServedModel, disk: Disk) -> None:
    """What could not be recorded by then runs again."""
    gate = Gate()
    data_dir = disk.path / "data"
    with live_server(served_model, FakeEngine(script=gate), data_dir=data_dir) as server:
        batch_id = begin(server)
        gate.open_for(50)
        wait_for(server, batch_id, lambda batch: batch["request_counts"]["completed"] >= 40)
        disk.fill()
        gate.open_for(1 << 30)
    disk.free()
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        check_completed(server, batch_id)


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_full_disk_at_the_start_is_said(tmp_path: Path, disk: Disk, was_killed: bool) -> None:
    with open_store(tmp_path / "data", "") as store:
        store.database.submit(lambda connection: add_batch(connection, new_batch())).result()
        if was_killed:
            shutil.copytree(tmp_path / "data", disk.path / "data")
            (disk.path / "data" / "database.sqlite-shm").unlink()
    if not was_killed:
        shutil.copytree(tmp_path / "data", disk.path / "data")
    disk.fill()
    before = (disk.path / "data" / "database.sqlite").read_bytes()
    with pytest.raises(StorageFull, match="no space is left"), open_store(disk.path / "data", ""):
        pass
    assert (disk.path / "data" / "database.sqlite").read_bytes() == before
    disk.free()
    with open_store(disk.path / "data", "") as store:
        assert store.database.submit(lambda connection: get_batch(connection, "batch_1")).result() is not None
