"""A server without a port runs a batch that another process has stored, and leaves its results in the ledger."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, hand_over
from tests.server.helpers.live_server import http_server
from tests.server.jobs.helpers.batch_service import (
    COMPLETIONS,
    RunningService,
    input_lines,
    prompts,
    run,
    running_service,
)
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import BatchTokens
from tokasaurus.server.app import create_app
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.jobs import service
from tokasaurus.server.jobs.store.database import open_connection
from tokasaurus.server.jobs.store.ledger import first_results
from tokasaurus.server.jobs.store.records import BatchRecord, add_batch, cancel_batch, new_batch, read_batch
from tokasaurus.server.jobs.store.store import PRIVATE_OWNER, open_store
from tokasaurus.server.served_model import ServedModel

NUM_LINES = 20


async def results_of(running: RunningService, batch: BatchRecord) -> list[bytes]:
    return await running.store.database.read(lambda connection: first_results(connection, batch.number, 0, 1 << 30))


def test_results_stay_in_the_ledger_also_after_the_next_start(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, tell_tokens=lambda _: None) as running:
            batch = await running.finish((await running.create(*prompts(NUM_LINES))).number)
            assert (batch.status, batch.num_completed, batch.output_file_id) == ("completed", NUM_LINES, None)
            results = await results_of(running, batch)
            assert len(results) == NUM_LINES
        for tell_tokens in (lambda _: None, None):
            async with running_service(served_model, tmp_path, tell_tokens=tell_tokens) as running:
                assert await results_of(running, batch) == results

    run(test())


def test_another_process_is_told_of_tokens_and_may_cancel(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_half(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if int(bytes(request.prompt_ids.tolist()).split()[1]) < NUM_LINES // 2 else None

    async def test() -> None:
        monkeypatch.setattr(service, "SECONDS_BETWEEN_REPORTS", 0.02)
        told: asyncio.Queue[BatchTokens] = asyncio.Queue()
        async with running_service(
            served_model, tmp_path, FakeEngine(script=answer_half), tell_tokens=told.put_nowait
        ) as running:
            created = await running.create(*prompts(NUM_LINES))
            before = await running.wait_for(created.number, lambda batch: batch.num_completed == NUM_LINES // 2)
            while (await told.get()).num_generated < before.output_tokens:
                pass
            # not by the service: as a process that has only the database
            await running.store.database.write(lambda connection: cancel_batch(connection, created.number, 0))
            batch = await running.finish(created.number)
            assert (batch.status, batch.num_completed, batch.num_failed) == ("cancelled", 10, 10)
            assert len(await results_of(running, batch)) == NUM_LINES

    run(test())


def test_no_line_of_an_input_that_was_changed_runs(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(
            served_model, tmp_path, FakeEngine(), is_engine_up=False, tell_tokens=lambda _: None
        ) as running:
            created = await running.create(*prompts(NUM_LINES))
            await running.wait_for(created.number, lambda batch: batch.status == "in_progress")
            await asyncio.sleep(0.1)
            path = running.store.data_dir.content_path(created.input_file_id)
            path.write_bytes(input_lines(*prompts(NUM_LINES)).replace(b"line 7", b"LINE 7"))
            running.engine.start()
            await asyncio.sleep(1.5)
            assert not running.engine.requests
            assert (await running.read(created.number)).num_failed == 0

    run(test())


def test_a_stored_batch_belongs_to_the_first_model_that_runs_it(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, tell_tokens=lambda _: None) as running:
            batch = await running.create(*prompts(1))
            await running.finish(batch.number)
        with open_store(tmp_path, "a test") as store:
            store.database.submit(lambda connection: connection.execute("UPDATE batches SET model = NULL")).result()
        async with running_service(served_model, tmp_path, tell_tokens=lambda _: None) as running:
            assert (await running.read(batch.number)).model == served_model.name

    run(test())


def test_a_batch_has_its_model_before_the_server_says_that_it_is_ready(
    served_model: ServedModel, tmp_path: Path
) -> None:
    """The engine is up before the server listens to it, and the disk is slow."""
    engine, models, is_ready = FakeEngine(), list[str | None](), threading.Event()
    with open_store(tmp_path, PRIVATE_OWNER) as store:
        new = new_batch(COMPLETIONS, "file-1", "24h", 86_400)
        batch = store.database.submit(lambda connection: add_batch(connection, new)).result()

        def note_ready() -> None:
            with closing(open_connection(store.data_dir.database, can_write=False)) as connection:
                models.append(read_batch(connection, batch.number).model)
            is_ready.set()

        client = EngineClient(hand_over(engine), on_ready=note_ready)
        app = create_app(served_model, client, store=store, tell_tokens=lambda _: None)
        engine.start()
        store.database.submit(lambda _: is_ready.wait(0.5))
        with http_server(app, client):
            assert is_ready.wait(60)
        engine.stop()
    assert models == [served_model.name]
