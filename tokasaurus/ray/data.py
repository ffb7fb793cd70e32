"""A stage of Ray Data: rows → rows with their answers, by engines that are actors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.data import ActorPoolStrategy

from tokasaurus.config import ServerConfig
from tokasaurus.library.engine import EngineError
from tokasaurus.library.llm import LLM, flag_words
from tokasaurus.ray.placement import place

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

_OF_FILES = ("output", "key", "format", "overwrite", "retry_errors", "progress")
"""Arguments of `LLM.map` for its own files."""

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]


class MapRows:
    """A callable for `Dataset.map_batches`: an engine that answers batches, several at once."""

    def __init__(self, flags: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """flags: of `toka`, as of `LLM`. arguments: of `LLM.map`. Raises what `LLM` raises."""
        self._llm = LLM(**flags, show=False)
        self._arguments = arguments

    def __call__(self, rows: pa.Table) -> pa.Table:
        """The rows with the columns that `LLM.map` adds: what is wrong with a row is in its column `error`."""
        answered: pa.Table = self._llm.map(rows, progress=False, **self._arguments)
        try:
            self._llm.check_engine()
        except EngineError as error:
            # An exception would end the job; Ray starts an actor again that dies, and repeats its calls.
            print(f"toka: {error}; the actor ends with it", file=sys.stderr, flush=True)
            os._exit(1)
        return answered


def build_processor(
    flags: Mapping[str, Any],
    *,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    num_engines: int | tuple[int, int] = 1,
    batch_size: int = 256,
    batches_at_once: int = 4,
    num_cpus: float | None = None,
    **arguments: Any,
) -> Callable[[Dataset], Dataset]:
    """A function that adds answers to a data set's rows.

    ```python
    answer = build_processor({"model": "Qwen/Qwen3-0.6B"}, prompt="Summarise: {text}", chat=True)
    answer(ray.data.read_parquet("in")).write_parquet("out")
    ```

    flags: of `toka`, as of `LLM`.
    preprocess, postprocess: of each row, before and after it is answered.
    num_engines: actors, each with an engine of its own; a pair of the fewest and the most, between which Ray scales.
    batch_size: rows of one call of an actor. A batch that is cut off by a death is answered again as a whole.
    batches_at_once: calls that an engine answers at once, so that it has work while the last rows of a batch end.
    num_cpus: reserved for each engine; None: one for each of its processes that computes.
    arguments: of `LLM.map`: prompt or messages, chat, sampling, schema, columns, prefix, ...

    The rows get the columns of `LLM.map`: `answer`, `finish_reason`, `error`. Raises TypeError and ValueError for a
    wrong flag or argument."""
    refused = [name for name in _OF_FILES if name in arguments]
    if refused:
        raise TypeError(f"build_processor has no argument {refused[0]!r}: Ray Data reads and writes the rows")
    if (arguments.get("prompt") is None) == (arguments.get("messages") is None):
        raise TypeError("build_processor needs either prompt= or messages=")
    config = ServerConfig.parse(flag_words(flags))
    fewest, most = num_engines if isinstance(num_engines, tuple) else (num_engines, num_engines)

    def process(rows: Dataset) -> Dataset:
        placement = place(config, num_cpus, ray.cluster_resources().get("GPU", 0.0))
        device = "cuda" if placement.num_gpus else "cpu"
        if preprocess is not None:
            rows = _apply_to_each(preprocess, rows)
        # One block for each call: rows of a large one would be answered by one engine, batch after batch. Strict, since
        # Ray would otherwise make the blocks within the engine's task.
        rows = rows.repartition(target_num_rows_per_block=batch_size, strict=True).map_batches(
            MapRows,
            fn_constructor_args=({**flags, "device": device}, arguments),
            batch_format="pyarrow",
            batch_size=batch_size,
            compute=ActorPoolStrategy(
                min_size=fewest,
                max_size=most,
                max_tasks_in_flight_per_actor=2 * batches_at_once,
                max_concurrent_calls_per_actor=batches_at_once,
                enable_true_multi_threading=True,
            ),
            udf_modifying_row_count=False,
            **placement.actor_options,
        )
        return rows if postprocess is None else _apply_to_each(postprocess, rows)

    return process


def _apply_to_each(function: RowFunction, rows: Dataset) -> Dataset:
    """Apply the function to each row, as `Dataset.map` does, but keep the types of columns that are null in a block.

    `Dataset.map` drops such a type; the files that are written could then not be read together."""
    return rows.map_batches(partial(apply_to_table, function), batch_format="pyarrow", udf_modifying_row_count=False)


def apply_to_table(function: RowFunction, table: pa.Table) -> pa.Table:
    """The rows that the function returns. Columns of nulls keep the type that they have in the table, if any."""
    import pyarrow as pa

    made = [function(row) for row in table.to_pylist()]
    columns = {}
    for name in dict.fromkeys(name for row in made for name in row):
        values = pa.array([row.get(name) for row in made])
        if pa.types.is_null(values.type) and name in table.column_names:
            values = values.cast(table.schema.field(name).type)
        columns[name] = values
    return pa.table(columns)
