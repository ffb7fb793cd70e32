"""Damaged databases: each is refused in one line and left as it is; a torn log loses its last transaction alone."""

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from tests.server.jobs.helpers.records import integrity, new_batch, new_lines, new_result
from tokasaurus.server.jobs.store.data_dir import StoreError
from tokasaurus.server.jobs.store.database import Database, path_of_log
from tokasaurus.server.jobs.store.ledger import add_lines, record_results
from tokasaurus.server.jobs.store.records import add_batch

NUM_LINES = 200
PAGE_BYTES = 4096
FRAME_BYTES = 24 + PAGE_BYTES


def fill(database: Database) -> None:
    """A transaction for each result, so that the log's last frames hold the last one."""

    def begin(connection: apsw.Connection) -> None:
        number = add_batch(connection, new_batch("in_progress")).number
        add_lines(connection, number, new_lines(NUM_LINES), range(NUM_LINES))

    def record(number: int) -> Callable[[apsw.Connection], None]:
        return lambda connection: record_results(connection, 1, [new_result(number, num_bytes=3000)])

    database.submit(begin).result()
    for number in range(NUM_LINES):
        database.submit(record(number)).result()


def results_of(database: Database) -> int:
    query = "SELECT (SELECT count(*) FROM results), num_completed FROM batches"
    stored, counted = database.submit(lambda connection: connection.execute(query).fetchone()).result()
    assert stored == counted
    return int(stored)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A database that was closed."""
    path = tmp_path / "database.sqlite"
    database = Database(path)
    fill(database)
    database.close()
    assert not path_of_log(path).exists()
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A database as it is on the disk when its process is killed."""
    path = tmp_path / "killed" / "database.sqlite"
    path.parent.mkdir()
    original = tmp_path / "database.sqlite"
    database = Database(original)
    fill(database)
    for one in (original, path_of_log(original)):
        shutil.copy(one, path.parent)
    database.close()
    assert path_of_log(path).stat().st_size > NUM_LINES * FRAME_BYTES
    return path


def overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def check_refused(path: Path, words: str) -> None:
    """One line for the user, and the files as they were."""
    files = [path, path_of_log(path)]
    before = [file.read_bytes() if file.exists() else b"" for file in files]
    with pytest.raises(StoreError, match=words) as refusal:
        Database(path)
    assert "\n" not in str(refusal.value)
    assert [file.read_bytes() if file.exists() else b"" for file in files] == before


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_the_middle_are_found(closed: Path, seed: int) -> None:
    chance = random.Random(seed)
    page = chance.randrange(1, closed.stat().st_size // PAGE_BYTES)
    overwrite(closed, page * PAGE_BYTES, chance.randbytes(PAGE_BYTES))
    check_refused(closed, r"damaged \(.*nothing was changed")


def test_random_bytes_beside_a_log_are_found(closed: Path) -> None:
    """The log, which has few pages, is not copied into the damaged database."""
    connection = apsw.Connection(str(closed))
    connection.execute("UPDATE batches SET num_failed = 1")
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.close()
    assert path_of_log(closed).stat().st_size > FRAME_BYTES
    overwrite(closed, closed.stat().st_size // 2, random.Random(1).randbytes(2 * PAGE_BYTES))
    check_refused(closed, r"damaged \(.*nothing was changed")


@pytest.mark.parametrize("keep", [0.01, 0.3, 0.99])
def test_a_truncated_database_is_found(closed: Path, keep: float) -> None:
    content = closed.read_bytes()
    closed.write_bytes(content[: int(len(content) * keep)])
    check_refused(closed, r"damaged \(.*nothing was changed")


def test_what_is_no_database_is_found(closed: Path) -> None:
    closed.write_bytes(b"These are no pages of SQLite.\n" * 1000)
    check_refused(closed, r"damaged \(.*nothing was changed")


def test_an_empty_database_does_not_delete_its_log(killed: Path) -> None:
    killed.write_bytes(b"")
    check_refused(killed, "missing or empty")
    killed.unlink()
    check_refused(killed, "missing or empty")


def test_a_whole_log_is_read_without_a_word(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        database = Database(killed)
    assert results_of(database) == NUM_LINES
    database.close()
    assert not caplog.records
    assert integrity(killed) == "ok"


@pytest.mark.parametrize("cut", [1, 4096, FRAME_BYTES - 20])
def test_a_torn_last_page_of_the_log_loses_one_transaction(
    killed: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    log = path_of_log(killed)
    log.write_bytes(log.read_bytes()[:-cut])
    check_torn(killed, caplog, NUM_LINES - 1)


def test_random_bytes_in_the_last_page_of_the_log_lose_one_transaction(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = path_of_log(killed)
    overwrite(log, log.stat().st_size - 2000, random.Random(1).randbytes(1000))
    check_torn(killed, caplog, NUM_LINES - 1)


def test_random_bytes_in_the_middle_of_the_log_lose_what_follows(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = path_of_log(killed)
    middle = 32 + (log.stat().st_size // FRAME_BYTES // 2) * FRAME_BYTES
    overwrite(log, middle + 100, random.Random(1).randbytes(1000))
    check_torn(killed, caplog, None)


def test_a_damaged_header_of_the_log_loses_the_log(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The database is in the state of its last checkpoint: here empty, which `may_be_new` allows."""
    overwrite(path_of_log(killed), 16, random.Random(1).randbytes(8))
    with caplog.at_level(logging.WARNING):
        Database(killed).close()
    assert "no whole transaction and is ignored" in caplog.text
    assert integrity(killed) == "ok"


def check_torn(path: Path, caplog: pytest.LogCaptureFixture, num_results: int | None) -> None:
    """num_results: None if some, but not all. What was lost can be written again."""
    with caplog.at_level(logging.WARNING):
        database = Database(path)
    assert "no whole transaction and is ignored" in caplog.text
    found = results_of(database)
    assert 0 < found < NUM_LINES if num_results is None else found == num_results
    results = [new_result(number, num_bytes=3000) for number in range(NUM_LINES)]
    database.submit(lambda connection: record_results(connection, 1, results)).result()
    assert results_of(database) == NUM_LINES
    database.close()
    assert integrity(path) == "ok"
