"""Batches from their creation to their end; what a former server left unfinished continues."""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import apsw
import orjson
from fastapi import Request

from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.metrics import BatchStats
from tokasaurus.server.access import key_salt
from tokasaurus.server.engine_client.pending import JobPace
from tokasaurus.server.errors import DataDirMissing, InvalidRequest
from tokasaurus.server.jobs.closing import clear_ledger, close_batch, keep_removing
from tokasaurus.server.jobs.files import require_file
from tokasaurus.server.jobs.objects import batch_progress
from tokasaurus.server.jobs.runner import BatchRunner, ResultRecorder, RunningBatch
from tokasaurus.server.jobs.store.data_dir import ContentMissing, StoreError
from tokasaurus.server.jobs.store.ledger import add_lines, kept_lines, release_running
from tokasaurus.server.jobs.store.records import (
    FINAL_STATUSES,
    BatchRecord,
    NewLine,
    add_batch,
    begin_finalizing,
    cancel_batch,
    fail_batch,
    finished_batches,
    get_batch,
    get_file,
    read_batch,
    start_batch,
    unfinished_batches,
)
from tokasaurus.server.jobs.store.store import Store
from tokasaurus.server.jobs.validation_process import MAX_SHOWN_ERRORS, InputError, dump_errors
from tokasaurus.server.protocol.batches import BatchProgress, BatchStatus
from tokasaurus.server.resources import DAY_SECONDS, BatchLimits
from tokasaurus.server.state import ServerState

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
"""Longest pause before a batch that failed because of a bug is tried again."""
SECONDS_BETWEEN_LOOKS = 30.0
"""How long a batch waits before it looks at the clock again."""
_MAX_PART_BYTES = 16 << 20
"""Longest line that the validation process writes: LINES_PER_PART lines, each with its custom_id."""
_MAX_VALIDATIONS = 3
"""Starts of the validation process for one batch before the batch fails."""
_PACKAGE_PARENT = Path(__file__).parents[3]
"""Working directory of that process: `python -m` imports from it, and the user's may contain any module."""


class BatchService:
    """One per server. All methods run on the event loop's thread."""

    def __init__(self, state: ServerState, store: Store, limits: BatchLimits) -> None:
        self.store = store
        self.config = state.config
        self._model_name = state.model.name
        self._engine = state.engine
        self._recorder = ResultRecorder(store.database)
        self._runner = BatchRunner(state, store.database, self._recorder, limits)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """What each unfinished batch does now, by its number."""
        self._cancelled: dict[int, asyncio.Event] = {}
        """Set when the batch is cancelled, by its number."""
        self._problems: dict[int, str] = {}
        """Why a batch cannot do what its status asks for, by its number."""
        self._validating = asyncio.Lock()
        self._places = asyncio.Semaphore(limits.max_running_batches)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the batches within the context. Raises StoreError."""
        for batch in await self.store.database.read(unfinished_batches):
            self._begin(batch)
        keep_seconds = self.config.keep_days * DAY_SECONDS
        works = [self._runner.run(), self._runner.drain(), keep_removing(self.store, keep_seconds)]
        recording = asyncio.create_task(self._recorder.run())
        background = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            tasks = [*background, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._runner.stop_all()
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
            with suppress(StoreError):
                self._engine.calls.num_lines_left = sum(batch.num_lines_left for batch in await self.unfinished())

    def stats(self) -> BatchStats:
        return BatchStats(
            num_unfinished=len(self._tasks),
            num_lines_running=self._runner.num_running,
            total_completed_lines=self._runner.num_completed,
            total_failed_lines=self._runner.num_failed,
            is_waiting_for_storage=self._recorder.problem is not None,
        )

    async def unfinished(self) -> list[BatchRecord]:
        """The oldest first. Raises StoreError."""
        return await self.store.database.read(unfinished_batches)

    async def finished(self, limit: int) -> list[BatchRecord]:
        """The newest ones, by their creation, the newest first. Raises StoreError."""
        return await self.store.database.read(lambda connection: finished_batches(connection, limit))

    async def find(self, batch_id: str) -> BatchRecord | None:
        """Raises StoreError."""
        return await self.store.database.read(lambda connection: get_batch(connection, batch_id))

    async def name_of_input(self, batch: BatchRecord) -> str:
        """The name that the input file was uploaded with; "" if the file is deleted. Raises StoreError."""
        file = await self.store.database.read(lambda connection: get_file(connection, batch.input_file_id))
        return "" if file is None else file.filename

    def running_batch(self, batch: BatchRecord) -> RunningBatch | None:
        """None unless its lines run."""
        return self._runner.find(batch.number)

    def progress(self, batch: BatchRecord) -> BatchProgress | None:
        """None unless it is in progress."""
        if batch.status != "in_progress":
            return None
        running = self.running_batch(batch)
        return batch_progress(batch, JobPace() if running is None else running.pace)

    def problem(self, batch: BatchRecord) -> str:
        """Why the batch cannot go on now; "" if it can, or is finished."""
        if batch.status in FINAL_STATUSES:
            return ""
        running = self._runner.find(batch.number)
        if running is not None and self._recorder.problem is not None:
            return str(self._recorder.problem)
        return (running.problem if running is not None else "") or self._problems.get(batch.number, "")

    async def create(self, new: BatchRecord) -> BatchRecord:
        """Store a batch, which is validated next. new: by `new_batch`. Raises NotFound or InvalidRequest for the input
        file, and StoreError."""
        record = replace(new, model=self._model_name, cache_salt=key_salt())

        def add(connection: apsw.Connection) -> BatchRecord:
            # in one transaction, so that the file cannot be deleted in between
            file = require_file(get_file(connection, new.input_file_id), new.input_file_id, "input_file_id")
            if file.purpose != "batch":
                raise InvalidRequest(
                    f"input_file_id must name a file with the purpose 'batch', not {file.purpose!r}", "input_file_id"
                )
            return add_batch(connection, record)

        batch = await self.store.database.write(add)
        self._begin(batch)
        return batch

    async def cancel(self, batch_id: str) -> BatchRecord | None:
        """The batch, which is cancelling unless it cannot be any more; None if there is none. Raises StoreError."""

        def cancel(connection: apsw.Connection) -> BatchRecord | None:
            batch = get_batch(connection, batch_id)
            return None if batch is None else cancel_batch(connection, batch.number, int(time.time()))

        batch = await self.store.database.write(cancel)
        if batch is not None and batch.status == "cancelling" and batch.number in self._cancelled:
            self._cancelled[batch.number].set()
        return batch

    def _begin(self, batch: BatchRecord) -> None:
        task = asyncio.create_task(self._advance_to_end(batch), name=batch.id)
        self._tasks[batch.number] = task
        self._cancelled[batch.number] = asyncio.Event()
        task.add_done_callback(lambda _: self._forget(batch.number))

    def _forget(self, number: int) -> None:
        del self._tasks[number], self._cancelled[number]
        self._problems.pop(number, None)

    async def _advance_to_end(self, batch: BatchRecord) -> None:
        """Do what the batch's status asks for, until it is finished. Tries again while the disk is full."""
        pause_s = RETRY_SECONDS
        while batch.status not in FINAL_STATUSES:
            try:
                batch = await self._advance(batch)
                self._problems.pop(batch.number, None)
            except StoreError as error:
                if str(error) != self._problems.get(batch.number):
                    logger.error("%s waits, since its data cannot be stored: %s", batch.id, error)
                self._problems[batch.number] = str(error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                logger.exception("%s cannot continue, trying again in %g s", batch.id, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_SECONDS)

    async def _advance(self, batch: BatchRecord) -> BatchRecord:
        """The batch with its next status. Raises StoreError."""
        if batch.status in ("validating", "in_progress") and batch.model != self._model_name:
            logger.warning("%s waits for a server of its model, %s", batch.id, batch.model)
            self._problems[batch.number] = f"this server does not serve its model, {batch.model}"
            await self._wait_for_end(batch, asyncio.Event().wait())
            return await self._begin_finalizing(batch, "expired")
        match batch.status:
            case "validating":
                return await self._until_cancelled(batch, self._validate_in_turn(batch))
            case "in_progress":
                return await self._run_lines_in_turn(batch)
        if batch.in_progress_at is None:  # cancelled while it was validated: it may have a part of its lines
            await clear_ledger(self.store, batch.number)
        keep_seconds = batch.output_expires_after or self.config.keep_days * DAY_SECONDS
        return await close_batch(self.store, batch, keep_seconds, int(time.time()))

    async def _until_cancelled(self, batch: BatchRecord, work: Coroutine[Any, Any, BatchRecord]) -> BatchRecord:
        """The result of `work`; if the batch is cancelled before its end, the cancelling batch."""
        working = asyncio.ensure_future(work)
        cancelled = asyncio.ensure_future(self._cancelled[batch.number].wait())
        try:
            await asyncio.wait([working, cancelled], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return await working
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)
        return await self.store.database.read(lambda connection: read_batch(connection, batch.number))

    async def _validate_in_turn(self, batch: BatchRecord) -> BatchRecord:
        """One after the other: each reads a file, and writes its lines."""
        async with self._validating:
            return await self._validate(batch)

    async def _validate(self, batch: BatchRecord) -> BatchRecord:
        try:
            num_lines, errors = await fill_ledger(self.store, batch, self.config)
        except ContentMissing as error:
            num_lines, errors = 0, [InputError("input_file_missing", str(error), param="input_file_id")]
        except ValidationDied as error:
            num_lines, errors = 0, [InputError("validation_failed", f"{error}; create the batch again")]
        now = int(time.time())
        if not errors:
            return await self.store.database.write(
                lambda connection: start_batch(connection, batch.number, num_lines, now)
            )
        await clear_ledger(self.store, batch.number)
        found = dump_errors(errors)
        return await self.store.database.write(lambda connection: fail_batch(connection, batch.number, found, now))

    async def _run_lines_in_turn(self, batch: BatchRecord) -> BatchRecord:
        place = asyncio.ensure_future(self._places.acquire())
        try:
            await self._wait_for_end(batch, place)
            if not place.done():
                return await self._begin_finalizing(batch, "expired")
            return await self._run_lines(batch)
        finally:
            if place.done() and not place.cancelled():
                self._places.release()

    async def _run_lines(self, batch: BatchRecord) -> BatchRecord:
        """Returns when no line runs any more: all have a result, or the batch was cancelled or has expired."""
        await self.store.database.write(lambda connection: release_running(connection, batch.number))
        kept = await self.store.database.read(lambda connection: kept_lines(connection, batch.number))
        try:
            content = self.store.data_dir.open_content(batch.input_file_id)
        except ContentMissing as error:
            logger.error("%s fails: %s", batch.id, error)
            found = dump_errors([InputError("input_file_missing", str(error), param="input_file_id")])
            return await self._begin_finalizing(batch, "failed", found)
        running = RunningBatch(batch, content, self._engine.work_done, kept_lines=kept)
        try:
            with self._engine.running_job(running.client, running.pace):
                self._runner.add(running)
                await self._wait_for_end(batch, running.has_ended.wait())
        except Exception:
            await self._runner.stop(running)
            raise
        if not running.has_ended.is_set():
            await self._runner.stop(running)
            return await self._begin_finalizing(batch, "expired")
        return await self._begin_finalizing(batch, "completed")

    async def _wait_for_end(self, batch: BatchRecord, end: Awaitable[bool]) -> None:
        """Wait until `end`, which is cancelled otherwise, or until the batch is cancelled or expires."""
        waits = [asyncio.ensure_future(one) for one in (end, self._cancelled[batch.number].wait())]
        try:
            done: set[asyncio.Future[bool]] = set()
            while not done and (seconds := batch.expires_at - time.time()) > 0:
                # the clock may be set meanwhile, or the machine sleep
                seconds = min(seconds, SECONDS_BETWEEN_LOOKS)
                done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _begin_finalizing(
        self, batch: BatchRecord, final_status: BatchStatus, errors: str | None = None
    ) -> BatchRecord:
        """The finalizing batch; the cancelling one if it was cancelled."""
        now = int(time.time())
        return await self.store.database.write(
            lambda connection: begin_finalizing(connection, batch.number, final_status, now, errors)
        )


def find_batches(request: Request) -> BatchService | None:
    """None if the server stores no batches."""
    return cast("BatchService | None", request.app.state.batches)


def batches_of(request: Request) -> BatchService:
    """Raises DataDirMissing."""
    service = find_batches(request)
    if service is None:
        raise DataDirMissing("this server stores no files and batches: start it with data_dir=DIRECTORY")
    return service


class ValidationDied(Exception):
    """The child process ended without a verdict: it was killed, or the machine has no memory left."""


async def fill_ledger(store: Store, batch: BatchRecord, config: ServerConfig) -> tuple[int, list[InputError]]:
    """(number of lines, errors) of the batch's input file; if there are no errors, its lines are in the ledger.

    Raises ContentMissing, ValidationDied and StoreError; the caller then removes the lines that were added."""
    for tries in range(1, _MAX_VALIDATIONS + 1):
        await clear_ledger(store, batch.number)  # of an attempt that ended without a verdict
        try:
            return await _try_to_fill(store, batch, config)
        except ValidationDied as error:
            logger.warning("the validation of %s died (%d of %d tries): %s", batch.id, tries, _MAX_VALIDATIONS, error)
            died = error
    raise died


async def _try_to_fill(store: Store, batch: BatchRecord, config: ServerConfig) -> tuple[int, list[InputError]]:
    store.data_dir.open_content(batch.input_file_id).close()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokasaurus.server.jobs.validation_process",
            str(store.data_dir.content_path(batch.input_file_id).absolute()),
            batch.endpoint,
            str(config.max_batch_lines),
            str(config.max_line_bytes),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_PART_BYTES,
            cwd=_PACKAGE_PARENT,
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
