"""A batch service without HTTP, in front of scripted engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from tests.server.helpers.fake_engine import FakeEngine, hand_over
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import send_connection
from tokasaurus.monitoring.metrics import LoopLag
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.limits import NO_LIMITS, QueueLimits
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.jobs.service import BatchService
from tokasaurus.server.jobs.store.records import (
    FINAL_STATUSES,
    BatchRecord,
    FileRecord,
    add_file,
    new_batch,
    new_file_id,
    read_batch,
)
from tokasaurus.server.jobs.store.store import Store, open_store
from tokasaurus.server.resources import BatchLimits, BodyBytes, TextThreads, batch_limits
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState

COMPLETIONS = "/v1/completions"


@dataclass
class RunningService:
    service: BatchService
    engine: FakeEngine
    client: EngineClient
    store: Store

    async def create(self, *bodies: dict[str, Any], window_s: int = 3600, **fields: Any) -> BatchRecord:
        """A batch with one line for each body; custom ids are "0", "1", ..."""
        return await self.create_from(input_lines(*bodies), window_s, **fields)

    async def create_from(self, content: bytes, window_s: int = 3600, **fields: Any) -> BatchRecord:
        file_id = await self.add_file(content)
        return await self.service.create(new_batch(COMPLETIONS, file_id, f"{window_s}s", window_s, **fields))

    async def add_file(self, content: bytes) -> str:
        file_id = new_file_id()
        new = self.store.data_dir.new_content(file_id)
        new.write(content)
        new.commit()
        record = FileRecord(file_id, "batch", "in.jsonl", len(content), 0)
        await self.store.database.write(lambda connection: add_file(connection, record))
        return file_id

    async def read(self, number: int) -> BatchRecord:
        return await self.store.database.read(lambda connection: read_batch(connection, number))

    async def wait_for(self, number: int, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        """The batch as soon as it meets the condition."""
        deadline_s = time.monotonic() + 60
        while not condition(current := await self.read(number)):
            assert time.monotonic() < deadline_s, current
            await asyncio.sleep(0.01)
        return current

    async def finish(self, number: int) -> BatchRecord:
        """The batch when it has ended."""
        return await self.wait_for(number, lambda current: current.status in FINAL_STATUSES)

    async def replace_engine(self, engine: FakeEngine, before_start: Callable[[], None] = lambda: None) -> None:
        """The engine dies, and the launcher starts another. before_start: called between the two."""
        await asyncio.to_thread(self.engine.die)
        before_start()
        engine.launcher_end = self.engine.launcher_end
        assert engine.launcher_end is not None
        send_connection(engine.launcher_end, 0, engine.connection)
        engine.start()
        self.engine = engine

    async def until(self, condition: Callable[[FakeEngine], bool]) -> None:
        await asyncio.to_thread(self.engine.wait_until, condition)

    def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of an output file; none if there is no file."""
        if file_id is None:
            return []
        return [orjson.loads(line) for line in self.store.data_dir.content_path(file_id).read_bytes().splitlines()]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, 180)

    uvloop.run(limited())


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"line {index}", "max_tokens": 20} for index in range(num)]


def input_lines(*bodies: dict[str, Any], url: str = COMPLETIONS) -> bytes:
    lines = [
        {"custom_id": str(index), "method": "POST", "url": url, "body": {"model": "default", **body}}
        for index, body in enumerate(bodies)
    ]
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def texts_of(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The texts of all choices, by custom id."""
    texts = {line["custom_id"]: [choice["text"] for choice in line["response"]["body"]["choices"]] for line in lines}
    assert len(texts) == len(lines), "each line has one result"
    return texts


@asynccontextmanager
async def running_service(
    model: ServedModel,
    data_dir: Path,
    engine: FakeEngine | None = None,
    limits: BatchLimits | None = None,
    queue_limits: QueueLimits = NO_LIMITS,
    is_engine_up: bool = True,
) -> AsyncIterator[RunningService]:
    """is_engine_up: false: the test starts the engine."""
    engine = engine or FakeEngine()
    client = EngineClient(hand_over(engine), queue_limits=queue_limits)
    shared = TextThreads(), BodyBytes(1 << 30), LoopLag()
    state = ServerState(model, client, GrammarChecker(model), *shared, ServerConfig())
    running = None
    try:
        with open_store(data_dir, "a test") as store, client.listening():
            service = BatchService(state, store, limits or batch_limits(state.config))
            if is_engine_up:
                engine.start()
            running = RunningService(service, engine, client, store)
            async with service.running():
                yield running
            assert client.num_pending_requests == 0
    finally:
        engine.stop()
        if running is not None:
            running.engine.stop()
        await state.grammars.close()
        state.text_threads.close()
