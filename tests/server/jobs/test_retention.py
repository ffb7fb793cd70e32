"""Files and batches that are removed when their time is over."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tokasaurus.server.jobs import closing
from tokasaurus.server.jobs.closing import remove_expired
from tokasaurus.server.jobs.store.ledger import add_lines, pending_lines
from tokasaurus.server.jobs.store.records import (
    BatchRecord,
    BatchStatus,
    FileRecord,
    NewLine,
    add_batch,
    add_file,
    file_ids,
    get_batch,
)
from tokasaurus.server.jobs.store.store import Store, open_store
from tokasaurus.server.served_model import ServedModel

NOW, KEEP = 10_000, 1_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path, "a test") as store:
        yield store


def store_file(store: Store, name: str, expires_at: int | None) -> None:
    content = store.data_dir.new_content(name)
    content.write(b"x")
    content.commit()
    record = FileRecord(name, "batch", "x", 1, 0, expires_at)
    store.database.submit(lambda connection: add_file(connection, record)).result()


def store_batch(store: Store, name: str, status: BatchStatus, file: str = "", **times: int) -> int:
    """A batch with one line in the ledger; returns its number."""
    record = BatchRecord(0, name, "/v1/completions", file, "1h", 0, 0, status, **times)  # type: ignore[arg-type]
    number = store.database.submit(lambda connection: add_batch(connection, record)).result().number
    lines = [NewLine(0, "1", 0, 1)]
    store.database.submit(lambda connection: add_lines(connection, number, lines, [1])).result()
    return number


def contents(store: Store) -> set[str]:
    return {path.name for path in (store.data_dir.root / "files").iterdir()}


def run(store: Store, now: int = NOW) -> tuple[int, int]:
    return asyncio.run(remove_expired(store, KEEP, now))


def test_files_are_removed_with_their_content_when_their_time_is_over(store: Store) -> None:
    for name, expires_at in (("old", NOW - 1), ("now", NOW), ("later", NOW + 1), ("never", None)):
        store_file(store, name, expires_at)
    assert run(store) == (2, 0)
    assert contents(store) == store.database.submit(file_ids).result() == {"later", "never"}
    assert run(store) == (0, 0)


def test_a_file_stays_while_a_batch_that_is_not_finished_reads_it(store: Store) -> None:
    for name in ("needed", "free"):
        store_file(store, name, NOW - 1)
    number = store_batch(store, "running", "in_progress", "needed")
    store_batch(store, "done", "completed", "free", completed_at=NOW)
    assert run(store) == (1, 0)
    assert contents(store) == {"needed"}
    store.database.submit(
        lambda connection: connection.execute("UPDATE batches SET status = 'failed' WHERE number = ?", (number,))
    ).result()
    assert run(store) == (1, 0)
    assert contents(store) == set()


def test_batches_are_removed_with_their_ledger_some_time_after_their_end(store: Store) -> None:
    """They were all created long ago."""
    limit = NOW - KEEP
    numbers = {
        "completed": store_batch(store, "completed", "completed", completed_at=limit - 1),
        "failed": store_batch(store, "failed", "failed", failed_at=limit - 1),
        "cancelled": store_batch(store, "cancelled", "cancelled", cancelling_at=1, cancelled_at=limit - 1),
        "expired": store_batch(store, "expired", "expired", expired_at=limit - 1),
        "just finished": store_batch(store, "just finished", "completed", in_progress_at=1, completed_at=limit),
        "in_progress": store_batch(store, "in_progress", "in_progress", in_progress_at=1),
        "cancelling": store_batch(store, "cancelling", "cancelling", cancelling_at=1),
    }
    assert run(store) == (0, 4)
    for name, number in numbers.items():
        batch = store.database.submit(lambda connection, name=name: get_batch(connection, name)).result()  # type: ignore[misc]
        lines = store.database.submit(lambda connection, number=number: pending_lines(connection, number, 0, 9))  # type: ignore[misc]
        is_kept = name in ("just finished", "in_progress", "cancelling")
        assert (batch is not None, len(lines.result())) == (is_kept, is_kept)
    assert run(store, NOW + 1) == (0, 1)


def test_any_number_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_MAX_REMOVED_AT_ONCE", 3)
    for number in range(10):
        store_file(store, f"file-{number}", NOW)
        store_batch(store, f"batch-{number}", "completed", completed_at=1)
    assert run(store) == (10, 10)
    assert contents(store) == set()


def test_a_server_removes_what_has_expired_when_it_starts(served_model: ServedModel, tmp_path: Path) -> None:
    with open_store(tmp_path, "a test") as store:
        store_file(store, "old", NOW)
        store_file(store, "new", int(time.time()) + 3600)
        store_batch(store, "old", "completed", completed_at=NOW)
        store_batch(store, "new", "completed", completed_at=int(time.time()) - 29 * 86_400)
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        for route in ("/v1/files", "/v1/batches"):
            deadline = time.monotonic() + 60
            while [one["id"] for one in server.http.get(route).json()["data"]] != ["new"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
