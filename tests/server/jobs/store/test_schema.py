"""Migrations: an older database gets the newest tables, a newer one is refused."""

from pathlib import Path

import apsw
import pytest

from tests.server.jobs.helpers.records import integrity
from tokasaurus.server.jobs.store import database
from tokasaurus.server.jobs.store.data_dir import StoreError
from tokasaurus.server.jobs.store.database import MIGRATIONS, Database, migrate

# As a later version would append them.
LATER = ("CREATE TABLE later (id INTEGER PRIMARY KEY) STRICT", "ALTER TABLE later ADD COLUMN text TEXT")


def tables(path: Path) -> list[tuple[str, str]]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()
    finally:
        connection.close()


def make(path: Path, num_migrations: int, migrations: tuple[str, ...]) -> None:
    connection = apsw.Connection(str(path))
    for migration in migrations[:num_migrations]:
        connection.execute(migration)
    connection.pragma("user_version", num_migrations)
    connection.close()


@pytest.mark.parametrize("num_migrations", range(len(MIGRATIONS) + len(LATER) + 1))
def test_a_database_of_any_older_version_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_migrations: int
) -> None:
    migrations = (*MIGRATIONS, *LATER)
    monkeypatch.setattr(database, "MIGRATIONS", migrations)
    make(tmp_path / "old.sqlite", num_migrations, migrations)
    make(tmp_path / "new.sqlite", len(migrations), migrations)
    if num_migrations > 0:
        connection = apsw.Connection(str(tmp_path / "old.sqlite"))
        connection.execute("INSERT INTO files VALUES (1, 'file-1', 'batch', 'a.jsonl', 7, 8, NULL)")
        connection.close()
    Database(tmp_path / "old.sqlite").close()
    assert tables(tmp_path / "old.sqlite") == tables(tmp_path / "new.sqlite")
    connection = apsw.Connection(str(tmp_path / "old.sqlite"))
    assert connection.pragma("user_version") == len(migrations)
    assert connection.execute("SELECT id, bytes FROM files").fetchall() == [("file-1", 7)] * (num_migrations > 0)
    connection.close()
    assert integrity(tmp_path / "old.sqlite") == "ok"


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "database.sqlite"
    make(path, len(MIGRATIONS), MIGRATIONS)
    before = tables(path)
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, LATER[0], "ALTER TABLE missing ADD COLUMN text TEXT"))
    with pytest.raises(StoreError, match="missing"):
        Database(path)
    assert tables(path) == before
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, *LATER))
    Database(path).close()
    assert "later" in dict(tables(path))


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "database.sqlite"
    make(path, len(MIGRATIONS) + 1, (*MIGRATIONS, LATER[0]))
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"version {len(MIGRATIONS) + 1}.*up to {len(MIGRATIONS)}.*newer"):
        Database(path)
    assert path.read_bytes() == before


def test_the_newest_version_is_not_written_again() -> None:
    """So that a server starts while the disk is full."""
    connection = apsw.Connection(":memory:")
    migrate(connection)
    before = connection.total_changes(), connection.pragma("schema_version")
    connection.pragma("query_only", True)
    migrate(connection)
    assert (connection.total_changes(), connection.pragma("schema_version")) == before
