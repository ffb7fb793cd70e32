"""The end of a batch, which is killed or fails between any two steps and is begun again."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import orjson
import pytest

from tests.server.jobs.helpers.records import INPUT_FILE, integrity, new_batch, new_file, new_lines
from tokasaurus.server.errors import ApiError
from tokasaurus.server.jobs.closing import close_batch
from tokasaurus.server.jobs.line_runner import BATCH_PREFIX, answered_line, unrun_line
from tokasaurus.server.jobs.store.data_dir import NewContent, StorageFull
from tokasaurus.server.jobs.store.ledger import add_lines, record_results
from tokasaurus.server.jobs.store.records import (
    BatchRecord,
    BatchStatus,
    LineResult,
    NewLine,
    add_batch,
    add_file,
    begin_finalizing,
    read_batch,
    start_batch,
)
from tokasaurus.server.jobs.store.store import Store, open_store

NUM_LINES = 1300
KEEP_S = 1000
NOW = 1_800_000_000


def outcome(number: int) -> str:
    return ("completed", "failed", "unfinished", "completed")[number % 4]


def fill(root: Path, final_status: BatchStatus = "expired") -> None:
    """A batch that is finalizing, with lines of each outcome."""

    def begin(connection: apsw.Connection) -> None:
        add_file(connection, new_file(INPUT_FILE))
        number = add_batch(connection, new_batch()).number
        add_lines(connection, number, new_lines(NUM_LINES), range(NUM_LINES))
        start_batch(connection, number, NUM_LINES, 1_700_000_001)
        finished = [line for line in new_lines(NUM_LINES) if outcome(line.number) != "unfinished"]
        results = [
            LineResult(
                line.number, False, answered_line(BATCH_PREFIX, line.custom_id, b'{"text":"%d"}' % line.number), 3, 1, 2
            )
            if outcome(line.number) == "completed"
            else LineResult(line.number, True, unrun_line(line.custom_id, "code", "message"))
            for line in finished
        ]
        record_results(connection, number, results)
        begin_finalizing(connection, number, final_status, 1_700_000_002)

    with open_store(root, "") as store:
        content = store.data_dir.new_content(INPUT_FILE)
        content.write(b"x")
        content.commit()
        store.database.submit(begin).result()


def answer_of(line: NewLine) -> bytes:
    return answered_line(BATCH_PREFIX, line.custom_id, b'{"text":"%d"}' % line.number)


def close(store: Store) -> BatchRecord:
    batch = store.database.submit(lambda connection: read_batch(connection, 1)).result()
    return asyncio.run(close_batch(store, batch, KEEP_S, NOW))


def without_id(line: bytes) -> dict[str, Any]:
    """The id is drawn when the result is made."""
    value = orjson.loads(line)
    assert value.pop("id").startswith("batch_req_")
    return dict(value)


def error_object(message: str, code: str) -> dict[str, Any]:
    return {"message": message, "type": ApiError.type, "param": None, "code": code}


def rows(store: Store, query: str) -> list[tuple[Any, ...]]:
    return store.database.submit(lambda connection: connection.execute(query).fetchall()).result()


def check_closed(store: Store, batch: BatchRecord) -> None:
    """All rows and files are as after an undisturbed end."""
    outcomes = [outcome(number) for number in range(NUM_LINES)]
    num_completed = outcomes.count("completed")
    assert (batch.status, batch.expired_at) == ("expired", NOW)
    assert (batch.num_completed, batch.num_failed) == (num_completed, NUM_LINES - num_completed)
    sums = (batch.input_tokens, batch.cached_tokens, batch.output_tokens)
    assert sums == (3 * num_completed, num_completed, 2 * num_completed)
    assert rows(store, "SELECT count(*) FROM lines UNION ALL SELECT count(*) FROM results") == [(0,), (0,)]
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    names = {INPUT_FILE, batch.output_file_id, batch.error_file_id}
    assert {path.name for path in (store.data_dir.root / "files").iterdir()} == names
    stored = {
        file_id: (purpose, size) for file_id, purpose, size in rows(store, "SELECT id, purpose, bytes FROM files")
    }
    assert set(stored) == names
    output, error = (
        store.data_dir.content_path(file_id).read_bytes() for file_id in (batch.output_file_id, batch.error_file_id)
    )
    assert stored[batch.output_file_id] == ("batch_output", len(output))
    assert stored[batch.error_file_id] == ("batch_output", len(error))
    completed = [line for line in new_lines(NUM_LINES) if outcome(line.number) == "completed"]
    assert [without_id(line)["custom_id"] for line in output.splitlines()] == [line.custom_id for line in completed]
    assert [without_id(line)["response"]["body"] for line in output.splitlines()] == [
        {"text": str(line.number)} for line in completed
    ]
    expired = ("the batch's completion window ended before this line was finished", "batch_expired")
    assert [without_id(line) for line in error.splitlines()] == [
        {
            "custom_id": f"line-{number}",
            "response": None,
            "error": error_object(*(expired if outcomes[number] == "unfinished" else ("message", "code"))),
        }
        for number in range(NUM_LINES)
        if outcomes[number] != "completed"
    ]


@pytest.fixture(scope="module")
def finalizing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory to copy."""
    root = tmp_path_factory.mktemp("finalizing")
    fill(root)
    return root


def test_an_undisturbed_end(finalizing: Path, tmp_path: Path) -> None:
    shutil.copytree(finalizing, tmp_path / "data")
    with open_store(tmp_path / "data", "") as store:
        check_closed(store, close(store))
        check_closed(store, close(store))  # the second changes nothing


def test_the_space_of_the_ledger_is_given_back(finalizing: Path, tmp_path: Path) -> None:
    shutil.copytree(finalizing, tmp_path / "data")
    with open_store(tmp_path / "data", "") as store:
        ((num_pages,),) = rows(store, "PRAGMA page_count")
        close(store)
        assert rows(store, "PRAGMA freelist_count") == [(0,)]
        assert rows(store, "PRAGMA page_count")[0][0] < num_pages / 2
    with open_store(tmp_path / "data", "") as store:
        assert rows(store, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("kinds", [set(), {"output"}, {"error"}])
def test_a_file_without_lines_is_not_made(tmp_path: Path, kinds: set[str]) -> None:
    def begin(connection: apsw.Connection) -> None:
        number = add_batch(connection, new_batch()).number
        add_lines(connection, number, new_lines(len(kinds)), range(len(kinds)))
        start_batch(connection, number, len(kinds), 1)
        record_results(connection, number, [LineResult(0, "error" in kinds, b"{}\n")])
        begin_finalizing(connection, number, "completed", 2)

    with open_store(tmp_path, "") as store:
        store.database.submit(begin).result()
        batch = close(store)
        made = {"output": batch.output_file_id, "error": batch.error_file_id}
        assert {kind for kind, file_id in made.items() if file_id is not None} == kinds


# Closes the batch in a fork for each step, which is killed before the step.
KILL_AT_EACH_STEP = """
import asyncio, os, shutil, signal, sys
from pathlib import Path
from tests.server.jobs import test_closing
from tokasaurus.server.jobs.store.data_dir import NewContent
from tokasaurus.server.jobs.store.database import Database
from tokasaurus.server.jobs.store.store import open_store

finalizing, copies = map(Path, sys.argv[1:])

def close_until(step, root):
    with open_store(root, "") as store:
        left = [step]
        def kill_before(owner, name):
            call = getattr(owner, name)
            def killing(*args, **kwargs):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*args, **kwargs)
            setattr(owner, name, killing)
        batch = store.database.submit(lambda connection: test_closing.read_batch(connection, 1)).result()
        for owner, name in ((Database, "submit"), (Database, "read"), (os, "fsync"), (Path, "replace"),
                            (Path, "unlink"), (NewContent, "__init__"), (NewContent, "commit")):
            kill_before(owner, name)
        asyncio.run(test_closing.close_batch(store, batch, test_closing.KEEP_S, test_closing.NOW))

for step in range(1000):
    root = copies / str(step)
    shutil.copytree(finalizing, root)
    child = os.fork()
    if child == 0:
        try:
            close_until(step, root)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
    if status != -signal.SIGKILL:
        break
"""


def test_it_may_be_killed_before_each_step(finalizing: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_AT_EACH_STEP, str(finalizing), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=400, text=True, cwd=Path(__file__).parents[3])
    assert not done.stderr
    statuses = [int(line) for line in done.stdout.split()]
    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0]
    assert len(statuses) > 25
    found = set()
    for step in range(len(statuses)):
        with open_store(tmp_path / str(step), "") as store:
            (found_status,) = rows(store, "SELECT status FROM batches")[0]
            found.add(found_status)
            check_closed(store, close(store))
        assert integrity(tmp_path / str(step) / "database.sqlite") == "ok"
    assert found == {"finalizing", "expired"}


def test_it_may_fail_at_each_write_and_is_tried_again(
    finalizing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same server, with the record that was read at the first try."""

    async def close_with_failures(store: Store, batch: BatchRecord, failing: int) -> tuple[BatchRecord, bool]:
        """(the closed batch, whether a step failed)"""
        write = store.database.write
        left = failing

        async def write_or_fail(operation: Callable[[apsw.Connection], Any]) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise StorageFull("no space")
            return await write(operation)

        monkeypatch.setattr(store.database, "write", write_or_fail)
        try:
            return await close_batch(store, batch, KEEP_S, NOW), False
        except StorageFull:
            return await close_batch(store, batch, KEEP_S, NOW), True

    for failing in range(100):
        root = tmp_path / str(failing)
        shutil.copytree(finalizing, root)
        with open_store(root, "") as store:
            batch = store.database.submit(lambda connection: read_batch(connection, 1)).result()
            closed, has_failed = asyncio.run(close_with_failures(store, batch, failing))
            check_closed(store, closed)
        if not has_failed:
            break
    assert failing > 5


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_that_does_not_fit_is_said_and_written_later(
    finalizing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """/dev/full answers each write with ENOSPC."""
    shutil.copytree(finalizing, tmp_path / "data")
    with open_store(tmp_path / "data", "") as store:
        num_made = 0

        def new_content(file_id: str) -> NewContent:
            nonlocal num_made
            if num_made == failing:
                store.data_dir.content_path(f"{file_id}.part").symlink_to("/dev/full")
            num_made += 1
            return NewContent(store.data_dir.content_path(file_id))

        monkeypatch.setattr(store.data_dir, "new_content", new_content)
        with pytest.raises(StorageFull, match="no space is left"):
            close(store)
        assert not list((tmp_path / "data" / "files").glob("*.part"))
        assert rows(store, "SELECT status FROM batches") == [("finalizing",)]
        check_closed(store, close(store))
    assert integrity(tmp_path / "data" / "database.sqlite") == "ok"
