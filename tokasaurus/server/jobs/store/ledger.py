"""The ledger: one row per line of a batch, one result per line that has finished, and what is kept of lines that the
server's end has cut.

All functions run within a transaction. `batch` is a batch's number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import apsw

from tokasaurus.server.jobs.store.database import LINE_BITS
from tokasaurus.server.jobs.store.records import FINAL_STATUSES, LineResult, LineState, NewLine, PendingLine

_UINT64 = 1 << 64
_INT64 = 1 << 63


def add_lines(connection: apsw.Connection, batch: int, lines: Iterable[NewLine], seeds: Iterable[int]) -> None:
    """seeds: unsigned 64 bits."""
    rows = (
        (_key(batch, line.number), line.custom_id, line.start, line.size, _signed(seed))
        for line, seed in zip(lines, seeds, strict=True)
    )
    connection.executemany("INSERT INTO lines (key, custom_id, start, size, seed) VALUES (?, ?, ?, ?, ?)", rows)


def remove_lines(connection: apsw.Connection, batch: int, limit: int) -> int:
    """Remove up to `limit` rows and their results; returns how many. Few at a time, so that others can write."""
    bounds = (*_keys(batch), limit)
    keys = connection.execute("SELECT key FROM lines WHERE key BETWEEN ? AND ? ORDER BY key LIMIT ?", bounds).fetchall()
    if keys:
        connection.execute("DELETE FROM kept WHERE key BETWEEN ? AND ?", (keys[0][0], keys[-1][0]))
        connection.execute("DELETE FROM results WHERE key BETWEEN ? AND ?", (keys[0][0], keys[-1][0]))
        connection.execute("DELETE FROM lines WHERE key BETWEEN ? AND ?", (keys[0][0], keys[-1][0]))
    return len(keys)


def free_space(connection: apsw.Connection, limit: int) -> int:
    """Give up to `limit` unused pages of the database back to the file system; returns how many are left."""
    connection.execute(f"PRAGMA incremental_vacuum({limit})").fetchall()
    return int(connection.pragma("freelist_count"))


def finished_ledgers(connection: apsw.Connection) -> list[int]:
    """Numbers of the finished batches that have lines, although their results are in files."""
    marks = ", ".join("?" * len(FINAL_STATUSES))
    rows = connection.execute(
        f"SELECT number FROM batches WHERE status IN ({marks}) AND EXISTS "
        "(SELECT 1 FROM lines WHERE key >= number << ? AND key < (number + 1) << ?)",
        (*FINAL_STATUSES, LINE_BITS, LINE_BITS),
    )
    return [number for (number,) in rows]


def pending_lines(connection: apsw.Connection, batch: int, first: int, limit: int) -> list[PendingLine]:
    """The first `limit` lines that wait, from the line with number `first` on."""
    rows = connection.execute(
        "SELECT key, custom_id, start, size, attempts, seed FROM lines "
        "WHERE key BETWEEN ? AND ? AND state = ? ORDER BY key LIMIT ?",
        (_key(batch, first), _keys(batch)[1], LineState.PENDING, limit),
    )
    return [
        PendingLine(_number(key), custom_id, start, size, attempts, seed % _UINT64)
        for key, custom_id, start, size, attempts, seed in rows
    ]


def start_lines(connection: apsw.Connection, batch: int, numbers: Sequence[int]) -> None:
    """Lines that wait run: one attempt more."""
    connection.executemany(
        "UPDATE lines SET state = ?, attempts = attempts + 1 WHERE key = ? AND state = ?",
        ((LineState.RUNNING, _key(batch, number), LineState.PENDING) for number in numbers),
    )


def release_lines(connection: apsw.Connection, batch: int, numbers: Sequence[int], counts_attempt: bool) -> None:
    """The lines wait again. counts_attempt: false if they stopped for a reason that is not theirs."""
    connection.executemany(
        "UPDATE lines SET state = ?, attempts = attempts - ? WHERE key = ? AND state = ?",
        ((LineState.PENDING, not counts_attempt, _key(batch, number), LineState.RUNNING) for number in numbers),
    )


def release_running(connection: apsw.Connection, batch: int) -> int:
    """The lines that ran when the last server ended wait again; returns how many."""
    connection.execute(
        "UPDATE lines SET state = ? WHERE key BETWEEN ? AND ? AND state = ?",
        (LineState.PENDING, *_keys(batch), LineState.RUNNING),
    )
    return connection.changes()


def keep_tokens(connection: apsw.Connection, batch: int, kept: Mapping[int, bytes]) -> None:
    """Store what lines had when they were cut, by their numbers, until they have results. It replaces what was kept of
    them before."""
    rows = ((_key(batch, number), content) for number, content in kept.items())
    connection.executemany("INSERT OR REPLACE INTO kept (key, content) VALUES (?, ?)", rows)


def kept_lines(connection: apsw.Connection, batch: int) -> set[int]:
    """Numbers of the lines of which something is kept."""
    rows = connection.execute("SELECT key FROM kept WHERE key BETWEEN ? AND ?", _keys(batch))
    return {_number(key) for (key,) in rows}


def read_kept(connection: apsw.Connection, batch: int, number: int) -> bytes | None:
    """What `keep_tokens` has stored of a line."""
    row = connection.execute("SELECT content FROM kept WHERE key = ?", (_key(batch, number),)).fetchone()
    return None if row is None else row[0]


def record_results(connection: apsw.Connection, batch: int, results: Sequence[LineResult]) -> None:
    """Store results and count them. A line that has a result keeps it; one that is not in the ledger gets none."""
    new = []
    for result in results:
        state = LineState.FAILED if result.has_failed else LineState.COMPLETED
        connection.execute(
            "UPDATE lines SET state = ? WHERE key = ? AND state IN (?, ?)",
            (state, _key(batch, result.number), LineState.PENDING, LineState.RUNNING),
        )
        if connection.changes() == 1:
            new.append(result)
    connection.executemany(
        "INSERT INTO results (key, content) VALUES (?, ?)",
        ((_key(batch, result.number), result.content) for result in new),
    )
    connection.executemany("DELETE FROM kept WHERE key = ?", ((_key(batch, result.number),) for result in new))
    connection.execute(
        "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?, "
        "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?, "
        "reasoning_tokens = reasoning_tokens + ? WHERE number = ?",
        (
            sum(not result.has_failed for result in new),
            sum(result.has_failed for result in new),
            sum(result.input_tokens for result in new),
            sum(result.cached_tokens for result in new),
            sum(result.output_tokens for result in new),
            sum(result.reasoning_tokens for result in new),
            batch,
        ),
    )


def unfinished_lines(connection: apsw.Connection, batch: int, first: int, limit: int) -> list[tuple[int, str]]:
    """(number, custom_id) of the first `limit` lines without a result, from the line with number `first` on."""
    rows = connection.execute(
        "SELECT key, custom_id FROM lines WHERE key BETWEEN ? AND ? AND state IN (?, ?) ORDER BY key LIMIT ?",
        (_key(batch, first), _keys(batch)[1], LineState.PENDING, LineState.RUNNING, limit),
    )
    return [(_number(key), custom_id) for key, custom_id in rows]


def results_in_order(
    connection: apsw.Connection, batch: int, state: LineState, first: int, limit: int
) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the first `limit` results of lines in `state`, from the line with number `first` on. Each
    is read when it is asked for."""
    rows = connection.execute(
        "SELECT lines.key, content FROM lines JOIN results ON results.key = lines.key "
        "WHERE lines.key BETWEEN ? AND ? AND state = ? ORDER BY lines.key LIMIT ?",
        (_key(batch, first), _keys(batch)[1], state, limit),
    )
    return ((_number(key), content) for key, content in rows)


def first_results(connection: apsw.Connection, batch: int, first: int, max_bytes: int) -> list[bytes]:
    """The results of the lines from the one with number `first` on, up to a line without one. One result may exceed
    `max_bytes`, those before it together do not."""
    rows = connection.execute(
        "SELECT lines.key, content FROM lines JOIN results ON results.key = lines.key "
        "WHERE lines.key BETWEEN ? AND ? ORDER BY lines.key",
        (_key(batch, first), _keys(batch)[1]),
    )
    found: list[bytes] = []
    num_bytes = 0
    for key, content in rows:
        if _number(key) != first + len(found) or num_bytes >= max_bytes:
            break
        found.append(content)
        num_bytes += len(content)
    return found


def _key(batch: int, number: int) -> int:
    return batch << LINE_BITS | number


def _number(key: int) -> int:
    return key & (1 << LINE_BITS) - 1


def _keys(batch: int) -> tuple[int, int]:
    """The first and the last key that a line of the batch may have."""
    return _key(batch, 0), _key(batch, (1 << LINE_BITS) - 1)


def _signed(seed: int) -> int:
    """SQLite's integers are signed."""
    return seed - _UINT64 if seed >= _INT64 else seed
