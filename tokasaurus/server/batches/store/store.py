"""A data directory that is open for writing: its database and the contents of its files."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokasaurus.server.batches.store.data_dir import DataDir, StoreError
from tokasaurus.server.batches.store.database import Database, explain
from tokasaurus.server.batches.store.files import file_ids
from tokasaurus.server.batches.store.ledger import finished_ledgers, remove_lines

logger = logging.getLogger(__name__)

_LINES_PER_STEP = 512


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
    with ExitStack() as stack:
        data_dir = DataDir(root)
        data_dir.open(owner)
        stack.callback(data_dir.close)
        try:
            database = Database(data_dir.database, may_be_new=not data_dir.has_contents())
            stack.callback(database.close)
            data_dir.remove_unlisted(database.submit(file_ids).result())
        except OSError as error:
            raise explain(error) from None
        _clear_finished(database)
        yield Store(data_dir, database)


def _clear_finished(database: Database) -> None:
    """Remove the ledgers of batches that were finished when the last server was killed."""
    try:
        for number in database.submit(finished_ledgers).result():
            while database.submit(partial(remove_lines, batch=number, limit=_LINES_PER_STEP)).result():
                pass
    except StoreError as error:  # a full disk must not prevent the start
        logger.warning("the lines of finished batches cannot be removed: %s", error)
