"""Batches in the database: their states. All functions run within a transaction."""

from dataclasses import replace

import apsw

from tokasaurus.server.batches.store.records import FINAL_STATUSES, BatchRecord, insert, page, select
from tokasaurus.server.protocol.storage.batches import BatchStatus


def add_batch(connection: apsw.Connection, record: BatchRecord) -> BatchRecord:
    """The batch with its number; the one that `record` has is ignored."""
    # numbers are not used again: rows of a removed batch may still be in the ledger
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'batches'").fetchone()
    numbered = replace(record, number=1 if row is None else row[0] + 1)
    insert(connection, numbered)
    return numbered


def get_batch(connection: apsw.Connection, batch_id: str) -> BatchRecord | None:
    return next(select(connection, BatchRecord, "id = ?", (batch_id,)), None)


def read_batch(connection: apsw.Connection, number: int) -> BatchRecord:
    """The batch, which must exist."""
    return next(select(connection, BatchRecord, "number = ?", (number,)))


def list_batches(connection: apsw.Connection, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
    """The newest first; as `page`."""
    return page(connection, BatchRecord, after, limit)


def unfinished_batches(connection: apsw.Connection) -> list[BatchRecord]:
    """The oldest first."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    return list(select(connection, BatchRecord, f"status NOT IN ({marks}) ORDER BY number", FINAL_STATUSES))


def start_batch(connection: apsw.Connection, number: int, num_lines: int, now: int) -> BatchRecord:
    """A validated batch starts to run; one that is no longer validating is left as it is."""
    _set(
        connection,
        number,
        "status = 'in_progress', in_progress_at = ?, num_lines = ?",
        (now, num_lines),
        "status = 'validating'",
    )
    return read_batch(connection, number)


def fail_batch(connection: apsw.Connection, number: int, errors: str, now: int) -> BatchRecord:
    """errors: JSON list. Only a batch that is validating or in progress can fail."""
    _set(
        connection,
        number,
        "status = 'failed', failed_at = ?, errors = ?",
        (now, errors),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def cancel_batch(connection: apsw.Connection, number: int, now: int) -> BatchRecord:
    """The batch, which is cancelling now unless it is finished, finalizing or cancelling already."""
    _set(
        connection,
        number,
        "status = 'cancelling', final_status = 'cancelled', cancelling_at = ?",
        (now,),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def begin_finalizing(
    connection: apsw.Connection, number: int, final_status: BatchStatus, now: int, errors: str | None = None
) -> BatchRecord:
    """No line of the batch runs any more: its output files are written next.

    final_status: completed, expired, or failed with `errors`, a JSON list. A batch that is finalizing or cancelling
    already keeps what it will be."""
    _set(
        connection,
        number,
        "status = 'finalizing', final_status = ?, finalizing_at = ?, errors = ?",
        (final_status, now, errors),
        "status IN ('validating', 'in_progress')",
    )
    return read_batch(connection, number)


def finish_batch(
    connection: apsw.Connection, number: int, output_file_id: str | None, error_file_id: str | None, now: int
) -> BatchRecord:
    """The batch gets its final status. Its ledger is no longer needed."""
    batch = read_batch(connection, number)
    assert batch.final_status is not None, "it was finalizing or cancelling"
    _set(
        connection,
        number,
        f"status = final_status, {batch.final_status}_at = ?, output_file_id = ?, error_file_id = ?",
        (now, output_file_id, error_file_id),
        "status IN ('finalizing', 'cancelling')",
    )
    return read_batch(connection, number)


def finished_before(connection: apsw.Connection, time: int, limit: int) -> list[BatchRecord]:
    """Up to `limit` batches that finished before that time."""
    times = ", ".join(f"{status}_at" for status in FINAL_STATUSES)  # each has one of them
    marks = ", ".join("?" * len(FINAL_STATUSES))
    condition = f"status IN ({marks}) AND coalesce({times}) < ? LIMIT ?"
    return list(select(connection, BatchRecord, condition, (*FINAL_STATUSES, time, limit)))


def remove_batch_row(connection: apsw.Connection, number: int) -> None:
    """Its ledger must be removed before."""
    connection.execute("DELETE FROM batches WHERE number = ?", (number,))


def _set(connection: apsw.Connection, number: int, changes: str, values: tuple[object, ...], condition: str) -> None:
    connection.execute(f"UPDATE batches SET {changes} WHERE number = ? AND {condition}", (*values, number))
