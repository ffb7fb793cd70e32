"""The end of a batch: its output and error files are written from the ledger, and later removed.

Every step of the writing may be repeated.
"""

import asyncio
import hashlib
import logging
import time

import apsw

from tokasaurus.server.jobs.files import remove_contents
from tokasaurus.server.jobs.line_runner import unrun_line
from tokasaurus.server.jobs.store.data_dir import NewContent, StoreError
from tokasaurus.server.jobs.store.database import explain, run_blocking
from tokasaurus.server.jobs.store.ledger import (
    free_space,
    record_results,
    remove_lines,
    results_in_order,
    unfinished_lines,
)
from tokasaurus.server.jobs.store.records import (
    FINAL_STATUSES,
    BatchRecord,
    FileRecord,
    LineResult,
    LineState,
    add_file,
    expired_files,
    finish_batch,
    finished_before,
    read_batch,
    remove_batch_row,
    remove_file_row,
)
from tokasaurus.server.jobs.store.store import Store

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 600
"""Time between two searches for what has expired."""
_MAX_REMOVED_AT_ONCE = 100
"""Files or batches of one transaction, so that others have their turn."""
# Few, so that other transactions and other threads have their turn.
_LINES_PER_STEP = 512
_PAGES_PER_STEP = 1024
_BYTES_PER_STEP = 4 << 20
"""Bytes of results that one step writes; it may have one result more."""

_WHY_UNFINISHED = {
    "expired": ("batch_expired", "the batch's completion window ended before this line was finished"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was finished"),
    "failed": ("batch_failed", "the batch failed before this line was finished"),
}


async def close_batch(store: Store, batch: BatchRecord, keep_seconds: int, now: int) -> BatchRecord:
    """The finished batch; it was finalizing or cancelling, and none of its lines runs any more.

    keep_seconds: how long its output files are kept. Raises StoreError: then call it again."""
    batch = await store.database.read(lambda connection: read_batch(connection, batch.number))
    if batch.status in FINAL_STATUSES:  # by an earlier call; its ledger may have lost lines
        await clear_ledger(store, batch.number)
        return batch
    await _answer_unfinished(store, batch)
    kinds = (("output", LineState.COMPLETED), ("error", LineState.FAILED))
    files = [await _write_file(store, batch, kind, state, keep_seconds, now) for kind, state in kinds]

    def finish(connection: apsw.Connection) -> BatchRecord:
        for file in files:
            if file is not None:
                add_file(connection, file)
        ids = [None if file is None else file.id for file in files]
        return finish_batch(connection, batch.number, ids[0], ids[1], now)

    finished = await store.database.write(finish)
    await clear_ledger(store, batch.number)
    return finished


async def clear_ledger(store: Store, number: int) -> None:
    """Remove all lines of a batch, some at a time, and give their space back. Raises StoreError."""
    while await store.database.write(lambda connection: remove_lines(connection, number, _LINES_PER_STEP)):
        pass
    num_before = None
    while num_free := await store.database.write(lambda connection: free_space(connection, _PAGES_PER_STEP)):
        if num_free == num_before:  # a database that cannot shrink, or lines of other batches are removed meanwhile
            break
        num_before = num_free


def output_file_id(batch: BatchRecord, kind: str) -> str:
    """Always the same, so that a file which is written again replaces the first."""
    return f"file-{hashlib.sha256(f'{batch.id} {kind}'.encode()).hexdigest()[:24]}"


async def _answer_unfinished(store: Store, batch: BatchRecord) -> None:
    """Give each line without a result one that says why."""
    assert batch.final_status is not None, "it was finalizing or cancelling"
    code, message = _WHY_UNFINISHED.get(batch.final_status, ("internal_error", "the line has no result"))

    def answer(connection: apsw.Connection) -> int | None:
        """Number of the line that follows the last answered one; None after the last."""
        lines = unfinished_lines(connection, batch.number, first, _LINES_PER_STEP)
        results = [LineResult(number, True, unrun_line(custom_id, code, message)) for number, custom_id in lines]
        record_results(connection, batch.number, results)
        return lines[-1][0] + 1 if lines else None

    first: int = 0
    while (following := await store.database.write(answer)) is not None:
        first = following


async def _write_file(
    store: Store, batch: BatchRecord, kind: str, state: LineState, keep_seconds: int, now: int
) -> FileRecord | None:
    """The file with the results of all lines in `state`, on the disk; None if there are none. Raises StoreError."""
    first: int | None = 0
    content: NewContent | None = None

    def write_some(connection: apsw.Connection) -> int | None:
        """Number of the line that follows the last written one; None after the last."""
        nonlocal content
        assert first is not None
        following = None
        num_bytes = 0
        for number, line in results_in_order(connection, batch.number, state, first, _LINES_PER_STEP):
            if content is None:
                content = store.data_dir.new_content(file_id)
            content.write(line)
            following = number + 1
            num_bytes += len(line)
            if num_bytes >= _BYTES_PER_STEP:
                break
        return following

    file_id = output_file_id(batch, kind)
    try:
        while first is not None:
            first = await store.database.read(write_some)
        if content is None:
            return None
        await run_blocking(content.commit)
    except OSError as error:
        raise explain(error) from None
    finally:
        if content is not None:
            content.discard()
    filename = f"{batch.id}_{kind}.jsonl"
    return FileRecord(file_id, "batch_output", filename, content.num_bytes, now, now + keep_seconds)


async def remove_expired(store: Store, keep_seconds: int, now: int) -> tuple[int, int]:
    """Remove the files whose time is over, and batches that finished more than `keep_seconds` ago; returns how many.

    A file that an unfinished batch reads stays. The output files of a batch have a time of their own. Raises
    StoreError; what is removed by then stays removed."""
    num_files = num_batches = 0
    while files := await store.database.write(lambda connection: _remove_file_rows(connection, now)):
        await remove_contents(store, files)
        num_files += len(files)
    while batches := await store.database.read(
        lambda connection: finished_before(connection, now - keep_seconds, _MAX_REMOVED_AT_ONCE)
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
    files = expired_files(connection, now, _MAX_REMOVED_AT_ONCE)
    for file_id in files:
        remove_file_row(connection, file_id)
    return files


async def _remove_batch(store: Store, batch: BatchRecord) -> None:
    await clear_ledger(store, batch.number)  # empty, unless the server ended just after the batch did
    await store.database.write(lambda connection: remove_batch_row(connection, batch.number))
