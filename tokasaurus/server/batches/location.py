"""Where files and batches are stored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.messages.status import UserError
from tokasaurus.server.batches.store.data_dir import DataDir, DataDirInUse, StoreError
from tokasaurus.server.batches.store.store import Store, open_store

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)


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
    if config.port == 0:  # the next server would have another one
        return None
    try:
        root = default_data_dir(config.port)
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


def _warn(error: Exception) -> None:
    logger.warning("no files and batches, since no data_dir is set and the default cannot be used: %s", error)
