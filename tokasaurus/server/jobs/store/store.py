"""A data directory that is open for writing: its database, the contents of its files, and where it is."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.messages.status import UserError
from tokasaurus.server.jobs.store.data_dir import DataDir, DataDirInUse, NewContent, StoreError
from tokasaurus.server.jobs.store.database import Database, explain
from tokasaurus.server.jobs.store.ledger import finished_ledgers, remove_lines
from tokasaurus.server.jobs.store.records import file_ids

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

_LINES_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class Store:
    """A data directory that this process has locked, or will make with its first file."""

    data_dir: DataDir
    database: Database
    owner: str = ""
    """Tells others how to reach this process."""
    _making: threading.Lock = field(default_factory=threading.Lock)

    def new_content(self, file_id: str) -> NewContent:
        """A content to write, and then to commit or discard. Makes the data directory if it is not there yet. Blocks.
        Raises OSError, and StoreError."""
        with self._making:
            if not self.data_dir.is_open:
                self.data_dir.open(self.owner)
                try:
                    self.database.move_to(self.data_dir.database)
                except StoreError:
                    self.data_dir.close()
                    raise
        return self.data_dir.new_content(file_id)


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


@contextmanager
def store_to_come(root: Path, owner: str) -> Iterator[Store]:
    """A store whose directory is made with the first file. Precondition: there is none."""
    data_dir, database = DataDir(root), Database(None)
    try:
        yield Store(data_dir, database, owner)
    finally:
        database.close()
        data_dir.close()


def _clear_finished(database: Database) -> None:
    """Remove the ledgers of batches that were finished when the last server was killed."""
    try:
        for number in database.submit(finished_ledgers).result():
            while database.submit(partial(remove_lines, batch=number, limit=_LINES_PER_STEP)).result():
                pass
    except StoreError as error:  # a full disk must not prevent the start
        logger.warning("the lines of finished batches cannot be removed: %s", error)


def default_data_dir(port: int) -> Path:
    """A directory for each port, so that a server finds its batches again and several servers do not share one."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "tokasaurus" / f"port-{port}"


@contextmanager
def opened_data_dir(config: ServerConfig, url: str) -> Iterator[Store | None]:
    """The store that the flags name, within the context; None if they name none and the default cannot be used.

    url: of this server. Raises UserError, also if the default has batches of a former server that cannot be read."""
    with ExitStack() as stack:
        yield _open(stack, config, url)


def _open(stack: ExitStack, config: ServerConfig, url: str) -> Store | None:
    if config.data_dir is not None:
        try:
            return stack.enter_context(open_store(expand_home("data_dir", config.data_dir), url))
        except StoreError as error:
            raise UserError(f"data_dir={config.data_dir}: {error}") from None
    if config.unix_socket is not None or config.port == 0:  # the next server would have another port
        return None
    try:
        root = default_data_dir(config.port)
        if _may_come(root):
            return stack.enter_context(store_to_come(root, url))
        return stack.enter_context(open_store(root, url))
    except DataDirInUse as error:  # by a server of the same port: on another address, or on a host that shares the disk
        _warn(error)
    except StoreError as error:
        if DataDir(root).has_database():
            raise UserError(f"{error}; set data_dir= to use another directory") from None
        _warn(error)
    except RuntimeError as error:  # there is no home directory
        _warn(error)
    return None


def _may_come(root: Path) -> bool:
    """Whether there is no such directory, and this process may make it."""
    if os.path.lexists(root):
        return False
    parent = next(path for path in root.absolute().parents if os.path.lexists(path))
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def _warn(error: Exception) -> None:
    logger.warning("no files and batches, since no data_dir is set and the default cannot be used: %s", error)
