"""Files: a row in the database and content in the data directory; the content is there before the row."""

import secrets

import apsw

from tokasaurus.server.batches.store.records import FINAL_STATUSES, FileRecord, insert, page, select


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def get_file(connection: apsw.Connection, file_id: str) -> FileRecord | None:
    return next(select(connection, FileRecord, "id = ?", (file_id,)), None)


def add_file(connection: apsw.Connection, record: FileRecord) -> None:
    """Its content must be in place. A record with the same id is replaced."""
    connection.execute("DELETE FROM files WHERE id = ?", (record.id,))
    insert(connection, record)


def list_files(
    connection: apsw.Connection, purpose: str | None, after: str | None, limit: int, newest_first: bool
) -> tuple[list[FileRecord], bool]:
    """As `page`."""
    condition, values = ("TRUE", ()) if purpose is None else ("purpose = ?", (purpose,))
    return page(connection, FileRecord, after, limit, newest_first, condition, values)


def batch_that_needs(connection: apsw.Connection, file_id: str) -> str | None:
    """The id of a batch that is not finished and reads the file; None if there is none."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    query = f"SELECT id FROM batches WHERE input_file_id = ? AND status NOT IN ({marks})"
    row = connection.execute(query, (file_id, *FINAL_STATUSES)).fetchone()
    return None if row is None else str(row[0])


def remove_file_row(connection: apsw.Connection, file_id: str) -> None:
    """The caller removes the content afterwards."""
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def expired_files(connection: apsw.Connection, now: int, limit: int) -> list[str]:
    """Ids of up to `limit` files past their time that no unfinished batch reads."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    query = (
        "SELECT id FROM files WHERE expires_at <= ? AND NOT EXISTS "
        f"(SELECT 1 FROM batches WHERE input_file_id = files.id AND status NOT IN ({marks})) LIMIT ?"
    )
    return [file_id for (file_id,) in connection.execute(query, (now, *FINAL_STATUSES, limit))]


def file_ids(connection: apsw.Connection) -> set[str]:
    return {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
