"""Where answers go: to the files of a directory, or into memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tokasaurus.library.counts import Counts
from tokasaurus.library.map.answers import AnswerNames
from tokasaurus.library.map.journal import Journal, request_changed
from tokasaurus.library.map.rows import RowBatch, Source
from tokasaurus.library.map.shards import MAX_SHARD_AGE_S, MapRow, OpenShard, ShardFormat, answer_columns


@dataclass(frozen=True, slots=True, repr=False)
class MapSummary:
    """What a call of `map` with an output directory has done."""

    num_rows: int
    """Rows of the input; each has its row in the output."""
    num_skipped: int
    """Rows that had been done before this call."""
    num_errors: int
    """Rows of this call that have an error in place of an answer."""
    prompt_tokens: int
    """Prompt tokens of this call."""
    output_tokens: int
    """Output tokens of this call, of all samples together."""
    seconds: float
    """Time that this call has taken."""
    output: Path
    """The directory."""
    reasons: tuple[str, ...] = ()
    """Why rows of this call have an error: a line for each kind of error with its count, the most frequent first, up to
    ten."""

    def __repr__(self) -> str:
        return (
            f"MapSummary({self.num_rows:,} rows in {self.output}, {self.num_skipped:,} skipped, "
            f"{self.num_errors:,} errors, {self.output_tokens:,} tokens in {self.seconds:.1f} s)"
        )


NO_REQUEST = 0
"""Identity of a row that has no request. All such rows have the same: errors of functions may differ each time."""

Unfinished: TypeAlias = Callable[[], Iterable[MapRow]]
"""Gives all rows that may still be added, without the ones being added."""


class Output(Protocol):
    """Takes the rows of one call. Methods may raise OSError."""

    goes_on: bool
    """Whether a later call goes on where this one ends."""
    num_done: int
    """Rows that earlier calls have done."""
    num_mended: int
    """Skipped rows that had no request in an earlier call and have one now; they keep their error."""

    def prepare(self, batch: RowBatch) -> None:
        """Call it for each batch, before its dicts are dropped. Raises RowMisfit."""
        ...

    def skip_done(
        self, batch: RowBatch, first: int, hashes: npt.NDArray[np.uint64], identities: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.bool_], list[MapRow]]:
        """([rows]: whether a row is done and needs nothing more; rows that had finished, and are still to be added).

        hashes, identities: [rows], of the keys and the requests of the batch's rows from the index `first` on. Raises
        JobChanged."""
        ...

    def add(self, rows: Sequence[MapRow], unfinished: Unfinished, is_new: bool = True) -> None:
        """Store finished rows. is_new: they finished in this call."""
        ...

    def tick(self, unfinished: Unfinished) -> float:
        """What is to be done from time to time. Returns the seconds until it is due again."""
        ...

    def complete(self, counts: Counts, seconds: float) -> object:
        """All rows have been added: what the call returns."""
        ...

    def stop(self, is_orderly: bool) -> None:
        """No row follows. is_orderly: every row that has finished was added."""
        ...


class StoredOutput:
    """Files of a directory, with a journal beside it."""

    goes_on = True

    def __init__(self, journal: Journal, shards: ShardFormat, prompt: object) -> None:
        """prompt: described, for messages."""
        self._journal = journal
        self._shards = shards
        self._prompt = prompt
        self._shard = OpenShard()
        self._row_bytes: dict[int, float] = {}
        """Memory of one row of a batch, by the number of the batch's first row."""
        self.num_done = len(journal.done) + len(journal.finished)
        self.num_mended = 0

    def prepare(self, batch: RowBatch) -> None:
        self._row_bytes[batch.first_number] = self._shards.prepare(batch)

    def skip_done(
        self, batch: RowBatch, first: int, hashes: npt.NDArray[np.uint64], identities: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.bool_], list[MapRow]]:
        journal = self._journal
        positions = journal.done.find(hashes)
        is_done = positions >= 0
        if is_done.any():
            stored_identities = journal.done.identities(positions)
            is_changed = is_done & (stored_identities != identities)
            changed = np.flatnonzero(is_changed & (stored_identities != NO_REQUEST))
            if len(changed):
                raise self._changed(batch, first + int(changed[0]))
            self.num_mended += int(is_changed.sum())
        finished = []
        if journal.finished:
            for index, key_hash in enumerate(hashes.tolist(), first):
                stored = journal.finished.get(key_hash)
                if stored is not None:
                    if stored.identity != int(identities[index - first]):
                        if stored.identity != NO_REQUEST:
                            raise self._changed(batch, index)
                        self.num_mended += 1
                    is_done[index - first] = True
                    row = MapRow(batch.first_number + index, batch, index, key_hash, stored.identity)
                    row.answer, row.finish_reason, row.error = stored.answer, stored.finish_reason, stored.error
                    row.more = stored.more
                    finished.append(row)
        return is_done, finished

    def add(self, rows: Sequence[MapRow], unfinished: Unfinished, is_new: bool = True) -> None:
        while rows:
            num_rows = self._shard.room()
            part, rows = rows[:num_rows], rows[num_rows:]
            if is_new:
                self._journal.append(part)
            else:
                for row in part:  # the others stay in the journal when a file is closed now
                    del self._journal.finished[row.key_hash]
            for row in part:
                self._shard.add(row, self._row_bytes[row.batch.first_number])
            if self._shard.is_full():
                self._close_shard(functools.partial(_both, unfinished, rows))

    def tick(self, unfinished: Unfinished) -> float:
        if self._shard.seconds_left() <= 0:
            self._close_shard(unfinished)
        self._journal.sync_if_due()
        return max(0.0, self._shard.seconds_left())

    def complete(self, counts: Counts, seconds: float) -> MapSummary:
        if self._shard.rows or not self._journal.has_shards():
            self._close_shard(_no_rows)
        self._journal.finish()
        self._journal.close()
        return MapSummary(
            counts.num_rows,
            counts.num_skipped,
            counts.num_errors,
            counts.prompt_tokens,
            counts.output_tokens,
            seconds,
            self._journal.output,
            tuple(counts.failures.lines()),
        )

    def stop(self, is_orderly: bool) -> None:
        try:
            if is_orderly and self._shard.rows:
                self._close_shard(_no_rows)
        finally:
            self._journal.close()

    def _close_shard(self, unfinished: Unfinished) -> None:
        self._journal.close_shard(self._shard)
        self._shard = OpenShard()
        # Slow rows must not keep the memory of whole batches.
        left: dict[int, list[MapRow]] = {}
        for row in unfinished():
            left.setdefault(row.batch.first_number, []).append(row)
        for rows in left.values():
            rows[0].batch.keep_only(np.array([row.index for row in rows]))
        self._row_bytes = {number: size for number, size in self._row_bytes.items() if number in left}

    def _changed(self, batch: RowBatch, index: int) -> Exception:
        earlier: Mapping[str, Any] = self._journal.earlier or {}
        return request_changed(self._journal.output, batch.place(index), (earlier.get("prompt"), self._prompt))


def _both(unfinished: Unfinished, rows: Iterable[MapRow]) -> Iterable[MapRow]:
    return chain(unfinished(), rows)


def _no_rows() -> Iterable[MapRow]:
    return ()


class CollectedOutput:
    """Answers in memory, joined to the rows at the end."""

    goes_on = False
    num_done = 0
    num_mended = 0

    def __init__(self, source: Source, names: AnswerNames, is_list: bool) -> None:
        self._source = source
        source.keep_rows = True
        self._names = names
        self._is_list = is_list
        self._rows: list[MapRow | None] = []

    def prepare(self, batch: RowBatch) -> None:
        self._rows += [None] * batch.num_rows

    def skip_done(
        self, batch: RowBatch, _first: int, hashes: npt.NDArray[np.uint64], _identities: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.bool_], list[MapRow]]:
        batch.table = None  # the source reads its columns again
        return np.zeros(len(hashes), np.bool_), []

    def add(self, rows: Sequence[MapRow], unfinished: Unfinished, is_new: bool = True) -> None:
        del unfinished
        assert is_new or not rows, "there were no calls before"
        for row in rows:
            self._rows[row.number] = row

    def tick(self, unfinished: Unfinished) -> float:
        del unfinished
        return MAX_SHARD_AGE_S

    def complete(self, _counts: Counts, _seconds: float) -> object:
        rows = [row for row in self._rows if row is not None]
        assert len(rows) == len(self._rows), "each row has an answer or an error"
        return self._source.joined(answer_columns(self._names, rows, self._is_list))

    def stop(self, is_orderly: bool) -> None:
        del is_orderly
        self._rows.clear()
