"""A data directory that is open for writing: its database and the contents of its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.server.batches.store.data_dir import DataDir
from tokasaurus.server.batches.store.database import Database, explain
from tokasaurus.server.batches.store.files import file_ids


@dataclass(frozen=True, slots=True)
class Store:
    """A data directory that this process has locked."""

    data_dir: DataDir
    database: Database


@contextmanager
def open_store(root: Path, owner: str) -> Iterator[Store]:
    """The store within the context. Creates it if needed, and removes what a crash left behind.

    owner: tells others how to reach this process. Raises DataDirInUse if another process has it, StoreError if it
    cannot be used."""
    data_dir = DataDir(root)
    data_dir.open(owner)
    try:
        database = Database(data_dir.database)
        try:
            listed = database.submit(file_ids).result()
            try:
                data_dir.remove_unlisted(listed)
            except OSError as error:
                raise explain(error) from None
            yield Store(data_dir, database)
        finally:
            database.close()
    finally:
        data_dir.close()
