"""What makes a job go on exactly where it was: which rows are done, and what the finished rows said.

Beside the output directory OUT lies OUT.toka (not inside: Polars reads every file below a directory):

- `lock`: held by the job that is at work;
- `job.json`: what the job was begun with, for messages;
- `journal-N.jsonl`: the finished rows of the file N that is being collected, written as they finish;
- `index-N.npy`: [rows, 2] key hash and request identity of the rows in the file N, in their order;
- `index-N.next.npy`: the same of the file that replaces the file N.

A file N is closed in three steps: its index gets its name, then the file itself, then the journal is removed. So an
index without its file counts for nothing, and so does a journal whose file exists. A file N is replaced by one with
fewer rows in three steps, too: the next index gets its name, then the file itself, then the next index becomes the
index. Between the last two, the number of rows in the file tells which index is its own.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import orjson

from tokasaurus.files import NewFile, publish, sync_directory
from tokasaurus.library.map.shards import Answers, MapRow, OpenShard, ShardFormat, shard_name
from tokasaurus.text.exact_json import dumps, loads

_VERSION = 2
_SYNC_INTERVAL_S = 1.0
_SHARD = re.compile(r"part-(\d{6,})\.(parquet|jsonl)")
_INDEX = re.compile(r"index-(\d{6,})\.npy")
_NEXT_INDEX = re.compile(r"index-(\d{6,})\.next\.npy")
_JOURNAL = re.compile(r"journal-(\d{6,})\.jsonl")

_WAYS_ON = "make the old call again, name another output directory, or pass overwrite=True, which removes the old rows"


class JobChanged(ValueError):
    """The output directory has rows of a job that asked for something else. The message says what, and how to go on."""


class OutputInUse(RuntimeError):
    """Another job writes to the output directory."""


class OutputFull(OSError):
    """The disk is full. Finished rows are kept, and the same call goes on when there is space."""


class StoredAnswer(NamedTuple):
    """A line of a journal, without the key; as in MapRow."""

    identity: int
    answer: Answers
    finish_reason: Answers
    error: str | None
    more: list[Any] | None


class KeySet:
    """The key hashes of a job's rows, 8 bytes each: sorted arrays of falling length, merged as they grow."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint64]] = []

    def add(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Add the hashes of a batch. Returns the indices of hashes that were there before."""
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        is_repeated = np.zeros(len(ordered), np.bool_)
        is_repeated[1:] = ordered[1:] == ordered[:-1]
        for array in self._arrays:
            is_repeated |= _find(array, ordered) >= 0
        repeated = np.sort(order[is_repeated])
        ordered = ordered[~is_repeated]
        if len(ordered) == 0:
            return repeated
        while self._arrays and len(self._arrays[-1]) <= 2 * len(ordered):
            ordered = np.sort(np.concatenate([self._arrays.pop(), ordered]), kind="stable")
        self._arrays.append(ordered)
        return repeated


class DoneRows:
    """The rows in the files of the output: 16 bytes each."""

    def __init__(self, indexes: Sequence[npt.NDArray[np.uint64]]) -> None:
        """indexes: as OpenShard.index."""
        both = np.concatenate(indexes) if indexes else np.empty((0, 2), np.uint64)
        order = np.argsort(both[:, 0])
        self._hashes = np.ascontiguousarray(both[order, 0])
        self._identities = np.ascontiguousarray(both[order, 1])

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """[rows] their positions, -1 for a row that is not done."""
        return _find(self._hashes, hashes)

    def identities(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return cast("npt.NDArray[np.uint64]", self._identities[positions])


def _find(ordered: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """[hashes] positions in a sorted array, -1 for hashes that are not there."""
    if len(ordered) == 0:
        return np.full(len(hashes), -1, np.int64)
    positions = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return np.where(ordered[positions] == hashes, positions, -1)


class Journal:
    """The state of a job and its output directory, locked until `close`. Methods raise OutputFull and OSError."""

    def __init__(
        self,
        output: Path,
        settings: Mapping[str, Any],
        shards: ShardFormat,
        overwrite: bool = False,
        retry_errors: bool = False,
    ) -> None:
        """Open or create the directory.

        settings: what the job is begun with, as JSON; once a row is done, all must be as they were, but for "prompt",
        which is only described, "files", which may become more, and "model_files", which may be unknown.
        shards: how the output's files are written and read. overwrite: remove the rows of an earlier job.
        retry_errors: remove the rows that have an error.

        Raises OutputInUse, JobChanged, FileExistsError if the directory has files of others, NotADirectoryError."""
        self.output = output
        resolved = output.resolve()  # a symbolic link may lead to another disk
        self._root = resolved.with_name(f"{resolved.name or 'root'}.toka")
        self._shards = shards
        self._file: BinaryIO | None = None
        self._next_sync_s = 0.0
        self._is_unsynced = False
        self._lock = self._open()
        try:
            with self._explained():
                self._load(settings, overwrite, retry_errors)
        except BaseException:
            self.close()
            raise

    done: DoneRows
    """Rows in files of the output."""
    finished: dict[int, StoredAnswer]
    """Rows that had finished before this call, are in no file, and are not collected for the next one, by key hash. Who
    collects a row takes it out."""
    earlier: Mapping[str, Any] | None
    """The settings that the rows were begun with; None if there are none."""

    def append(self, rows: Iterable[MapRow]) -> None:
        """Finished rows: when it returns, they survive the death of this process at once, and the death of the machine
        a second later."""
        content = b"".join(
            [_to_line(row.key_hash, row.identity, row.answer, row.finish_reason, row.error, row.more) for row in rows]
        )
        if content:
            with self._explained():
                assert self._file is not None
                _write_all(self._file, content)
                self._is_unsynced = True

    def sync_if_due(self) -> None:
        """Call it often."""
        now_s = time.monotonic()
        if self._is_unsynced and now_s >= self._next_sync_s:
            with self._explained():
                assert self._file is not None
                os.fdatasync(self._file.fileno())
            self._is_unsynced = False
            self._next_sync_s = time.monotonic() + _SYNC_INTERVAL_S

    def close_shard(self, shard: OpenShard) -> None:
        """Write the rows to a file of the output; its successor's journal is open then.

        On an error, all its rows are in the journal."""
        with self._explained():
            temporary = self._root / f"{self._shard_name(self._number)}.part"
            try:
                self._shards.write(temporary, shard.rows)
                journal = self._open_journal(self._number + 1)
                try:
                    if self.finished:
                        self._keep_finished(journal)
                    # also puts the new journal's name on the disk
                    self._save_array(self._index_path(self._number), shard.index())
                    publish(temporary, self.output / self._shard_name(self._number))
                except BaseException:
                    journal.close()
                    raise
            finally:
                temporary.unlink(missing_ok=True)
            if self._file is not None:
                self._file.close()
            self._journal_path(self._number).unlink()
            self._file, self._is_unsynced = journal, False
            self._number += 1
            self._has_shards = True

    def finish(self) -> None:
        """Call it when all rows are in files: what only an unfinished job needs is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._journal_path(self._number).unlink(missing_ok=True)

    def has_shards(self) -> bool:
        return self._has_shards

    def close(self) -> None:
        """Unlock the directory; rows that are not in files stay in the journal."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.close()

    def _open(self) -> BinaryIO:
        """The locked file."""
        output, root = self.output, self._root
        if output.exists() and not output.is_dir():
            raise NotADirectoryError(f"output={output}: is a file, and must be a directory")
        if not output.parent.is_dir():
            raise FileNotFoundError(f"output={output}: there is no directory {output.parent}")
        if output.is_dir() and not (root / "job.json").exists() and any(output.iterdir()):
            raise FileExistsError(f"output={output}: has files that are not of such a job; name another directory")
        with self._explained():
            output.mkdir(exist_ok=True)
            root.mkdir(exist_ok=True)
            sync_directory(output.parent)
            if output.stat().st_dev != root.stat().st_dev:
                raise OSError(f"output={output}: is a disk of its own; name a directory on it, as {output / 'out'}")
            lock = (root / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise OutputInUse(f"output={output}: another job is at work on it") from None
        except OSError as error:
            lock.close()
            raise OSError(f"output={output}: cannot be locked: {error.strerror}") from None
        return lock

    def _load(self, settings: Mapping[str, Any], overwrite: bool, retry_errors: bool) -> None:
        if overwrite:
            self._remove_all()
        else:
            self._check_version()
        strangers = [path.name for path in self.output.iterdir() if not _SHARD.fullmatch(path.name)]
        if strangers:
            raise FileExistsError(
                f"output={self.output}: has {min(strangers)}, which is not of such a job; name another directory"
            )
        shards = {int(match[1]): match[2] for match in _matching(self.output, _SHARD)}
        for path in self._root.glob("*.part"):
            path.unlink()
        for pattern in (_INDEX, _NEXT_INDEX):
            for match in _matching(self._root, pattern):
                if int(match[1]) not in shards:
                    (self._root / match[0]).unlink()
        for match in _matching(self._root, _NEXT_INDEX):
            if self._shard_path(int(match[1])).exists():  # else this call writes another kind of files, and is refused
                self._end_replacement(int(match[1]))
        # before the settings are compared, which may refuse the call
        indexes = {number: self._load_index(number, kind) for number, kind in sorted(shards.items())}
        self.done = DoneRows(list(indexes.values()))
        self._number = max(shards, default=-1) + 1
        journals = {int(match[1]): self._root / match[0] for match in _matching(self._root, _JOURNAL)}
        self.finished = self._read_finished(path for number, path in sorted(journals.items()) if number not in shards)
        self.earlier = self._check_settings(settings)
        if retry_errors:
            kept = {number: self._remove_errors(number, index) for number, index in indexes.items()}
            self.done = DoneRows([index for index in kept.values() if len(index)])
            self.finished = {key: stored for key, stored in self.finished.items() if stored.error is None}
        first = min((number for number in shards if self._shard_path(number).exists()), default=None)
        self._has_shards = first is not None
        self._shards.begin(None if first is None else self._shard_path(first))
        self._file = self._open_journal(self._number)
        sync_directory(self._root)
        if journals.keys() - shards.keys() - {self._number}:
            # two, because a death came after the second was begun and before the first one's file had its name
            self._keep_finished(self._file)
        else:
            _write_all(self._file, b"\n")  # ends a line that was not written to its end
        for number, path in journals.items():
            if number != self._number:
                path.unlink()

    def _read_finished(self, journals: Iterable[Path]) -> dict[int, StoredAnswer]:
        finished = {key_hash: stored for path in journals for key_hash, stored in _read_journal(path)}
        hashes = np.fromiter(finished, np.uint64, len(finished))
        for key_hash in hashes[self.done.find(hashes) >= 0].tolist():
            del finished[key_hash]
        return finished

    def _keep_finished(self, journal: BinaryIO) -> None:
        """Write the rows of `finished` to another journal."""
        lines = [_to_line(key_hash, *stored) for key_hash, stored in self.finished.items()]
        _write_all(journal, b"\n" + b"".join(lines))
        os.fdatasync(journal.fileno())

    def _stored_settings(self) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, orjson.JSONDecodeError):
            return cast("dict[str, Any]", loads((self._root / "job.json").read_bytes()))
        return None

    def _check_version(self) -> None:
        """Check that this version can continue the job, before any other file is read. Raises JobChanged."""
        stored = self._stored_settings()
        if stored is not None and stored.get("version") != _VERSION:
            raise JobChanged(
                f"output={self.output}: was begun by another version of Tokasaurus; go on with that one, name another "
                "output directory, or pass overwrite=True, which removes the old rows"
            )

    def _check_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Store this call's settings if no row is done; otherwise return the earlier calls' settings. Raises JobChanged
        if the two differ."""
        stored = self._stored_settings()
        is_begun = len(self.done) > 0 or len(self.finished) > 0
        if not is_begun or stored is None:
            self._save_settings(settings)
            return None
        now = loads(dumps(dict(settings), default=repr))
        changes = list(describe_changes(stored, now, without=("prompt", "files", "model_files")))
        if changes:
            raise JobChanged(f"output={self.output}: {', '.join(changes)}; {_WAYS_ON}")
        model, model_now = stored.get("model_files"), now.get("model_files")
        if model and model_now and model["sample"] != model_now["sample"]:  # a Client knows no files
            raise JobChanged(
                f"output={self.output}: has answers of the model in {model['path']}, and that in {model_now['path']} "
                f"has other files or other contents; {_WAYS_ON}"
            )
        files, files_now = (set(told.get("files") or ()) for told in (stored, now))
        if files - files_now:
            raise JobChanged(
                f"output={self.output}: has rows of {min(files - files_now)}, which is not in this call's input, or "
                f"has another name in it; {_WAYS_ON}. With key= files may be renamed"
            )
        if files_now - files:
            self._save_settings({**stored, "files": now["files"]})
        return cast("Mapping[str, Any]", stored)

    def _save_settings(self, settings: Mapping[str, Any]) -> None:
        content = dumps({"version": _VERSION, **settings}, option=orjson.OPT_INDENT_2, default=repr)
        self._write(self._root / "job.json", content)

    def _remove_all(self) -> None:
        """The order matters: without job.json, files of the output would not be ours any more."""
        ours = ((self.output, _SHARD), (self._root, _INDEX), (self._root, _NEXT_INDEX), (self._root, _JOURNAL))
        for directory, pattern in ours:
            for match in _matching(directory, pattern):
                (directory / match[0]).unlink()
            sync_directory(directory)

    def _load_index(self, number: int, kind: str) -> npt.NDArray[np.uint64]:
        name = shard_name(number, f".{kind}")
        if f".{kind}" != self._shards.suffix:
            raise JobChanged(
                f"output={self.output}: has {name}, and this call writes *{self._shards.suffix}; {_WAYS_ON}"
            )
        try:
            index = np.load(self._index_path(number))
        except FileNotFoundError:
            raise FileExistsError(
                f"output={self.output}: has {name}, which is not of such a job; name another directory"
            ) from None
        return cast("npt.NDArray[np.uint64]", index)

    def _remove_errors(self, number: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Remove the rows that have an error from a file, or the file if it has no others. Returns the index of the
        rows that are left."""
        path = self._shard_path(number)
        is_kept = ~self._shards.find_errors(path)
        kept = index[is_kept]
        if is_kept.all():
            return index
        if not is_kept.any():
            path.unlink()
            sync_directory(path.parent)
            self._index_path(number).unlink()
            return kept
        temporary = self._root / f"{path.name}.part"
        self._shards.copy(path, temporary, is_kept)
        self._save_array(self._next_index_path(number), kept)
        publish(temporary, path)
        publish(self._next_index_path(number), self._index_path(number))
        return kept

    def _end_replacement(self, number: int) -> None:
        """Finish replacing a file after a process died meanwhile: the old or the new file gets the index that matches
        its rows."""
        path, next_index = self._shard_path(number), self._next_index_path(number)
        if self._shards.count_rows(path) == len(np.load(next_index)):
            publish(next_index, self._index_path(number))
        else:
            next_index.unlink()

    def _save_array(self, path: Path, array: npt.NDArray[np.uint64]) -> None:
        content = io.BytesIO()
        np.save(content, array)  # which tells no errno for a file on a full disk
        self._write(path, content.getvalue())

    def _write(self, path: Path, content: bytes) -> None:
        file = NewFile(path.with_name(f"{path.name}.part"))
        try:
            file.write(content)
            file.commit(path)
        except BaseException:
            file.discard()
            raise

    def _shard_name(self, number: int) -> str:
        return shard_name(number, self._shards.suffix)

    def _shard_path(self, number: int) -> Path:
        return self.output / self._shard_name(number)

    def _next_index_path(self, number: int) -> Path:
        return self._root / f"index-{number:06d}.next.npy"

    def _index_path(self, number: int) -> Path:
        return self._root / f"index-{number:06d}.npy"

    def _journal_path(self, number: int) -> Path:
        return self._root / f"journal-{number:06d}.jsonl"

    def _open_journal(self, number: int) -> BinaryIO:
        return cast(BinaryIO, self._journal_path(number).open("ab", buffering=0))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A full disk is OutputFull."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = os.strerror(error.errno)
            full = OutputFull(f"output={self.output}: {reason}; the same call goes on when there is space")
            full.errno = error.errno
            raise full from None


def describe_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], without: Sequence[str] = (), path: str = ""
) -> Iterator[str]:
    """`temperature was 0.5 and is 0.7`, for each setting that differs."""
    for name in dict.fromkeys([*before, *now]):
        if name in without or (not path and name == "version"):
            continue
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and name != "schema":
            yield from describe_changes(old, new, (), f"{path}{name}.")
        else:
            yield f"{name} was {_shown(old)} and is {_shown(new)}"


def request_changed(output: Path, place: str, prompts: tuple[object, object]) -> JobChanged:
    """The error for a row that is done, and would be asked something else now. prompts: described, before and now."""
    before, now = prompts
    why = f" (prompt was {_shown(before)} and is {_shown(now)})" if before != now else ""
    return JobChanged(f"output={output}: {place} has an answer to another request than this call's{why}; {_WAYS_ON}")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 200 else text[:197] + "..."


def _to_line(
    key_hash: int, identity: int, answer: Answers, finish_reason: Answers, error: str | None, more: list[Any] | None
) -> bytes:
    """A line of a journal: checksum, space, JSON."""
    content = orjson.dumps((key_hash, identity, answer, finish_reason, error, more))
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _read_journal(path: Path) -> Iterator[tuple[int, StoredAnswer]]:
    """Its rows. Lines that are not whole are left out: those rows are computed again."""
    with path.open("rb") as file:
        for line in file:
            checksum, _, content = line.removesuffix(b"\n").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(content):
                key_hash, *stored = orjson.loads(content)
                yield key_hash, StoredAnswer(*stored)


def _write_all(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file.fileno(), view) :]


def _matching(directory: Path, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Names in a directory that match."""
    matches = [pattern.fullmatch(path.name) for path in directory.iterdir()]
    return (match for match in matches if match is not None)
