"""The database's tables. A change appends a migration; none is ever edited, since databases of users have run it."""

import apsw

from tokasaurus.server.batches.store.data_dir import StoreError

# Keys of `lines` and `results` are batches.number << LINE_BITS | number of the line.
LINE_BITS = 32

MIGRATIONS = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER
    ) STRICT;
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        expires_at INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        status TEXT NOT NULL,
        final_status TEXT,
        model TEXT,
        cache_salt TEXT NOT NULL,
        metadata TEXT,
        errors TEXT,
        output_expires_after INTEGER,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        completed_at INTEGER,
        failed_at INTEGER,
        expired_at INTEGER,
        cancelling_at INTEGER,
        cancelled_at INTEGER,
        output_file_id TEXT,
        error_file_id TEXT,
        num_lines INTEGER NOT NULL DEFAULT 0,
        num_completed INTEGER NOT NULL DEFAULT 0,
        num_failed INTEGER NOT NULL DEFAULT 0,
        input_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER NOT NULL DEFAULT 0,
        output_tokens INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE lines (
        key INTEGER PRIMARY KEY,
        custom_id TEXT NOT NULL,
        start INTEGER NOT NULL,
        size INTEGER NOT NULL,
        state INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        seed INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE results (
        key INTEGER PRIMARY KEY REFERENCES lines (key),
        content BLOB NOT NULL
    ) STRICT;
    """,
)


def migrate(connection: apsw.Connection) -> None:
    """Bring the tables to the newest version. Raises StoreError if the database is of a newer Tokasaurus."""
    with connection:
        version = check_version(connection)
        if version == len(MIGRATIONS):  # nothing is written: the disk may be full
            return
        for migration in MIGRATIONS[version:]:
            connection.execute(migration)
        connection.pragma("user_version", len(MIGRATIONS))


def check_version(connection: apsw.Connection) -> int:
    """Migrations that the database has run. Raises StoreError if it is of a newer Tokasaurus."""
    version = int(connection.pragma("user_version"))
    if version > len(MIGRATIONS):
        raise StoreError(
            f"its database has the version {version}, and this Tokasaurus knows versions up to {len(MIGRATIONS)}: "
            "use a newer one"
        )
    return version
