"""Runs the lines of all batches in progress: keeps the engine's queue full, and no fuller."""

import asyncio
import logging
from contextlib import suppress

import apsw

from tokasaurus.server.batches.limits import BatchLimits
from tokasaurus.server.batches.recorder import ResultRecorder
from tokasaurus.server.batches.results import answered_line, refused_line
from tokasaurus.server.batches.running_batch import MAX_ATTEMPTS, LineSize, RunningBatch
from tokasaurus.server.batches.store.database import Database
from tokasaurus.server.batches.store.errors import StoreError
from tokasaurus.server.batches.store.ledger import pending_lines, release_lines, start_lines
from tokasaurus.server.batches.store.records import LineResult, PendingLine
from tokasaurus.server.client_identity import use_key_salt
from tokasaurus.server.errors import ApiError, EngineDied
from tokasaurus.server.generation.line import LineRefused, ParsedLine, parse_line
from tokasaurus.server.parsing.json_values import MAX_INLINE_BYTES
from tokasaurus.server.prepare.requests import Origin
from tokasaurus.server.state import ServerState

logger = logging.getLogger(__name__)

MAX_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of the lines that run; one line more may begin."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of results that are not stored, while lines are started."""
RETRY_SECONDS = 1.0
STOP_SECONDS = 2.0
"""Longest time to store results at the server's end."""
_LINES_PER_READ = 256
_MAX_BYTES_AHEAD = 16 << 20
# The event loop serves others in between.
_TASKS_PER_CANCEL = 64
# Reasons for which a line waits again: the engine or the server cannot serve anybody now.
_TEMPORARY = (429, 503)


class BatchRunner:
    """Starts lines by turns of the batches, each of which has an equal share of the engine's queue."""

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
        """By number."""
        self._has_news = asyncio.Event()
        self._starting = asyncio.Lock()
        self.num_completed = 0
        """Lines since the server's start."""
        self.num_failed = 0
        """Lines since the server's start."""

    @property
    def num_running(self) -> int:
        """Lines in the engine."""
        return sum(len(batch.tasks) for batch in self._batches.values())

    def add(self, batch: RunningBatch) -> None:
        """Run its lines, until it `has_ended` or `stop` is called."""
        self._batches[batch.record.number] = batch
        self._has_news.set()

    async def run(self) -> None:
        """Runs lines until it is cancelled, which `stop_all` must follow."""
        problem = ""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            try:
                self._state.check_ready()
                for batch in list(self._batches.values()):
                    async with self._starting:
                        if not batch.is_stopping:
                            await self._start_lines(batch)
                problem = ""
                continue
            except ApiError:  # the engine is not ready
                pass
            except StoreError as error:
                if str(error) != problem:
                    logger.error("lines of batches cannot be started, trying again every second: %s", error)
                problem = str(error)
            except Exception:
                logger.exception("lines of batches cannot be started, trying again")
            self._has_news.set()
            await asyncio.sleep(RETRY_SECONDS)

    async def stop(self, batch: RunningBatch) -> None:
        """Cancel the lines that run. Results that have arrived are stored."""
        if self._batches.pop(batch.record.number, None) is None:
            return
        batch.is_stopping = True
        async with self._starting:
            await _cancel(batch)
            batch.content.close()
        await self._recorder.flush()
        self._has_news.set()  # the others' shares have grown

    async def stop_all(self) -> None:
        """For the server's end: lines that run will run again at its next start."""
        with suppress(asyncio.TimeoutError):  # if the disk is full, lines run again whose results are lost
            await asyncio.wait_for(self._recorder.flush(), STOP_SECONDS)
        batches = list(self._batches.values())
        self._batches.clear()
        for batch in batches:
            batch.is_stopping = True
            batch.released += [(size.number, False) for size in batch.tasks.values()]
            await _cancel(batch)
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
        share = max(1, self._limits.max_sequences_in_engine // len(self._batches))
        max_bytes = MAX_BYTES_IN_FLIGHT // len(self._batches)
        if batch.tasks and batch.num_sequences > share * 7 // 8:
            return
        while not batch.is_stopping and batch.num_sequences < share and batch.num_bytes < max_bytes:
            if not batch.ahead and not batch.is_exhausted:
                await self._read_ahead(batch)
            lines: list[tuple[PendingLine, bytes | None]] = []
            room = share - batch.num_sequences
            while batch.ahead and len(lines) < room and batch.may_start(batch.ahead[0][0], len(lines)):
                lines.append(batch.ahead.popleft())
            if not lines:
                break
            if not await self._start(batch, lines, share):
                break
        self._end_if_done(batch)

    async def _start(self, batch: RunningBatch, lines: list[tuple[PendingLine, bytes | None]], share: int) -> bool:
        """Start lines; those for which there is no room go back to `ahead`. Returns whether all started."""
        parsed = []
        num_sequences = batch.num_sequences
        for line, content in lines:
            if num_sequences >= share:
                break
            outcome = await self._parse(line, content)
            size = LineSize(line.number, 1, line.size)
            if isinstance(outcome, ParsedLine):
                size.num_sequences = outcome.num_sequences
            parsed.append((line, outcome, size))
            num_sequences += size.num_sequences
            await asyncio.sleep(0)  # let other tasks run
        batch.ahead.extendleft(reversed(lines[len(parsed) :]))
        numbers = [line.number for line, _, _ in parsed]

        def start(connection: apsw.Connection) -> None:
            start_lines(connection, batch.record.number, numbers)

        try:
            await self._database.write(start)
        except StoreError:
            batch.run_again(numbers[0])
            raise
        if batch.is_stopping:
            return False
        for line, outcome, size in parsed:
            task = asyncio.create_task(self._run_line(batch, line, outcome))
            batch.add(task, size)
            task.add_done_callback(lambda task: self._note_end(batch, task))
            await asyncio.sleep(0)  # let other tasks run
        return len(parsed) == len(lines)

    async def _read_ahead(self, batch: RunningBatch) -> None:
        """Fill `ahead` with the next lines that wait."""

        def read(connection: apsw.Connection) -> list[tuple[PendingLine, bytes | None]]:
            lines: list[tuple[PendingLine, bytes | None]] = []
            num_bytes = 0
            for line in pending_lines(connection, batch.record.number, batch.first, _LINES_PER_READ):
                lines.append((line, batch.read(line)))
                num_bytes += line.size
                if num_bytes >= _MAX_BYTES_AHEAD:
                    break
            return lines

        batch.ahead.extend(await self._database.read(read))
        if batch.ahead:
            batch.first = batch.ahead[-1][0].number + 1
        batch.is_exhausted = not batch.ahead

    async def _parse(self, line: PendingLine, content: bytes | None) -> ParsedLine | LineRefused:
        if content is None:
            return LineRefused(line.custom_id, ApiError("the line cannot be read from the input file any more"))
        max_values = self._state.limits.max_json_values
        try:
            if len(content) <= MAX_INLINE_BYTES:
                return parse_line(content, max_values)
            return await self._state.text_threads.run(len(content), parse_line, content, max_values)
        except LineRefused as refusal:
            return refusal

    async def _run_line(self, batch: RunningBatch, line: PendingLine, parsed: ParsedLine | LineRefused) -> None:
        try:
            result = await self._result(batch, line, parsed)
        except ApiError as error:
            if error.status in _TEMPORARY:
                await asyncio.sleep(RETRY_SECONDS)
                batch.released.append((line.number, False))
                return
            if isinstance(error, EngineDied) and line.attempts + 1 < MAX_ATTEMPTS:
                batch.released.append((line.number, True))
                return
            result = LineResult(line.number, True, refused_line(line.custom_id, error))
        except Exception:
            logger.exception("a line of a batch failed")
            internal = ApiError("internal error; the server's log has the details")
            result = LineResult(line.number, True, refused_line(line.custom_id, internal))
        task = asyncio.current_task()
        assert task is not None
        batch.leave_engine(task)
        self._has_news.set()
        await self._recorder.store(batch.record.number, result)
        self.num_failed += result.has_failed
        self.num_completed += not result.has_failed

    async def _result(self, batch: RunningBatch, line: PendingLine, parsed: ParsedLine | LineRefused) -> LineResult:
        """Raises ApiError."""
        if isinstance(parsed, LineRefused):
            raise parsed.error
        if line.attempts >= MAX_ATTEMPTS:
            raise EngineDied(f"the server ended {line.attempts} times while this line ran")
        use_key_salt(batch.record.cache_salt)
        origin = Origin(parsed.num_bytes, batch.client, line.seed, is_background=True)
        answer = await parsed.answer(self._state, origin)
        usage = answer.usage
        return LineResult(
            line.number,
            False,
            answered_line(line.custom_id, answer.content),
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
        )

    async def _release(self, batch: RunningBatch) -> None:
        """Lines that have to wait again do so in the ledger. Raises StoreError."""
        released = list(batch.released)
        if not released:
            return

        def release(connection: apsw.Connection) -> None:
            for counts in (False, True):
                numbers = [number for number, counts_attempt in released if counts_attempt is counts]
                release_lines(connection, batch.record.number, numbers, counts)

        await self._database.write(release)
        del batch.released[: len(released)]
        batch.run_again(min(number for number, _ in released))

    def _note_end(self, batch: RunningBatch, task: "asyncio.Task[None]") -> None:
        batch.remove(task)
        self._end_if_done(batch)
        self._has_news.set()

    def _end_if_done(self, batch: RunningBatch) -> None:
        if batch.is_done and not batch.is_stopping and not batch.has_ended.is_set():
            del self._batches[batch.record.number]
            batch.content.close()
            batch.has_ended.set()


async def _cancel(batch: RunningBatch) -> None:
    tasks = list(batch.tasks)
    for first in range(0, len(tasks), _TASKS_PER_CANCEL):
        some = tasks[first : first + _TASKS_PER_CANCEL]
        for task in some:
            task.cancel()
        await asyncio.gather(*some, return_exceptions=True)
