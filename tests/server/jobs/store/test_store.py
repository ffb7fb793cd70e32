"""Opening a data directory: the lock, what a crash leaves, and what is missing."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.limits import read_line
from tests.server.jobs.helpers.records import integrity, new_batch, new_file, new_lines
from tokasaurus.server.jobs.store.data_dir import (
    ContentMissing,
    DataDir,
    DataDirInUse,
    NewContent,
    StorageFull,
    StoreError,
)
from tokasaurus.server.jobs.store.ledger import add_lines, finished_ledgers
from tokasaurus.server.jobs.store.records import add_batch, add_file, file_ids, get_batch
from tokasaurus.server.jobs.store.store import Store, open_store

HOLD = """
import sys, time
from pathlib import Path
from tokasaurus.server.jobs.store.store import open_store

with open_store(Path(sys.argv[1]), "http://other:1"):
    print("open", flush=True)
    time.sleep(60)
"""


def write_content(store: Store, file_id: str, content: bytes = b"content") -> None:
    write_all(store.data_dir.new_content(file_id), content)


def write_all(new: NewContent, content: bytes) -> None:
    new.write(content)
    new.commit()


def add_row(store: Store, file_id: str) -> None:
    store.database.submit(lambda connection: add_file(connection, new_file(file_id))).result()


def test_a_second_server_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with open_store(tmp_path, "http://first:1") as store:
        second = open_store(tmp_path, "http://second:1")
        with pytest.raises(DataDirInUse, match=r"in use by another server \(http://first:1\)"), second:
            pass
        assert store.data_dir.read_owner() == "http://first:1"
    with open_store(tmp_path, "http://second:1"):
        pass


def test_the_lock_of_another_process_ends_with_sigkill(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert read_line(other, other.stdout) == b"open\n"
    with pytest.raises(DataDirInUse, match="http://other:1"), open_store(tmp_path, "http://mine:1"):
        pass
    other.kill()
    other.wait()
    with open_store(tmp_path, "http://mine:1") as store:
        assert store.data_dir.read_owner() == "http://mine:1"
    assert integrity(tmp_path / "database.sqlite") == "ok"


def test_others_may_not_read_what_clients_send(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with open_store(root, ""):
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
    existing = tmp_path / "existing"
    existing.mkdir(mode=0o755)
    with open_store(existing, "") as store:
        write_content(store, "file-1")
        store.database.submit(file_ids).result()
        files = [path for path in existing.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"lock", "database.sqlite", "database.sqlite-wal", "file-1"}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_contents_without_a_row_are_removed_at_the_next_start(tmp_path: Path) -> None:
    with open_store(tmp_path, "") as store:
        for file_id in ("file-listed", "file-orphan"):
            write_content(store, file_id)
        add_row(store, "file-listed")
        part = store.data_dir.new_content("file-begun")
        part.write(b"x" * 100_000)
    (tmp_path / "files" / "a directory").mkdir()
    with open_store(tmp_path, "") as store:
        assert {path.name for path in (tmp_path / "files").iterdir()} == {"file-listed", "a directory"}
        with store.data_dir.open_content("file-listed") as content:
            assert content.read() == b"content"


def test_lines_of_finished_batches_are_removed_at_the_next_start(tmp_path: Path) -> None:
    with open_store(tmp_path, "") as store:
        for status in ("completed", "in_progress"):
            batch = store.database.submit(lambda connection, s=status: add_batch(connection, new_batch(s, s))).result()
            lines = new_lines(1300)
            store.database.submit(
                lambda connection, n=batch.number, new=lines: add_lines(connection, n, new, range(1300))
            ).result()
        assert store.database.submit(finished_ledgers).result() == [1]
    with open_store(tmp_path, "") as store:
        count = "SELECT key >> 32, count(*) FROM lines GROUP BY 1"
        assert store.database.submit(lambda connection: connection.execute(count).fetchall()).result() == [(2, 1300)]
        assert store.database.submit(lambda connection: get_batch(connection, "completed")).result() is not None


@pytest.mark.parametrize("damage", ["missing", "empty", "new"])
def test_contents_are_kept_if_the_database_is_not_theirs(tmp_path: Path, damage: str) -> None:
    with open_store(tmp_path, "") as store:
        write_content(store, "file-1")
        add_row(store, "file-1")
    database = tmp_path / "database.sqlite"
    if damage == "empty":
        database.write_bytes(b"")
    else:
        database.unlink()
    if damage == "new":
        subprocess.run(
            [sys.executable, "-c", f"import apsw; apsw.Connection({str(database)!r}).pragma('user_version', 0)"]
        )
    with pytest.raises(StoreError, match="but data_dir has what belongs to it"), open_store(tmp_path, ""):
        pass
    assert (tmp_path / "files" / "file-1").read_bytes() == b"content"
    assert damage == "empty" or not database.exists() or database.stat().st_size > 0


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot use .*file/data: "), open_store(tmp_path / "file" / "data", ""):
        pass


def test_a_deleted_content_is_not_taken_for_one_that_cannot_be_read_now(tmp_path: Path) -> None:
    with open_store(tmp_path, "") as store:
        with pytest.raises(ContentMissing, match=r"file-1.*No such file"):
            store.data_dir.open_content("file-1")
        (tmp_path / "files" / "file-2").symlink_to("file-2")
        with pytest.raises(StoreError, match="file-2 cannot be read now") as error:
            store.data_dir.open_content("file-2")
        assert not isinstance(error.value, ContentMissing)


def test_a_content_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with open_store(tmp_path, "") as store:
        write_content(store, "file-1", b"old")
        new = store.data_dir.new_content("file-1")
        new.write(b"new " * 10_000)
        assert store.data_dir.content_path("file-1").read_bytes() == b"old"
        new.commit()
        new.discard()
        assert store.data_dir.content_path("file-1").read_bytes() == b"new " * 10_000
        dropped = store.data_dir.new_content("file-1")
        dropped.write(b"dropped")
        dropped.discard()
        assert [path.name for path in (tmp_path / "files").iterdir()] == ["file-1"]


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
def test_a_content_that_does_not_fit_leaves_the_older_one(tmp_path: Path, num_bytes: int) -> None:
    """/dev/full answers each write with ENOSPC."""
    with open_store(tmp_path, "") as store:
        write_content(store, "file-1", b"old")
        temporary = tmp_path / "files" / "file-1.part"
        temporary.symlink_to("/dev/full")
        new = store.data_dir.new_content("file-1")
        with pytest.raises(OSError, match="No space left"):
            write_all(new, b"x" * num_bytes)
        new.discard()
        assert not os.path.lexists(temporary)
        assert store.data_dir.content_path("file-1").read_bytes() == b"old"


def test_the_owner_that_cannot_be_written_is_no_reason_not_to_start(tmp_path: Path) -> None:
    tmp_path.joinpath("lock").symlink_to("/dev/full")
    data_dir = DataDir(tmp_path)
    data_dir.open("http://mine:1")
    data_dir.close()


def test_reads_after_a_failed_read_work(tmp_path: Path) -> None:
    async def read_twice(store: Store) -> set[str]:
        with pytest.raises(StoreError, match="no such table"):
            await store.database.read(lambda connection: connection.execute("SELECT * FROM missing"))
        return await store.database.read(file_ids)

    with open_store(tmp_path, "") as store:
        add_row(store, "file-1")
        assert asyncio.run(read_twice(store)) == {"file-1"}


def test_a_full_database_is_a_full_storage(tmp_path: Path) -> None:
    with open_store(tmp_path, "") as store:
        store.database.submit(lambda connection: connection.pragma("max_page_count", 1)).result()
        lines = new_lines(2000)
        with pytest.raises(StorageFull):
            store.database.submit(lambda connection: add_lines(connection, 1, lines, range(2000))).result()
