"""The validation's process dies, cannot start, or is not needed any more."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.jobs.helpers.batch_service import input_lines
from tests.server.jobs.helpers.records import INPUT_FILE, new_batch, new_file
from tokasaurus.config import ServerConfig
from tokasaurus.server.jobs import service
from tokasaurus.server.jobs.service import ValidationDied, fill_ledger
from tokasaurus.server.jobs.store.data_dir import ContentMissing, DataDir, StoreError
from tokasaurus.server.jobs.store.ledger import pending_lines
from tokasaurus.server.jobs.store.records import BatchRecord, PendingLine, add_batch, add_file
from tokasaurus.server.jobs.store.store import Store, open_store

NUM_LINES = 3000
CONTENT = input_lines(*({"prompt": f"line {number}"} for number in range(NUM_LINES)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "data", "") as store:
        content = store.data_dir.new_content(INPUT_FILE)
        content.write(CONTENT)
        content.commit()
        store.database.submit(lambda connection: add_file(connection, new_file(INPUT_FILE))).result()
        yield store


@pytest.fixture
def batch(store: Store) -> BatchRecord:
    return store.database.submit(lambda connection: add_batch(connection, new_batch())).result()


def ledger(store: Store, batch: BatchRecord) -> list[PendingLine]:
    return store.database.submit(lambda connection: pending_lines(connection, batch.number, 0, 10_000)).result()


def replace_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_runs: int, command: str) -> None:
    """The process is `command` at its first runs, and then what it should be. $@ of it: Python's arguments."""
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho run >> {tmp_path}/runs\nPYTHON={sys.executable}\n"
        f'if [ $(wc -l < {tmp_path}/runs) -le {first_runs} ]; then {command}; else exec $PYTHON "$@"; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(service.sys, "executable", str(script))


def num_runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def test_the_ledger_has_each_line_where_it_is(store: Store, batch: BatchRecord) -> None:
    assert asyncio.run(fill_ledger(store, batch, ServerConfig())) == (NUM_LINES, [])
    lines = ledger(store, batch)
    assert [line.custom_id for line in lines] == [str(number) for number in range(NUM_LINES)]
    assert b"".join(CONTENT[line.start : line.start + line.size] + b"\n" for line in lines) == CONTENT
    assert len({line.seed for line in lines}) == NUM_LINES
    assert max(line.seed for line in lines) > 1 << 63


DEATHS = {
    "at once": "exit 1",
    "killed": "kill -9 $$",
    "after a part": '$PYTHON "$@" | head -n 2',
    "within a part": '$PYTHON "$@" | head -c 20000',
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_a_process_that_dies_is_started_again(
    store: Store, batch: BatchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    replace_python(tmp_path, monkeypatch, 2, death)
    assert asyncio.run(fill_ledger(store, batch, ServerConfig())) == (NUM_LINES, [])
    assert [line.custom_id for line in ledger(store, batch)] == [str(number) for number in range(NUM_LINES)]
    assert num_runs(tmp_path) == 3


def test_a_process_that_always_dies_is_given_up(
    store: Store, batch: BatchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_python(tmp_path, monkeypatch, 100, DEATHS["killed"])
    # asyncio says 255 where another part of this process has learnt of the child's end first
    with pytest.raises(ValidationDied, match=r"-9|255"):
        asyncio.run(fill_ledger(store, batch, ServerConfig()))
    assert num_runs(tmp_path) == 3
    assert f"the validation of {batch.id} died (3 of 3 tries)" in caplog.text


def test_a_process_that_cannot_be_started_is_no_fault_of_the_file(
    store: Store, batch: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.sys, "executable", "/missing/python")
    with pytest.raises(StoreError, match="cannot be started: No such file"):
        asyncio.run(fill_ledger(store, batch, ServerConfig()))


def test_a_missing_file_is_said(store: Store, batch: BatchRecord) -> None:
    store.data_dir.remove_content(INPUT_FILE)
    with pytest.raises(ContentMissing, match=INPUT_FILE):
        asyncio.run(fill_ledger(store, batch, ServerConfig()))


def test_errors_of_the_file_are_returned_with_a_count_of_the_others(store: Store, batch: BatchRecord) -> None:
    store.data_dir.content_path(INPUT_FILE).write_bytes(b"{\n" * 1234)
    num_lines, errors = asyncio.run(fill_ledger(store, batch, ServerConfig()))
    assert num_lines == 0
    assert [error.line for error in errors] == [*range(1, 1001), None]
    assert errors[-1].message == "234 more errors are not shown"


def test_the_process_ends_when_the_validation_is_cancelled(
    store: Store, batch: BatchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pid")
    replace_python(tmp_path, monkeypatch, 1, f"echo $$ > {tmp_path}/pid; exec sleep 60")

    async def cancel() -> int:
        task = asyncio.create_task(fill_ledger(store, batch, ServerConfig()))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        assert os.getpgid(pid) == pid, "Ctrl-C in the terminal of the server does not reach it"
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return pid

    pid = asyncio.run(asyncio.wait_for(cancel(), 50))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_imports_no_module_of_the_working_directory(
    store: Store, batch: BatchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("orjson", "codecs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(tmp_path)
    relative = Store(DataDir(Path("data")), store.database)
    assert asyncio.run(fill_ledger(relative, batch, ServerConfig())) == (NUM_LINES, [])
