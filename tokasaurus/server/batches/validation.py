"""Validation of a batch's input file, in a child process: a large file would block the event loop."""

import asyncio
import logging
import secrets
import sys

import apsw
import orjson

from tokasaurus.server.batches.closing import clear_ledger
from tokasaurus.server.batches.limits import BatchLimits
from tokasaurus.server.batches.store.data_dir import StoreError
from tokasaurus.server.batches.store.ledger import add_lines
from tokasaurus.server.batches.store.records import BatchRecord, NewLine
from tokasaurus.server.batches.store.store import Store
from tokasaurus.server.batches.validation_process import MAX_SHOWN_ERRORS, InputError

logger = logging.getLogger(__name__)

# A part is LINES_PER_PART lines, each with its custom_id.
_MAX_PART_BYTES = 16 << 20


_MAX_TRIES = 3


class ValidationDied(Exception):
    """The child process ended without a verdict: it was killed, or the machine has no memory left."""


async def fill_ledger(store: Store, batch: BatchRecord, limits: BatchLimits) -> tuple[int, list[InputError]]:
    """(number of lines, errors) of the batch's input file; if there are no errors, its lines are in the ledger.

    Raises ContentMissing, ValidationDied and StoreError; the caller then removes the lines that were added."""
    for tries in range(1, _MAX_TRIES + 1):
        await clear_ledger(store, batch.number)  # of an attempt that ended without a verdict
        try:
            return await _try_to_fill(store, batch, limits)
        except ValidationDied as error:
            logger.warning("the validation of %s died (%d of %d tries): %s", batch.id, tries, _MAX_TRIES, error)
            died = error
    raise died


async def _try_to_fill(store: Store, batch: BatchRecord, limits: BatchLimits) -> tuple[int, list[InputError]]:
    store.data_dir.open_content(batch.input_file_id).close()
    try:
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
            start_new_session=True,  # Ctrl-C in the terminal ends the server, not the validation
        )
    except OSError as error:  # no memory, or too many processes: later there may be room
        raise StoreError(f"the process that reads the input file cannot be started: {error.strerror}") from None
    assert process.stdout is not None
    num_lines = 0
    try:
        while (part := await process.stdout.readline()).endswith(b"\n"):  # else it was killed while it wrote
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
