"""Rows of a source with answers made up for them, and what a reader finds in an output directory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tokasaurus.library.map.answers import answer_names
from tokasaurus.library.map.journal import Journal
from tokasaurus.library.map.rows import RowBatch, Source, default_keys
from tokasaurus.library.map.shards import MapRow, OpenShard, ShardFormat, make_format


def shard_format(source: Source, name: str = "parquet") -> ShardFormat:
    return make_format(name, source, answer_names(source.columns, ""), is_list=False)


def finished_rows(source: Source, output: ShardFormat) -> list[MapRow]:
    """All rows, with the answer `a7` to the row 7, and an error for every tenth row."""
    return [row for batch in source.batches() for row in rows_of(batch, output, default_keys(source, batch).tolist())]


def rows_of(batch: RowBatch, output: ShardFormat, key_hashes: Sequence[int] | None = None) -> list[MapRow]:
    """As `finished_rows`, of one batch."""
    output.prepare(batch)
    rows = []
    for index in range(batch.num_rows):
        number = batch.first_number + index
        row = MapRow(number, batch, index, number if key_hashes is None else key_hashes[index], 1_000_000 + number)
        if number % 10:
            row.answer, row.finish_reason = f"a{number}", "stop"
        else:
            row.error = f"e{number}"
        rows.append(row)
    return rows


def shard_of(rows: list[MapRow]) -> OpenShard:
    shard = OpenShard()
    for row in rows:
        shard.add(row, 100.0)
    return shard


def write_shard(journal: Journal, rows: list[MapRow]) -> None:
    journal.append(rows)
    journal.close_shard(shard_of(rows))


def read_output(directory: Path) -> list[dict[str, Any]]:
    """All rows of all files, which must be whole."""
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.iterdir()):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            assert path.suffix == ".jsonl", path
            rows += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return rows
