"""The state of a job: what it finds again after any death, and what it refuses."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.limits import read_line
from tests.library.map.helpers.finished import finished_rows, read_output, shard_format, shard_of, write_shard
from tokasaurus.library.map.answers import answer_names
from tokasaurus.library.map.journal import (
    DoneRows,
    JobChanged,
    Journal,
    KeySet,
    OutputFull,
    OutputInUse,
    StoredAnswer,
)
from tokasaurus.library.map.shards import JsonShards, MapRow, ShardFormat
from tokasaurus.library.map.sources import open_source

SETTINGS = {"request": {"model": "m", "temperature": 0.5}, "key": None, "prompt": "{q}"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def make_rows(count: int) -> tuple[list[MapRow], ShardFormat]:
    source = open_source([{"q": f"q{number}"} for number in range(count)])
    output = shard_format(source)
    return finished_rows(source, output), output


def open_journal(
    output: Path, settings: Any = SETTINGS, shards: ShardFormat | None = None, overwrite: bool = False
) -> Journal:
    return Journal(output, settings, make_rows(1)[1] if shards is None else shards, overwrite)


def as_stored(rows: list[MapRow]) -> dict[int, StoredAnswer]:
    return {
        row.key_hash: StoredAnswer(row.identity, row.answer, row.finish_reason, row.error, row.more) for row in rows
    }


def die(journal: Journal) -> None:
    """What another process finds when this one has died: the lock is free, and nothing else was done."""
    fcntl.flock(journal._lock, fcntl.LOCK_UN)


def append_one_by_one(journal: Journal, rows: list[MapRow]) -> None:
    for row in rows:
        journal.append([row])


def state(output: Path) -> list[str]:
    names = {path.name for path in output.with_name("out.toka").iterdir()}
    assert {"lock", "job.json"} <= names
    return sorted(names - {"lock", "job.json"})


@pytest.mark.parametrize("seed", range(5))
def test_a_key_set_finds_the_keys_that_come_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    keys, seen = KeySet(), set[int]()
    for _ in range(300):
        size = int(random.integers(0, 200))
        hashes = random.integers(0, 1 << 63, size, dtype=np.uint64)
        if random.random() < 0.1 and size and seen:
            position = int(random.integers(size))
            if random.random() < 0.5:
                hashes[position] = random.choice(sorted(seen))
            else:
                hashes[position] = hashes[position - 1]
        listed = hashes.tolist()
        again = [index for index, key in enumerate(listed) if key in seen or key in listed[:index]]
        assert keys.add(hashes).tolist() == again
        seen |= set(listed)
    assert sum(map(len, keys._arrays)) == len(seen)
    assert len(keys._arrays) <= 12


def test_done_rows_are_found_with_their_identities() -> None:
    random = np.random.default_rng(0)
    index = random.integers(0, 1 << 63, (1_000, 2), dtype=np.uint64)
    done = DoneRows([index[:300], index[300:300], index[300:]])
    assert len(done) == 1_000
    positions = done.find(index[::-1, 0])
    assert (done.identities(positions) == index[::-1, 1]).all()
    assert (done.find(index[:, 0] + np.uint64(1)) == -1).all()
    assert DoneRows([]).find(index[:2, 0]).tolist() == [-1, -1]


def test_finished_rows_are_found_again_without_a_regular_end(output: Path) -> None:
    rows, shards = make_rows(100)
    first = open_journal(output, shards=shards)
    write_shard(first, rows[:40])
    first.append(rows[40:60])
    first.append(rows[60:70])
    die(first)
    again = open_journal(output, shards=shards)
    assert len(again.done) == 40
    assert again.finished == as_stored(rows[40:70])
    assert [row["answer"] for row in read_output(output)] == [row.answer for row in rows[:40]]
    assert state(output) == ["index-000000.npy", "journal-000001.jsonl"]


@pytest.mark.parametrize("cut", [1, 20, 45])
def test_a_torn_line_is_dropped_and_the_next_call_writes_after_it(output: Path, cut: int) -> None:
    rows, _ = make_rows(10)
    journal = open_journal(output)
    journal.append(rows[:5])
    journal.close()
    path = output.with_name("out.toka") / "journal-000000.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    journal = open_journal(output)
    whole = rows[:5] if cut == 1 else rows[:4]
    assert journal.finished == as_stored(whole)
    journal.append(rows[5:])
    journal.close()
    assert open_journal(output).finished == as_stored(whole + rows[5:])


def test_damaged_lines_are_left_out(output: Path) -> None:
    rows, _ = make_rows(10)
    journal = open_journal(output)
    journal.append(rows)
    journal.close()
    path = output.with_name("out.toka") / "journal-000000.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b"a2", b"b2")
    lines[5] = bytes(len(lines[5]))
    path.write_bytes(b"\n".join(lines))
    assert open_journal(output).finished == as_stored([row for row in rows if row.number not in (2, 4)])


def test_an_index_without_its_file_counts_for_nothing(output: Path) -> None:
    rows, shards = make_rows(20)
    journal = open_journal(output, shards=shards)
    journal.append(rows)
    np.save(output.with_name("out.toka") / "index-000000.npy", shard_of(rows[:3]).index())
    (output.with_name("out.toka") / "part-000000.parquet.part").write_bytes(b"half of it")
    journal.close()
    journal = open_journal(output, shards=shards)
    assert len(journal.done) == 0
    assert journal.finished == as_stored(rows)
    assert state(output) == ["journal-000000.jsonl"]
    journal.finished.clear()
    journal.close_shard(shard_of(rows))
    journal.close()
    assert len(open_journal(output, shards=shards).done) == 20


def test_a_journal_whose_file_exists_counts_for_nothing(output: Path) -> None:
    rows, shards = make_rows(20)
    journal = open_journal(output, shards=shards)
    journal.append(rows)
    path = output.with_name("out.toka") / "journal-000000.jsonl"
    content = path.read_bytes()
    journal.close_shard(shard_of(rows))
    journal.close()
    path.write_bytes(content)
    journal = open_journal(output, shards=shards)
    assert (len(journal.done), journal.finished) == (20, {})
    assert "journal-000000.jsonl" not in state(output)


@pytest.mark.parametrize("step", range(12))
def test_a_death_at_any_step_of_closing_a_file_loses_and_doubles_nothing(
    output: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system calls before `step` are done, and no more; some rows of an earlier call have not come yet."""
    rows, shards = make_rows(30)
    journal = open_journal(output, shards=shards)
    journal.append(rows)
    journal.close()
    journal = open_journal(output, shards=shards)
    for row in rows[:20]:
        del journal.finished[row.key_hash]
    num_calls = 0

    class Death(BaseException): ...

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            if num_calls == step:
                raise Death
            num_calls += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(os, "fdatasync", counted(os.fdatasync))
        patch.setattr(os, "write", counted(os.write))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        try:
            journal.close_shard(shard_of(rows[:20]))
        except Death:
            is_whole = False
        else:
            is_whole = True
    die(journal)
    again = open_journal(output, shards=shards)
    in_files = {row["q"] for row in read_output(output)}
    assert len(again.done) == len(in_files)
    assert in_files in (set(), {f"q{number}" for number in range(20)})
    rest = rows[20:] if in_files else rows
    assert again.finished == as_stored(rest)
    assert not is_whole or in_files
    # and the next file is closed as ever
    again.finished.clear()
    again.close_shard(shard_of(rest))
    again.close()
    assert len(open_journal(output, shards=shards).done) == 30
    assert sorted(row["q"] for row in read_output(output)) == sorted(f"q{number}" for number in range(30))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("num_bytes", [0, 100, 700])
def test_a_full_disk_corrupts_nothing(
    output: Path, num_bytes: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = make_rows(30)
    journal = open_journal(output)
    write = os.write
    left = num_bytes

    def write_while_space_is_left(file: int, content: Any) -> int:
        nonlocal left
        if left == 0:
            raise OSError(number, os.strerror(number))
        written = write(file, bytes(content)[:left])
        left -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_while_space_is_left)
        with pytest.raises(OutputFull, match=r"output=.*out: .*; the same call goes on when there is space") as caught:
            append_one_by_one(journal, rows)
    assert caught.value.errno == number
    assert "\n" not in str(caught.value)
    journal.close()
    again = open_journal(output)
    whole = len(again.finished)
    assert whole < 30
    assert again.finished == as_stored(rows[:whole])
    assert read_output(output) == []


def test_a_disk_that_is_full_while_a_file_is_written_keeps_its_rows(output: Path) -> None:
    rows, _ = make_rows(30)

    class Full(JsonShards):
        def write(self, path: Path, _rows: object) -> None:
            path.write_bytes(b"PAR1")
            raise OSError(errno.ENOSPC, "No space left on device")

    journal = open_journal(output, shards=Full(answer_names([], "")))
    journal.append(rows)
    with pytest.raises(OutputFull):
        journal.close_shard(shard_of(rows))
    journal.close()
    assert state(output) == ["journal-000000.jsonl"]
    assert open_journal(output).finished == as_stored(rows)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"request": {"model": "m", "temperature": 0.7}}, "temperature was 0.5 and is 0.7"),
        ({"request": {"model": "other", "temperature": 0.5}}, "model was 'm' and is 'other'"),
        ({"request": {"model": "m", "temperature": 0.5, "n": 4}}, "n was null and is 4"),
        ({"key": "id"}, "key was null and is 'id'"),
    ],
)
def test_a_changed_job_is_refused_before_any_row(output: Path, now: dict[str, Any], says: str) -> None:
    rows, shards = make_rows(5)
    journal = open_journal(output, shards=shards)
    write_shard(journal, rows)
    journal.close()
    with pytest.raises(JobChanged, match=says) as caught:
        open_journal(output, {**SETTINGS, **now})
    message = str(caught.value)
    assert "make the old call again" in message
    assert "another output directory" in message
    assert "overwrite=True" in message
    open_journal(output, {**SETTINGS, "prompt": "another text"}).close()


def test_another_format_of_files_is_refused(output: Path) -> None:
    rows, shards = make_rows(5)
    json_shards = JsonShards(answer_names([], ""))
    journal = open_journal(output, shards=shards)
    write_shard(journal, rows)
    journal.close()
    with pytest.raises(JobChanged, match=r"has part-000000\.parquet, and this call writes \*\.jsonl"):
        open_journal(output, shards=json_shards)
    open_journal(output, shards=json_shards, overwrite=True).close()


def test_a_job_without_finished_rows_may_be_changed(output: Path) -> None:
    open_journal(output).close()
    open_journal(output, {**SETTINGS, "key": "id"}).close()


def test_overwrite_removes_the_old_rows(output: Path) -> None:
    rows, shards = make_rows(15)
    journal = open_journal(output, shards=shards)
    write_shard(journal, rows[:5])
    journal.append(rows[5:10])
    journal.close()
    journal = open_journal(output, {**SETTINGS, "key": "id"}, shards, overwrite=True)
    assert (len(journal.done), journal.finished, journal.earlier) == (0, {}, None)
    assert read_output(output) == []
    assert state(output) == ["journal-000000.jsonl"]
    write_shard(journal, rows[10:])
    journal.close()
    assert [row["q"] for row in read_output(output)] == [f"q{number}" for number in range(10, 15)]


def test_files_of_others_are_refused_and_left_alone(output: Path, tmp_path: Path) -> None:
    output.mkdir()
    (output / "part-000000.parquet").write_bytes(b"theirs")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="has files that are not of such a job; name another directory"):
            open_journal(output, overwrite=overwrite)
    assert (output / "part-000000.parquet").read_bytes() == b"theirs"
    assert not output.with_name("out.toka").exists()
    mixed = tmp_path / "mixed"
    open_journal(mixed).close()
    (mixed / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"has notes\.txt, which is not of such a job"):
        open_journal(mixed)
    (mixed / "notes.txt").rename(mixed / "part-000007.parquet")
    with pytest.raises(FileExistsError, match=r"has part-000007\.parquet, which is not of such a job"):
        open_journal(mixed)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file, and must be a directory"):
        open_journal(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        open_journal(tmp_path / "nowhere" / "out")


def test_two_jobs_at_once_are_refused_until_the_first_has_died(output: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tokasaurus.library.map.answers import answer_names\n"
        "from tokasaurus.library.map.journal import Journal\n"
        "from tokasaurus.library.map.shards import JsonShards\n"
        f"journal = Journal(Path({str(output)!r}), {{}}, JsonShards(answer_names([], '')))\n"
        "print('open', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder, holder.stdout:
        try:
            assert read_line(holder, holder.stdout) == "open\n"
            with pytest.raises(OutputInUse, match="another job is at work on it"):
                open_journal(output)
        finally:
            holder.kill()
            holder.wait()
    open_journal(output).close()


def test_the_machine_may_die_a_second_later(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make_rows(4)
    journal = open_journal(output)
    synced = []
    now_s = 100.0
    monkeypatch.setattr("tokasaurus.library.map.journal.time.monotonic", lambda: now_s)
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(file))
    journal.sync_if_due()
    journal.append(rows[:1])
    journal.sync_if_due()
    journal.append(rows[1:2])
    journal.sync_if_due()
    assert len(synced) == 1
    now_s += 1.1
    journal.sync_if_due()
    journal.sync_if_due()
    assert len(synced) == 2
