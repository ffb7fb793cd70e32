"""Results are stored in groups; while they cannot be, they wait."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import apsw
import pytest

from tests.server.jobs.helpers.records import integrity, new_batch, new_lines, new_result
from tokasaurus.server.jobs import runner
from tokasaurus.server.jobs.runner import ResultRecorder
from tokasaurus.server.jobs.store.database import Database
from tokasaurus.server.jobs.store.ledger import add_lines, start_lines
from tokasaurus.server.jobs.store.records import add_batch

NUM_LINES = 600


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A database with two batches, all of whose lines run."""

    def fill(connection: apsw.Connection) -> None:
        for name in ("batch_1", "batch_2"):
            number = add_batch(connection, new_batch("in_progress", name)).number
            add_lines(connection, number, new_lines(NUM_LINES), range(NUM_LINES))
            start_lines(connection, number, range(NUM_LINES))

    database = Database(tmp_path / "database.sqlite")
    database.submit(fill).result()
    yield database
    database.close()
    assert integrity(tmp_path / "database.sqlite") == "ok"


@asynccontextmanager
async def running(database: Database) -> AsyncIterator[ResultRecorder]:
    recorder = ResultRecorder(database)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def num_stored(database: Database, batch: int) -> int:
    """Results of the batch, each of which is counted."""
    query = (
        "SELECT (SELECT count(*) FROM results WHERE key >> 32 = number), num_completed FROM batches WHERE number = ?"
    )
    stored, counted = await database.read(lambda connection: connection.execute(query, (batch,)).fetchone())
    assert stored == counted
    return int(stored)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not (is_met := condition()):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)
    assert is_met


def set_full(database: Database, is_full: bool) -> None:
    """Set SQLite's own limit of pages."""
    pages = 1 if is_full else 1 << 20
    database.submit(lambda connection: connection.pragma("max_page_count", pages)).result()


def test_results_of_many_lines_share_few_transactions(database: Database) -> None:
    commits: list[int] = []

    async def test() -> None:
        async with running(database) as recorder:
            database.submit(lambda connection: connection.set_commit_hook(lambda: bool(commits.append(1)))).result()
            await asyncio.gather(
                *(recorder.store(batch, new_result(number)) for number in range(NUM_LINES) for batch in (1, 2))
            )
            assert [await num_stored(database, batch) for batch in (1, 2)] == [NUM_LINES, NUM_LINES]
        database.submit(lambda connection: connection.set_commit_hook(None)).result()

    asyncio.run(test())
    assert len(commits) <= 3


def test_store_returns_when_the_result_is_stored(database: Database) -> None:
    async def test() -> None:
        async with running(database) as recorder:
            for number in range(3):
                await recorder.store(1, new_result(number))
                assert await num_stored(database, 1) == number + 1

    asyncio.run(test())


def test_results_wait_while_the_disk_is_full(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.02)

    async def test() -> None:
        async with running(database) as recorder:
            await recorder.store(1, new_result(0))
            set_full(database, True)
            size = 100_000  # does not fit into the pages that there are
            first = asyncio.gather(*(recorder.store(1, new_result(number, num_bytes=size)) for number in range(1, 40)))
            await until(lambda: recorder.problem is not None)
            later = asyncio.gather(*(recorder.store(2, new_result(number, num_bytes=size)) for number in range(40)))
            flushing = asyncio.create_task(recorder.flush())
            await asyncio.sleep(0.2)
            # what arrived before a flush is waited for too
            assert not (first.done())
            assert not (later.done())
            assert not (flushing.done())
            assert await num_stored(database, 1) == 1
            assert "no space is left" in str(recorder.problem)
            set_full(database, False)
            await flushing
            assert [await num_stored(database, batch) for batch in (1, 2)] == [40, 40]
            await asyncio.gather(first, later)
            assert recorder.problem is None

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "cannot be stored" in line] == [
        "results of batches cannot be stored, trying again every second: no space is left on the device of data_dir"
    ]
    assert said[-1] == "results of batches are stored again"


def test_a_result_is_stored_although_its_caller_was_cancelled(database: Database) -> None:
    async def test() -> None:
        recorder = ResultRecorder(database)
        caller = asyncio.create_task(recorder.store(1, new_result(0)))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await recorder.flush()
        assert await num_stored(database, 1) == 1

    asyncio.run(test())


def test_what_arrives_during_a_flush_is_stored_next(database: Database) -> None:
    async def test() -> None:
        async with running(database) as recorder:
            tasks = []
            for number in range(200):
                tasks.append(asyncio.create_task(recorder.store(1, new_result(number))))
                if number % 7 == 0:
                    tasks.append(asyncio.create_task(recorder.flush()))
                await asyncio.sleep(0.0005)
            await asyncio.gather(*tasks)
            assert await num_stored(database, 1) == 200

    asyncio.run(test())
