"""Results of finished lines → ledger, many in one transaction; they wait while the disk is full."""

import asyncio
import logging
from collections import defaultdict, deque

import apsw

from tokasaurus.server.batches.store.data_dir import StoreError
from tokasaurus.server.batches.store.database import Database
from tokasaurus.server.batches.store.ledger import record_results
from tokasaurus.server.batches.store.records import LineResult

logger = logging.getLogger(__name__)

GROUP_SECONDS = 0.02
"""How long the first result of a group waits for others: a transaction costs far more than a row."""
RETRY_SECONDS = 1.0
MAX_GROUP = 1024
"""Results of a group: all who wait for one continue at the same time, and then the event loop serves nobody else."""


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
