"""Records for tests of the store."""

from pathlib import Path

import apsw

from tokasaurus.server.jobs.store.records import BatchRecord, FileRecord, LineResult, NewLine
from tokasaurus.server.protocol.batches import BatchStatus

INPUT_FILE = "file-input"


def new_batch(status: BatchStatus = "validating", name: str = "batch_1") -> BatchRecord:
    return BatchRecord(
        number=0,
        id=name,
        endpoint="/v1/completions",
        input_file_id=INPUT_FILE,
        completion_window="24h",
        expires_at=2_000_000_000,
        created_at=1_700_000_000,
        status=status,
    )


def new_lines(count: int) -> list[NewLine]:
    return [NewLine(number, f"line-{number}", number * 10, 9) for number in range(count)]


def new_file(file_id: str) -> FileRecord:
    return FileRecord(file_id, "batch", "input.jsonl", 1, 1_700_000_000)


def new_result(number: int, has_failed: bool = False, num_bytes: int = 0) -> LineResult:
    """num_bytes: of the content, at least."""
    content = f"result of {number} ".encode().ljust(num_bytes, b".") + b"\n"
    return LineResult(number, has_failed, content, number + 1, number % 3, 2 * number + 1)


def integrity(database: Path) -> str:
    """`ok`, or what is wrong; opens its own connection."""
    connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        return str(connection.pragma("integrity_check"))
    finally:
        connection.close()
