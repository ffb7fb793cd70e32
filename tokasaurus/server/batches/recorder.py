"""Results of finished lines → ledger, many in one transaction; they wait while the disk is full."""

import asyncio
import logging
from collections import defaultdict

import apsw

from tokasaurus.server.batches.store.database import Database
from tokasaurus.server.batches.store.errors import StoreError
from tokasaurus.server.batches.store.ledger import record_results
from tokasaurus.server.batches.store.records import LineResult

logger = logging.getLogger(__name__)

GROUP_SECONDS = 0.02
"""How long the first result of a group waits for others: a transaction costs far more than a row."""
RETRY_SECONDS = 1.0


class _Group:
    def __init__(self) -> None:
        self.results: dict[int, list[LineResult]] = defaultdict(list)
        """By batch."""
        self.is_stored = asyncio.Event()


class ResultRecorder:
    """Stores results in groups. `run` must be running."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._group = _Group()
        self._has_results = asyncio.Event()
        self._flushing = asyncio.Lock()
        self.problem: StoreError | None = None
        """Why results cannot be stored now; None if they can."""

    async def store(self, batch: int, result: LineResult) -> None:
        """Returns when the result is on the disk. batch: its number. If the caller is cancelled, it is stored
        nevertheless."""
        group = self._group
        group.results[batch].append(result)
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
            await self._flush()

    async def _flush(self) -> None:
        self._has_results.clear()
        group, self._group = self._group, _Group()
        if not group.results:
            return

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
            else:
                break
        if self.problem is not None:
            logger.info("results of batches are stored again")
        self.problem = None
        group.is_stored.set()
