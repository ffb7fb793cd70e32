"""Which lines of which batches run, and beside which."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never
from tests.server.jobs.helpers.batch_service import prompts, run, running_service
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.engine_client.limits import QueueLimits
from tokasaurus.server.errors import QueueFull
from tokasaurus.server.jobs import runner
from tokasaurus.server.jobs.line_runner import ParsedLine, parse_line
from tokasaurus.server.jobs.store.ledger import pending_lines
from tokasaurus.server.jobs.store.records import PendingLine
from tokasaurus.server.resources import BatchLimits
from tokasaurus.server.served_model import ServedModel


def test_lines_wait_for_the_engine_and_run_again_after_its_death(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine(script=never)
        async with running_service(served_model, tmp_path, engine, is_engine_up=False) as running:
            batch = await running.create(*prompts(5))
            await running.wait_for(batch.number, lambda current: current.status == "in_progress")
            await asyncio.sleep(0.2)
            assert not engine.requests
            engine.start()
            await running.until(lambda engine: len(engine.requests) == 5)
            await running.replace_engine(FakeEngine())
            finished = await running.finish(batch.number)
            assert (finished.num_completed, finished.num_failed) == (5, 0)

    run(test())


def test_batches_share_the_engine_and_live_requests_come_first(served_model: ServedModel, tmp_path: Path) -> None:
    """The engine holds what it was sent: at most the limit of each batch's share, and always marked as background."""

    async def test() -> None:
        engine, limits = FakeEngine(script=never), BatchLimits(max_sequences_in_engine=40)
        async with running_service(
            served_model, tmp_path, engine, limits, QueueLimits(max_queued_requests=1, max_queued_sequences=4)
        ) as running:
            first = await running.create(*[{"prompt": "a", "n": 4} for _ in range(200)])
            await running.until(lambda engine: len(engine.requests) == 10)
            running.client.check_queue("a live client")
            second = await running.create(*[{"prompt": "b"} for _ in range(200)])
            await running.until(lambda engine: len(engine.requests) == 10 + 20)
            await asyncio.sleep(0.2)
            assert len(engine.requests) == 30
            assert all(request.is_background for request in engine.requests)
            assert {request.client for request in engine.requests} == {f"batch:{first.id}", f"batch:{second.id}"}
            live = [
                replace(request, request_id=f"live {index}", is_background=False, client="a live client")
                for index, request in enumerate(engine.requests[-2:])
            ]
            waiting = asyncio.ensure_future(running.client.generate(live[:1]))
            await running.until(lambda engine: len(engine.requests) == 31)
            with pytest.raises(QueueFull):
                await running.client.generate(live[1:])
            waiting.cancel()

    run(test())


def test_what_a_batch_leaves_of_its_share_is_the_others(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        engine, limits = FakeEngine(script=never), BatchLimits(max_sequences_in_engine=40)
        async with running_service(served_model, tmp_path, engine, limits) as running:
            for _ in range(9):
                await running.create({"prompt": "a"})
            await running.until(lambda engine: len(engine.requests) == 9)
            await running.create(*[{"prompt": "b"} for _ in range(200)])
            await running.until(lambda engine: len(engine.requests) >= 36)
            await asyncio.sleep(0.2)
            assert len(engine.requests) <= 40

    run(test())


def test_prompts_of_a_line_have_seeds_of_their_own_and_keep_them(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=never)) as running:
            batch = await running.create({"prompt": ["a", "a", "a"]}, {"prompt": ["a", "a"], "seed": 5})
            await running.until(lambda engine: len(engine.requests) == 5)
            first = {request.seed for request in running.engine.requests if request.seed != 5}
        assert len(first) == 3
        async with running_service(served_model, tmp_path) as running:
            await running.finish(batch.number)
            assert {request.seed for request in running.engine.requests if request.seed != 5} == first

    run(test())


def test_one_line_that_cannot_be_parsed_does_not_harm_the_others(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(content: bytes, max_values: int) -> ParsedLine:
        if b"line 5" in content:
            raise MemoryError
        return parse_line(content, max_values)

    async def test() -> None:
        monkeypatch.setattr(runner, "parse_line", parse)
        async with running_service(served_model, tmp_path) as running:
            batch = await running.finish((await running.create(*prompts(10))).number)
            assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 9, 1)

    run(test())


def test_lines_that_could_not_be_started_are_tried_again_on_a_busy_event_loop(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [apsw.FullError] * 20

    def read(connection: apsw.Connection, batch: int, first: int, limit: int) -> list[PendingLine]:
        if failures:
            raise failures.pop()
        return pending_lines(connection, batch, first, limit)

    async def test() -> None:
        monkeypatch.setattr(runner, "pending_lines", read)
        monkeypatch.setattr(runner, "RETRY_SECONDS", 0.02)
        async with running_service(served_model, tmp_path) as running:
            batch = await running.create(*prompts(3))
            deadline_s = time.monotonic() + 60
            while failures:  # while the loop is never idle, its timers may be a millisecond early
                assert time.monotonic() < deadline_s, f"{len(failures)} failures left"
                await asyncio.sleep(0)
            assert (await running.finish(batch.number)).num_completed == 3

    run(test())


def test_a_batch_that_cannot_be_read_does_not_stop_the_others(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(connection: apsw.Connection, batch: int, first: int, limit: int) -> list[PendingLine]:
        if batch == 1:
            raise apsw.CorruptError
        return pending_lines(connection, batch, first, limit)

    async def test() -> None:
        monkeypatch.setattr(runner, "pending_lines", read)
        async with running_service(served_model, tmp_path) as running:
            await running.create(*prompts(3))
            batch = await running.finish((await running.create(*prompts(3))).number)
            assert (batch.number, batch.num_completed) == (2, 3)

    run(test())


def test_a_killer_harms_no_line_of_another_batch(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies as soon as it has both the line with max_tokens=7 and another one, or the former twelve times."""

    async def test() -> None:
        monkeypatch.setattr(runner, "RETRY_SECONDS", 0.05)
        has_killer = threading.Event()

        def script(request: GenerateRequest, index: int) -> Reply | None:
            if request.max_new_tokens == 7:
                has_killer.set()
            return None if request.max_new_tokens == 7 or has_killer.is_set() else echo(request, index)

        async with running_service(served_model, tmp_path, FakeEngine(script=script)) as running:
            killer = await running.create({"prompt": "a", "max_tokens": 7})
            innocent = await running.create({"prompt": "b"})
            ending = asyncio.gather(running.finish(killer.number), running.finish(innocent.number))
            while not ending.done():
                if has_killer.is_set():
                    await asyncio.sleep(0.02)
                    await running.replace_engine(FakeEngine(script=script), before_start=has_killer.clear)
                await asyncio.sleep(0.005)
            ended_killer, ended_innocent = await ending
            assert (ended_killer.num_failed, ended_innocent.num_failed) == (1, 0)

    run(test())


def test_a_line_that_the_engine_never_survives_fails_and_its_neighbours_do_not(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies whenever it has received the one line with max_tokens=7."""

    async def test() -> None:
        monkeypatch.setattr(runner, "RETRY_SECONDS", 0.05)
        deaths = 0

        def script(request: GenerateRequest, index: int) -> Reply | None:
            if request.max_new_tokens == 7:
                has_killer.set()
                return None
            return echo(request, index) if not has_killer.is_set() else None

        has_killer = threading.Event()
        engine = FakeEngine(script=script)
        async with running_service(served_model, tmp_path, engine) as running:
            bodies = [{"prompt": f"line {index}", "max_tokens": 7 if index == 3 else 20} for index in range(20)]
            batch = await running.create(*bodies)
            ending = asyncio.ensure_future(running.finish(batch.number))
            while not ending.done():
                if has_killer.is_set():
                    deaths += 1
                    await running.replace_engine(FakeEngine(script=script), before_start=has_killer.clear)
                await asyncio.sleep(0.005)
            finished = await ending
            assert (finished.status, finished.num_completed, finished.num_failed) == ("completed", 19, 1)
            (failed,) = running.lines_of(finished.error_file_id)
            assert (failed["custom_id"], failed["response"]["body"]["error"]["code"]) == ("3", "engine_died")
            assert 12 <= deaths <= 60

    run(test())
