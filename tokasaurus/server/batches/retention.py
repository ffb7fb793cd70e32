"""Removes files and finished batches whose time is over."""

import asyncio
import logging
import time

import apsw

from tokasaurus.server.batches.closing import clear_ledger
from tokasaurus.server.batches.library import remove_contents
from tokasaurus.server.batches.store.batches import finished_before, remove_batch_row
from tokasaurus.server.batches.store.data_dir import StoreError
from tokasaurus.server.batches.store.files import expired_files, remove_file_row
from tokasaurus.server.batches.store.records import BatchRecord
from tokasaurus.server.batches.store.store import Store

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 600
# In one transaction, so that others have their turn.
_MAX_AT_ONCE = 100


async def remove_expired(store: Store, keep_seconds: int, now: int) -> tuple[int, int]:
    """Remove the files whose time is over, and batches that finished more than `keep_seconds` ago; returns how many.

    A file that an unfinished batch reads stays. The output files of a batch have a time of their own. Raises
    StoreError; what is removed by then stays removed."""
    num_files = num_batches = 0
    while files := await store.database.write(lambda connection: _remove_file_rows(connection, now)):
        await remove_contents(store, files)
        num_files += len(files)
    while batches := await store.database.read(
        lambda connection: finished_before(connection, now - keep_seconds, _MAX_AT_ONCE)
    ):
        for batch in batches:
            await _remove_batch(store, batch)
        num_batches += len(batches)
    return num_files, num_batches


async def keep_removing(store: Store, keep_seconds: int) -> None:
    """`remove_expired` now and then, until the task is cancelled."""
    while True:
        try:
            num_files, num_batches = await remove_expired(store, keep_seconds, int(time.time()))
        except StoreError as error:
            logger.error("expired files and batches cannot be removed: %s", error)
        else:
            if num_files + num_batches > 0:
                logger.info("removed %d expired files and %d batches", num_files, num_batches)
        await asyncio.sleep(INTERVAL_SECONDS)


def _remove_file_rows(connection: apsw.Connection, now: int) -> list[str]:
    files = expired_files(connection, now, _MAX_AT_ONCE)
    for file_id in files:
        remove_file_row(connection, file_id)
    return files


async def _remove_batch(store: Store, batch: BatchRecord) -> None:
    await clear_ledger(store, batch.number)  # empty, unless the server ended just after the batch did
    await store.database.write(lambda connection: remove_batch_row(connection, batch.number))
