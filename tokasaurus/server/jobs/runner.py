"""Runs the lines of all batches in progress: keeps the engine's queue full, and no fuller; stores their results."""

import asyncio
import functools
import logging
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import apsw

from tokasaurus.messages.commands import FIRST_VERSION
from tokasaurus.messages.generation import GenerateRequest, SequenceProgress
from tokasaurus.server.access import use_key_salt
from tokasaurus.server.engine_client.client import WorkDone
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.engine_client.pending import JobPace, PendingRequest
from tokasaurus.server.errors import (
    AnswerTooLargeError,
    ApiError,
    EngineDied,
    GrammarTooComplex,
    GrammarValidatorFailed,
    RequestAborted,
    internal_error,
)
from tokasaurus.server.jobs.kept_tokens import continued, write_kept
from tokasaurus.server.jobs.line_runner import (
    BATCH_PREFIX,
    MAX_BYTES_IN_FLIGHT,
    AfterError,
    Line,
    LineRefused,
    LineRunner,
    ParsedLine,
    parse_line,
    refused,
)
from tokasaurus.server.jobs.store.data_dir import StoreError
from tokasaurus.server.jobs.store.database import Database, explain
from tokasaurus.server.jobs.store.ledger import (
    keep_tokens,
    pending_lines,
    read_kept,
    record_results,
    release_lines,
    start_lines,
)
from tokasaurus.server.jobs.store.records import BatchRecord, LineResult, PendingLine
from tokasaurus.server.json_values import is_parsed_quickly
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.resources import BatchLimits
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.state import ServerState

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Bytes of results that are not stored, while lines are started."""
MAX_RESULT_BYTES = 512 << 20
"""Largest result of one line. SQLite stores up to 10^9 bytes."""
GROUP_SECONDS = 0.02
"""How long the first result of a group waits for others: a transaction costs far more than a row."""
MAX_GROUP = 1024
"""Results of a group: all who wait for one continue at the same time, and then the event loop serves nobody else."""
RETRY_SECONDS = 1.0
STOP_SECONDS = 2.0
"""Longest time to cut the lines that run at the server's end, and again to store results."""
MEASURED_SECONDS = 3.0
"""Time for a line that runs to show its speed while the server drains. Reports come about once a second."""
MAX_KEPT_BYTES = 256 << 20
"""Tokens and logprobs of cut lines that are kept; further lines start over."""
_MAX_BYTES_AHEAD = 16 << 20
_STARTS_AT_ONCE = 8
_LINES_PER_READ = 256
# Reasons for which a line waits again: the engine or the server cannot serve anybody now.
_TEMPORARY = (429, 503)

MAX_ATTEMPTS = 12
"""Starts of a line before it fails because the engine or the server never survived it."""

# A line that makes the server die must not do so for ever, and must not make lines beside it fail. So each death lets
# fewer of the lines that were running at it run together, of all batches, until one of them is alone.
_MAX_TOGETHER = (None, None, None, 1024, 256, 64, 16, 4)
"""Indexed by attempts; a line with more attempts runs alone."""


def _max_together(attempts: int) -> int | None:
    """Lines that may run together, if one of them was started so often before; None: any number."""
    return _MAX_TOGETHER[attempts] if attempts < len(_MAX_TOGETHER) else 1


class LineCut(RequestAborted):
    """Requests of a line were ended with the tokens that they have: by a trainer, or because the server stops."""

    def __init__(self, requests: list[GenerateRequest], results: list[list[FinishedSequence]]) -> None:
        super().__init__("the request was aborted: send it again")
        self.requests = requests
        self.results = results


def client_of(batch: BatchRecord) -> str:
    """The batch's name in the engine's queue, which serves the batches by turns."""
    return f"batch:{batch.id}"


def _is_late(
    before: Mapping[int, SequenceProgress], now: Mapping[int, SequenceProgress], seconds: float, left_s: float
) -> bool:
    """Whether a sequence, at its speed of these seconds, is expected to need more than twice the time that is left. Not
    known of one that has just begun. before, now: reports on the sequences of a request."""
    for index, progress in now.items():
        num_new = progress.num_tokens - before[index].num_tokens if index in before else 0
        if num_new > 0 and progress.num_expected_tokens is not None:
            num_left = progress.num_expected_tokens - progress.num_tokens
            if num_left * seconds / num_new > 2 * max(0.0, left_s):
                return True
    return False


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch in progress. Its lines are started in order."""

    record: BatchRecord
    content: BinaryIO
    """The input file."""
    work_before: WorkDone
    """Work that the server had done when the batch's lines began to run."""
    first: int = 0
    """Lines before it do not wait, or are in `ahead`."""
    ahead: deque[tuple[PendingLine, bytes | None]] = field(default_factory=deque)
    """Lines that wait, with their content; None if it cannot be read."""
    released: list[tuple[int, bool]] = field(default_factory=list)
    """(number, whether the attempt counts) of lines that have to wait again, which the ledger does not know yet."""
    kept_lines: set[int] = field(default_factory=set)
    """Numbers of the lines that the end of a former server has cut, and of which the ledger has what they had."""
    kept: dict[int, bytes] = field(default_factory=dict)
    """What is kept of lines that this server's end has cut, by number; the ledger does not have it yet."""
    pace: JobPace = field(init=False)
    lines: LineRunner = field(init=False)
    """Its lines that run."""
    is_exhausted: bool = False
    """No line waits."""
    is_stopping: bool = False
    waits_to_be_alone: bool = False
    """Its next line may have made the server die, and waits until fewer lines run; no others start meanwhile."""
    is_pausing: bool = False
    """No line starts now, because the last start failed."""
    problem: str = ""
    """Why lines cannot be started now; "" if they can."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no line waits or runs."""

    def __post_init__(self) -> None:
        self.pace = JobPace(self.record.num_lines - self.record.num_completed - self.record.num_failed)

    @property
    def client(self) -> str:
        return client_of(self.record)

    @property
    def is_done(self) -> bool:
        """No line waits or runs."""
        return self.is_exhausted and not self.lines.lines and not self.released

    @property
    def has_waiting_lines(self) -> bool:
        return not self.is_exhausted or bool(self.released)

    def read(self, line: PendingLine) -> bytes | None:
        """The line's content; None if the file has been cut. Blocks. Raises OSError."""
        content = os.pread(self.content.fileno(), line.size, line.start)
        return content if len(content) == line.size else None

    def run_again(self, number: int) -> None:
        """The line waits again in the ledger."""
        self.first = min(self.first, number)
        self.ahead = deque((line, content) for line, content in self.ahead if line.number < number)
        self.is_exhausted = False

    async def read_ahead(self, database: Database, max_bytes: int) -> None:
        """Fill `ahead` with the next lines that wait; one line may exceed `max_bytes`. Raises StoreError."""

        def read(connection: apsw.Connection) -> list[tuple[PendingLine, bytes | None]]:
            lines: list[tuple[PendingLine, bytes | None]] = []
            num_bytes = 0
            for line in pending_lines(connection, self.record.number, self.first, _LINES_PER_READ):
                lines.append((line, self.read(line)))
                num_bytes += line.size
                if num_bytes >= max_bytes:
                    break
            return lines

        try:
            self.ahead.extend(await database.read(read))
        except OSError as error:
            raise explain(error) from None
        if self.ahead:
            self.first = self.ahead[-1][0].number + 1
        self.is_exhausted = not self.ahead


class _LedgerSink:
    """Stores the results of a batch's lines; lines that the engine could not serve wait again in the ledger."""

    id_prefix = BATCH_PREFIX
    repeats_errors = False

    def __init__(self, runner: "BatchRunner", batch: RunningBatch) -> None:
        self._runner = runner
        self._batch = batch

    async def store(self, _line: Line, result: LineResult) -> None:
        await self._runner.store(self._batch, result)

    async def after_error(self, line: Line, error: ApiError) -> AfterError:
        if self._runner.is_draining:
            if isinstance(error, LineCut):
                self._runner.keep(self._batch, line.number, error)
        elif error.status in _TEMPORARY:
            await asyncio.sleep(RETRY_SECONDS)
        may_be_its_own = isinstance(error, EngineDied | GrammarValidatorFailed)
        if not (line.attempts + 1 < MAX_ATTEMPTS if may_be_its_own else error.status in _TEMPORARY):
            return AfterError.FINAL
        self._batch.released.append((line.number, may_be_its_own))
        return AfterError.TAKEN_BACK


class _Group:
    def __init__(self) -> None:
        self.results: dict[int, list[LineResult]] = defaultdict(list)
        """Results of each batch, by its number."""
        self.num_results = 0
        self.num_bytes = 0
        self.is_stored = asyncio.Event()


class ResultRecorder:
    """Stores results in groups. `run` must be running."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._groups: deque[_Group] = deque()
        """Groups that are not being stored yet; the last one may grow."""
        self._has_results = asyncio.Event()
        self._flushing = asyncio.Lock()
        self.problem: StoreError | None = None
        """Why results cannot be stored now; None if they can."""
        self.num_waiting_bytes = 0
        """Bytes of the results that are not stored yet."""

    async def store(self, batch: int, result: LineResult) -> None:
        """Returns when the result is on the disk. batch: its number. If the caller is cancelled, it is stored
        nevertheless."""
        if not self._groups or self._groups[-1].num_results >= MAX_GROUP:
            self._groups.append(_Group())
        group = self._groups[-1]
        group.results[batch].append(result)
        group.num_results += 1
        group.num_bytes += len(result.content)
        self.num_waiting_bytes += len(result.content)
        self._has_results.set()
        await group.is_stored.wait()

    async def run(self) -> None:
        """Stores what arrives, until it is cancelled."""
        while True:
            await self._has_results.wait()
            await asyncio.sleep(GROUP_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Store what has arrived. Returns when it is on the disk, with what arrived before."""
        async with self._flushing:
            self._has_results.clear()
            for _ in range(len(self._groups)):
                await self._store(self._groups.popleft())

    async def _store(self, group: _Group) -> None:
        def write(connection: apsw.Connection) -> None:
            for batch, results in group.results.items():
                record_results(connection, batch, results)

        while True:
            try:
                await self._database.write(write)
            except StoreError as error:
                if self.problem is None:
                    logger.error("results of batches cannot be stored, trying again every second: %s", error)
                self.problem = error
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                logger.exception("results of batches cannot be stored, trying again every second")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                break
        if self.problem is not None:
            logger.info("results of batches are stored again")
        self.problem = None
        self.num_waiting_bytes -= group.num_bytes
        group.is_stored.set()


class BatchRunner:
    """Starts lines of the batches in turns; each batch has an equal share of the engine's queue."""

    def __init__(
        self,
        state: ServerState,
        database: Database,
        recorder: ResultRecorder,
        limits: BatchLimits,
    ) -> None:
        self._state = state
        self._database = database
        self._recorder = recorder
        self._limits = limits
        self._batches: dict[int, RunningBatch] = {}
        """The batches that run, by number."""
        self._has_news = asyncio.Event()
        self._starting = asyncio.Lock()
        self._attempts: Counter[int] = Counter()
        """Lines that run, by how often they had been started before."""
        self.num_completed = 0
        """Lines since the server's start."""
        self.num_failed = 0
        """Lines since the server's start."""
        self._num_kept_bytes = 0

    @property
    def is_draining(self) -> bool:
        """The server is stopping."""
        return self._state.engine.is_draining

    @property
    def num_sequences(self) -> int:
        """Sequences in the engine."""
        return sum(batch.lines.num_sequences for batch in self._batches.values())

    @property
    def num_running(self) -> int:
        """Lines in the engine."""
        return sum(len(batch.lines.lines) for batch in self._batches.values())

    def find(self, number: int) -> RunningBatch | None:
        """The batch of this number, if it runs."""
        return self._batches.get(number)

    def add(self, batch: RunningBatch) -> None:
        """Run its lines, until it `has_ended` or `stop` is called."""
        batch.lines = LineRunner(_LedgerSink(self, batch), lambda line: self._note_end(batch, line))
        self._batches[batch.record.number] = batch
        self._has_news.set()

    async def run(self) -> None:
        """Runs lines until it is cancelled, which `stop_all` must follow."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            try:
                self._state.check_ready()
            except ApiError:  # the engine is not ready
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._has_news.set)
                continue
            for batch in list(self._batches.values()):
                async with self._starting:
                    await self._try_to_start_lines(batch)

    async def _try_to_start_lines(self, batch: RunningBatch) -> None:
        """What goes wrong with one batch must not keep the others from running."""
        if batch.is_stopping or batch.has_ended.is_set() or batch.is_pausing:
            return
        try:
            await self._start_lines(batch)
            batch.problem = ""
            return
        except StoreError as error:
            if str(error) != batch.problem:
                logger.error("lines of %s cannot be started, trying again every second: %s", batch.record.id, error)
            batch.problem = str(error)
        except Exception:
            logger.exception("lines of %s cannot be started, trying again", batch.record.id)
        batch.is_pausing = True
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._end_pause, batch)

    def _end_pause(self, batch: RunningBatch) -> None:
        batch.is_pausing = False
        self._has_news.set()

    async def stop(self, batch: RunningBatch) -> None:
        """Cancel the lines that run. Results that have arrived are stored."""
        if self._batches.pop(batch.record.number, None) is None:
            return
        batch.is_stopping = True
        async with self._starting:
            await batch.lines.cancel()
            batch.content.close()
        await self._recorder.flush()
        self._has_news.set()  # the others' shares have grown

    async def drain(self) -> None:
        """Once the server drains, the engine gives lines back: at once those that do not run yet, which would take the
        place of others, and then those that run and are not expected to end in time."""
        await self._state.engine.drain_begins.wait()
        ends_s = time.monotonic() + self._state.config.drain_seconds
        await self._cut(self._pending(), only_waiting=True)
        before = {pending.request.request_id: dict(pending.progress) for pending in self._pending()}
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(MEASURED_SECONDS)
            seconds, left_s = time.monotonic() - began_s, ends_s - time.monotonic()
            late = {
                pending.line
                for pending in self._pending()
                if _is_late(before.get(pending.request.request_id, {}), pending.progress, seconds, left_s)
            }
            await self._cut([pending for pending in self._pending() if pending.line in late])
            async with self._starting:
                for batch in list(self._batches.values()):
                    with suppress(StoreError):  # they are released later
                        await self._release(batch)

    def _pending(self) -> list[PendingRequest]:
        """The requests of all lines that run."""
        return [pending for batch in self._batches.values() for pending in batch.pace.requests]

    async def _cut(self, requests: list[PendingRequest], only_waiting: bool = False) -> None:
        """End requests of lines with the tokens that they have, which are kept. only_waiting: those that do not run
        yet. Lines with logprobs of their prompt, or experts, start over: what is known of these is not returned."""
        asked = (one.request for one in requests)
        ids = {each.request_id for each in asked if not (each.want_prompt_logprobs or each.want_experts)}
        with suppress(asyncio.TimeoutError):  # the engine hangs
            abort = self._state.engine.abort(lambda request: request.request_id in ids, only_waiting)
            await asyncio.wait_for(abort, STOP_SECONDS)

    def keep(self, batch: RunningBatch, number: int, cut: LineCut) -> None:
        """A line has been cut because the server stops: it is released with what it has, see `_release`."""
        content = write_kept(self._state.model, cut.requests, cut.results)
        num_tokens = 0
        if content is not None and self._num_kept_bytes + len(content) <= MAX_KEPT_BYTES:
            self._num_kept_bytes += len(content)
            batch.kept[number] = content
            num_tokens = sum(len(sequence.token_ids) for row in cut.results for sequence in row)
        self._state.engine.calls.take_back(num_tokens)

    async def stop_all(self) -> None:
        """Stop at the server's end: lines that run now go on at its next start with the tokens that they have, or start
        over. Results must still be stored meanwhile."""
        self._state.engine.begin_drain()
        await self._cut(self._pending())
        batches = list(self._batches.values())
        if tasks := [task for batch in batches for task in batch.lines.lines]:
            # if the disk is full, lines run again whose results are lost
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self._batches.clear()
        for batch in batches:
            batch.is_stopping = True
            batch.released += [(line.number, False) for line in batch.lines.lines.values()]
            await batch.lines.cancel()
            batch.content.close()
            try:
                await self._release(batch)
            except StoreError as error:  # they are released at the next start
                logger.error("lines of batches cannot be released: %s", error)

    async def _start_lines(self, batch: RunningBatch) -> None:
        """Start as many lines as the batch's share allows, if that is many or none runs: each start is a
        transaction."""
        await self._release(batch)
        if self._recorder.problem is not None or self._recorder.num_waiting_bytes >= MAX_WAITING_BYTES:
            return  # until results are stored
        share = self._share()
        max_bytes = MAX_BYTES_IN_FLIGHT // max(1, len(self._batches))
        if batch.lines.lines and batch.lines.num_sequences > share * 7 // 8:
            return
        while not (batch.is_stopping or self.is_draining) and (
            batch.lines.num_sequences < share and batch.lines.num_bytes < max_bytes
        ):
            if not batch.ahead and not batch.is_exhausted:
                await batch.read_ahead(self._database, _MAX_BYTES_AHEAD // max(1, len(self._batches)))
            lines: list[tuple[PendingLine, bytes | None]] = []
            room = share - batch.lines.num_sequences
            while batch.ahead and len(lines) < room and self._may_start(batch, lines):
                lines.append(batch.ahead.popleft())
            if not lines:
                break
            try:
                if not await self._start(batch, lines, share):
                    break
            except BaseException:
                batch.run_again(lines[0][0].number)
                raise
        self._end_if_done(batch)

    def _share(self) -> int:
        """Sequences that each batch with waiting lines may have in the engine: what the others leave, equally."""
        waiting = [batch for batch in self._batches.values() if batch.has_waiting_lines]
        num_others = self.num_sequences - sum(batch.lines.num_sequences for batch in waiting)
        return max(1, (self._limits.max_sequences_in_engine - num_others) // max(1, len(waiting)))

    def _may_start(self, batch: RunningBatch, before: list[tuple[PendingLine, bytes | None]]) -> bool:
        """Whether the first line of `ahead` may run beside all lines that run or are about to."""
        (line, _), *_ = batch.ahead
        num_others = self.num_running + len(before)
        attempts = max(line.attempts, *(line.attempts for line, _ in before), *self._attempts, 0)
        if any(other.waits_to_be_alone for other in self._batches.values() if other is not batch):
            return False
        max_together = _max_together(attempts)
        may_start = max_together is None or num_others < max_together
        batch.waits_to_be_alone = not may_start and _max_together(line.attempts) is not None
        return may_start

    async def _start(self, batch: RunningBatch, lines: list[tuple[PendingLine, bytes | None]], share: int) -> bool:
        """Start lines; those for which there is no room go back to `ahead`. Returns whether all started."""
        parsed: list[Line] = []
        num_sequences = batch.lines.num_sequences
        for pending, content in lines:
            if num_sequences >= share:
                break
            parsed.append(await self._parse(batch, pending, content))
            num_sequences += parsed[-1].num_sequences
            await asyncio.sleep(0)  # let other tasks run
        numbers = [line.number for line in parsed]

        def start(connection: apsw.Connection) -> None:
            start_lines(connection, batch.record.number, numbers)

        await self._database.write(start)
        batch.ahead.extendleft(reversed(lines[len(parsed) :]))
        for index, line in enumerate(parsed):
            if batch.is_stopping:
                return False
            batch.lines.start(line)
            self._attempts[line.attempts] += 1
            if index % _STARTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # the event loop serves nobody else while lines are prepared
        return len(parsed) == len(lines)

    async def _parse(self, batch: RunningBatch, pending: PendingLine, content: bytes | None) -> Line:
        """The line to run; one that cannot be run has an error as its result."""
        error = ApiError("the line cannot be read from the input file any more")
        max_values = self._state.config.max_json_values
        try:
            if content is not None:
                if is_parsed_quickly(content):
                    parsed = parse_line(content, max_values)
                else:
                    parsed = await self._state.text_threads.run(len(content), parse_line, content, max_values)
                if parsed.custom_id == pending.custom_id:
                    answer = functools.partial(self._answer, batch, pending, parsed)
                    return Line(
                        pending.custom_id,
                        answer,
                        num_bytes=pending.size,
                        num_sequences=parsed.body.num_sequences,
                        number=pending.number,
                        attempts=pending.attempts,
                    )
                error = ApiError("the input file was changed after its validation")
        except LineRefused as refusal:
            error = refusal.error
        except Exception:
            logger.exception("a line of %s cannot be parsed", batch.record.id)
            error = internal_error()
        line = refused(pending.custom_id, error)
        line.num_bytes, line.number, line.attempts = pending.size, pending.number, pending.attempts
        return line

    async def _answer(self, batch: RunningBatch, pending: PendingLine, parsed: ParsedLine) -> Answer:
        """Raises ApiError, and LineCut."""
        if pending.attempts >= MAX_ATTEMPTS:
            raise EngineDied(f"the server ended {pending.attempts} times while this line ran")
        use_key_salt(batch.record.cache_salt)
        origin = Origin(parsed.num_bytes, batch.client, pending.seed, is_background=True, job=batch.client)
        prepared = await parsed.endpoint.prepare(self._state, parsed.body, origin)
        results = None
        if (kept := await self._read_kept(batch, pending.number, prepared)) is not None:
            with suppress(GrammarTooComplex):  # the tokens do not follow the grammar as it is read now
                results = await parsed.endpoint.generate(self._state, replace(prepared, requests=kept))
            if results is None:  # with new ids: other samples may still run at the manager
                prepared = await parsed.endpoint.prepare(self._state, parsed.body, origin)
        if results is None:
            results = await parsed.endpoint.generate(self._state, prepared)
        if any(sequence.finish_reason == "abort" for row in results for sequence in row):
            raise LineCut(prepared.requests, results)
        answer = await parsed.endpoint.write(self._state, prepared, results)
        if len(answer.content) > MAX_RESULT_BYTES:
            raise AnswerTooLargeError(f"the answer has more than {MAX_RESULT_BYTES} bytes")
        return answer

    async def _read_kept(self, batch: RunningBatch, number: int, prepared: Prepared) -> list[GenerateRequest] | None:
        """The line's requests, which continue with the tokens that a former server has kept; None if they start
        over."""
        if number not in batch.kept_lines or self._state.engine.control.weight_version != FIRST_VERSION:
            return None
        try:
            content = await self._database.read(lambda connection: read_kept(connection, batch.record.number, number))
        except StoreError as error:
            logger.warning("kept tokens of a line cannot be read, and it starts over: %s", error)
            return None
        return None if content is None else continued(self._state.model, prepared.requests, content)

    async def store(self, batch: RunningBatch, result: LineResult) -> None:
        """Returns when the result is on the disk."""
        self._has_news.set()
        batch.pace.num_done += 1
        await self._recorder.store(batch.record.number, result)
        self.num_failed += result.has_failed
        self.num_completed += not result.has_failed

    async def _release(self, batch: RunningBatch) -> None:
        """Lines that have to wait again do so in the ledger, which gets what is kept of them. Raises StoreError."""
        released, kept = list(batch.released), dict(batch.kept)
        if not released:
            return

        def release(connection: apsw.Connection) -> None:
            keep_tokens(connection, batch.record.number, kept)
            for counts in (False, True):
                numbers = [number for number, counts_attempt in released if counts_attempt is counts]
                release_lines(connection, batch.record.number, numbers, counts)

        await self._database.write(release)
        for number in kept:  # others may have been cut meanwhile
            del batch.kept[number]
        del batch.released[: len(released)]
        batch.run_again(min(number for number, _ in released))

    def _note_end(self, batch: RunningBatch, line: Line) -> None:
        self._attempts[line.attempts] -= 1
        if not self._attempts[line.attempts]:
            del self._attempts[line.attempts]
        self._end_if_done(batch)
        self._has_news.set()

    def _end_if_done(self, batch: RunningBatch) -> None:
        if batch.is_done and not batch.is_stopping and not batch.has_ended.is_set():
            del self._batches[batch.record.number]
            batch.content.close()
            batch.has_ended.set()
