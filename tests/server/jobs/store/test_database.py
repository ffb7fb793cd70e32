"""Group commits, durability and a full disk, with real databases."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from tests.helpers.limits import read_line
from tests.server.jobs.helpers.records import integrity
from tokasaurus.server.jobs.store.data_dir import StorageFull, StoreError
from tokasaurus.server.jobs.store.database import Database

Write = Callable[[apsw.Connection], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "database.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(path)
    database.submit(lambda connection: connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text)")).result()
    try:
        yield database
    finally:
        database.close()
        assert integrity(path) == "ok"


def write_note(number: int, text: str = "") -> Write:
    def write(connection: apsw.Connection) -> None:
        connection.execute("INSERT INTO notes (id, text) VALUES (?, ?)", (number, text))

    return write


def notes(connection: apsw.Connection) -> list[int]:
    return [number for (number,) in connection.execute("SELECT id FROM notes ORDER BY id")]


class Pause:
    """An operation that keeps the writer busy, so that what follows is committed in one group."""

    def __init__(self, database: Database) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        self._done = database.submit(self._wait)
        self._begun.wait(10)

    def _wait(self, _connection: apsw.Connection) -> None:
        self._begun.set()
        self._end.wait(10)

    def end(self) -> None:
        self._end.set()
        self._done.result(10)


def test_operations_that_wait_share_one_transaction(database: Database) -> None:
    commits = []
    database.submit(lambda connection: connection.set_commit_hook(lambda: commits.append(1) or False)).result()
    commits.clear()
    pause = Pause(database)
    futures = [database.submit(write_note(number)) for number in range(100)]
    pause.end()
    for future in futures:
        future.result(10)
    assert len(commits) == 2, "of the pause and of the group"
    database.submit(lambda connection: connection.set_commit_hook(None)).result()


def test_operations_run_in_the_order_of_their_calls(database: Database) -> None:
    order: list[int] = []
    pause = Pause(database)
    futures = [database.submit(lambda _, number=number: order.append(number)) for number in range(1500)]
    pause.end()
    for future in futures:
        future.result(10)
    assert order == list(range(1500))


@pytest.mark.parametrize("error", [ValueError("mine"), apsw.ConstraintError("mine")])
def test_an_operation_that_raises_fails_alone(database: Database, error: Exception) -> None:
    def fail(connection: apsw.Connection) -> None:
        write_note(1000)(connection)
        raise error

    pause = Pause(database)
    futures = [database.submit(fail if number == 7 else write_note(number)) for number in range(20)]
    pause.end()
    for number, future in enumerate(futures):
        if number == 7:
            with pytest.raises(ValueError if isinstance(error, ValueError) else StoreError, match="mine"):
                future.result(10)
        else:
            future.result(10)
    assert asyncio.run(database.read(notes)) == [number for number in range(20) if number != 7]


def test_an_operation_that_is_cancelled_before_it_begins_is_not_done(database: Database) -> None:
    pause = Pause(database)
    cancelled, other = database.submit(write_note(1)), database.submit(write_note(2))
    assert cancelled.cancel()
    pause.end()
    other.result(10)
    assert asyncio.run(database.read(notes)) == [2]


def test_what_a_cancelled_caller_wrote_is_stored(database: Database) -> None:
    async def write_and_go() -> None:
        pause = await asyncio.to_thread(Pause, database)
        task = asyncio.create_task(database.write(write_note(1)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.to_thread(pause.end)
        await database.write(write_note(2))
        assert await database.read(notes) == [1, 2]

    asyncio.run(write_and_go())


def test_reads_see_whole_transactions(database: Database) -> None:
    def write_pair(number: int) -> Write:
        def write(connection: apsw.Connection) -> None:
            write_note(2 * number)(connection)
            write_note(2 * number + 1)(connection)

        return write

    async def check() -> None:
        writing = asyncio.gather(*(database.write(write_pair(number)) for number in range(500)))
        while not writing.done():
            assert len(await database.read(notes)) % 2 == 0
        assert await database.read(notes) == list(range(1000))

    asyncio.run(check())


def test_nothing_can_be_submitted_after_closing(path: Path) -> None:
    database = Database(path)
    waiting = [database.submit(lambda _: 1) for _ in range(100)]
    database.close()
    assert [future.result(0) for future in waiting] == [1] * 100
    with pytest.raises(StoreError, match="closed"):
        database.submit(lambda _: 1).result(0)


def test_a_full_disk_is_said_and_loses_nothing(database: Database) -> None:
    """A real limit, of SQLite: pages of the database."""

    def set_max_pages(count: int) -> None:
        database.submit(lambda connection: connection.pragma("max_page_count", count)).result()

    database.submit(write_note(1, "small")).result()
    set_max_pages(database.submit(lambda connection: connection.pragma("page_count")).result() + 4)
    pause = Pause(database)
    large = [database.submit(write_note(number, "x" * 100_000)) for number in (2, 3)]
    small = [database.submit(write_note(number, "small")) for number in (4, 5)]
    pause.end()
    for future in large:
        with pytest.raises(StorageFull, match="no space is left"):
            future.result(10)
    for future in small:  # there is room for them
        future.result(10)
    assert asyncio.run(database.read(notes)) == [1, 4, 5]
    set_max_pages(1 << 20)
    database.submit(write_note(2, "x" * 100_000)).result(10)
    assert asyncio.run(database.read(notes)) == [1, 2, 4, 5]


WRITE_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from tokasaurus.server.jobs.store.database import Database

database = Database(Path(sys.argv[1]))
database.submit(lambda connection: connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text)")).result()

async def write(number):
    text = "x" * (number * 37 % 3000)
    await database.write(lambda connection: connection.execute("INSERT INTO notes VALUES (?, ?)", (number, text)))
    print(number, flush=True)

async def write_all():
    numbers = iter(range(10**9))
    async def worker():
        for number in numbers:
            await write(number)
    await asyncio.gather(*(worker() for _ in range(8)))

asyncio.run(write_all())
"""


@pytest.mark.parametrize("num_notes", [1, 100, 2000])
def test_what_write_returned_is_there_after_sigkill(path: Path, num_notes: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    said = {int(read_line(writer, writer.stdout)) for _ in range(num_notes)}
    writer.kill()
    said |= {int(line) for line in writer.stdout.read().split(b"\n")[:-1]}
    assert writer.wait(60) == -signal.SIGKILL
    database = Database(path)
    try:
        assert said <= set(asyncio.run(database.read(notes)))
    finally:
        database.close()
    assert integrity(path) == "ok"
