"""Validation of a batch's input file, in a child process: a large file would block the event loop."""

import asyncio
import secrets
import sys

import apsw
import orjson

from tokasaurus.server.batches.input_errors import MAX_SHOWN_ERRORS, InputError
from tokasaurus.server.batches.limits import BatchLimits
from tokasaurus.server.batches.store.ledger import add_lines
from tokasaurus.server.batches.store.records import BatchRecord, NewLine
from tokasaurus.server.batches.store.store import Store

# A part is LINES_PER_PART lines, each with its custom_id.
_MAX_PART_BYTES = 16 << 20


class ValidationDied(Exception):
    """The child process ended without a verdict: it was killed, or the machine has no memory left."""


async def fill_ledger(store: Store, batch: BatchRecord, limits: BatchLimits) -> tuple[int, list[InputError]]:
    """(number of lines, errors) of the batch's input file; if there are no errors, its lines are in the ledger.

    The ledger must have no lines of the batch before. Raises ContentMissing, ValidationDied and StoreError; the caller
    then removes the lines that were added."""
    store.data_dir.open_content(batch.input_file_id).close()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tokasaurus.server.batches.validation_process",
        str(store.data_dir.content_path(batch.input_file_id)),
        batch.endpoint,
        str(limits.max_batch_lines),
        str(limits.max_line_bytes),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_PART_BYTES,
    )
    assert process.stdout is not None
    num_lines = 0
    try:
        while part := await process.stdout.readline():
            value = orjson.loads(part)
            if isinstance(value, dict):
                return num_lines, _errors(value)
            await _add(store, batch, num_lines, value)
            num_lines += len(value)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise ValidationDied(f"the process that reads the input file ended with {process.returncode}")


async def _add(store: Store, batch: BatchRecord, num_before: int, part: list[tuple[str, int, int]]) -> None:
    lines = [NewLine(num_before + index, *line) for index, line in enumerate(part)]
    seeds = [secrets.randbits(64) for _ in lines]

    def add(connection: apsw.Connection) -> None:
        add_lines(connection, batch.number, lines, seeds)

    await store.database.write(add)


def _errors(value: dict[str, object]) -> list[InputError]:
    listed, num_errors = value["errors"], value["num_errors"]
    assert isinstance(listed, list)
    assert isinstance(num_errors, int)
    errors = [InputError(**error) for error in listed]
    if num_errors > len(errors):
        message = f"{num_errors - MAX_SHOWN_ERRORS} more errors are not shown"
        errors.append(InputError("more_errors", message))
    return errors
