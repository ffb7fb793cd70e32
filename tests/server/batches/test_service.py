"""Batches from their creation to their end, over restarts of the server, without HTTP."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop

from tests.server.batches.helpers.batch_service import input_lines, running_service, texts_of
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.batches.limits import BatchLimits
from tokasaurus.server.engine_client.queue_limits import QueueLimits
from tokasaurus.server.errors import QueueFull
from tokasaurus.server.served_model import ServedModel


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, 40)

    uvloop.run(limited())


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"line {index}", "max_tokens": 20} for index in range(num)]


def test_every_line_gets_the_answer_of_a_live_request(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            created = await running.create(*prompts(40), metadata='{"a": "b"}')
            assert created.status == "validating"
            batch = await running.finish(created.number)
            assert (batch.status, batch.num_lines, batch.num_completed, batch.num_failed) == ("completed", 40, 40, 0)
            assert (batch.metadata, batch.error_file_id) == ('{"a": "b"}', None)
            lines = running.lines_of(batch.output_file_id)
            assert [line["custom_id"] for line in lines] == [str(index) for index in range(40)]
            assert texts_of(lines) == {str(index): [f"line {index}"] for index in range(40)}
            assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
            usages = [line["response"]["body"]["usage"] for line in lines]
            assert batch.input_tokens == sum(usage["prompt_tokens"] for usage in usages) > 0
            assert batch.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
            stats = running.service.stats()
            assert (stats.num_lines_running, stats.total_completed_lines, stats.total_failed_lines) == (0, 40, 0)
            assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)

    run(test())


def test_lines_that_cannot_be_served_fail_alone(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            bodies = [
                {"prompt": "good"},
                {"prompt": "x" * 2000},
                {"prompt": "a", "model": "nobody"},
                {"prompt": "a", "temperature": "hot"},
                {"prompt": "a", "stream": True},
                {"prompt": "a", "grammar": "not a grammar"},
            ]
            batch = await running.finish((await running.create(*bodies)).number)
            assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 1, 5)
            assert texts_of(running.lines_of(batch.output_file_id)) == {"0": ["good"]}
            failed = running.lines_of(batch.error_file_id)
            assert [line["custom_id"] for line in failed] == ["1", "2", "3", "4", "5"]
            assert [line["response"]["status_code"] for line in failed] == [400, 404, 400, 400, 400]
            assert all(line["error"] is None for line in failed)
            params = [line["response"]["body"]["error"]["param"] for line in failed]
            assert params == ["prompt", "model", "temperature", "stream", "grammar"]

    run(test())


def test_a_bad_file_fails_with_its_bad_lines(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            content = input_lines(*prompts(2)) + b"{\n" + input_lines(prompts(1)[0])
            batch = await running.finish((await running.create_from(content)).number)
            assert (batch.status, batch.num_lines, batch.output_file_id) == ("failed", 0, None)
            assert batch.errors is not None
            errors = orjson.loads(batch.errors)
            assert [(error["line"], error["code"]) for error in errors] == [
                (3, "invalid_json_line"),
                (4, "duplicate_custom_id"),
            ]
            assert not running.engine.requests

    run(test())


def test_cancelling_keeps_finished_lines_and_answers_the_others(served_model: ServedModel, tmp_path: Path) -> None:
    def answer_some(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if len(request.prompt_ids) == len("line 1") else None

    async def test() -> None:
        engine = FakeEngine(script=answer_some)
        async with running_service(served_model, tmp_path, engine) as running:
            batch = await running.create(*prompts(30))
            await running.wait_for(batch.number, lambda current: current.num_completed == 10)
            started_s = time.monotonic()
            cancelled = await running.service.cancel(batch.id)
            assert cancelled is not None
            assert cancelled.status == "cancelling"
            batch = await running.finish(batch.number)
            assert time.monotonic() - started_s < 5
            assert (batch.status, batch.num_completed, batch.num_failed) == ("cancelled", 10, 20)
            assert set(texts_of(running.lines_of(batch.output_file_id))) == {str(index) for index in range(10)}
            unfinished = running.lines_of(batch.error_file_id)
            assert [line["custom_id"] for line in unfinished] == [str(index) for index in range(10, 30)]
            assert {line["error"]["code"] for line in unfinished} == {"batch_cancelled"}
            assert {line["response"] for line in unfinished} == {None}
            await running.until(lambda engine: len(engine.cancelled) == 20)
            again = await running.service.cancel(batch.id)
            assert again is not None
            assert again.status == "cancelled"
            assert await running.service.cancel("batch_nobody") is None

    run(test())


def test_cancelling_at_any_moment_ends_the_batch(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            for pause_s in (0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.3):
                batch = await running.create(*prompts(100))
                await asyncio.sleep(pause_s)
                await running.service.cancel(batch.id)
                batch = await running.finish(batch.number)
                assert batch.status in ("cancelled", "completed")
                assert batch.num_completed + batch.num_failed == batch.num_lines
                assert batch.num_lines in (0, 100)
                results = running.lines_of(batch.output_file_id) + running.lines_of(batch.error_file_id)
                assert sorted(int(line["custom_id"]) for line in results) == list(range(batch.num_lines))

    run(test())


def test_the_completion_window_ends_what_is_unfinished(served_model: ServedModel, tmp_path: Path) -> None:
    def answer_first(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if bytes(request.prompt_ids.tolist()) == b"line 0" else None

    async def test() -> None:
        engine = FakeEngine(script=answer_first)
        async with running_service(served_model, tmp_path, engine) as running:
            batch = await running.finish((await running.create(*prompts(3), window_s=2)).number)
            assert (batch.status, batch.num_completed, batch.num_failed) == ("expired", 1, 2)
            assert batch.expired_at is not None
            errors = [line["error"]["code"] for line in running.lines_of(batch.error_file_id)]
            assert errors == ["batch_expired", "batch_expired"]

    run(test())


def test_a_new_server_continues_where_the_last_one_stopped(served_model: ServedModel, tmp_path: Path) -> None:
    seeds: dict[str, set[int]] = {}

    def answer_ten(request: GenerateRequest, index: int) -> Reply | None:
        prompt = bytes(request.prompt_ids.tolist()).decode()
        seeds.setdefault(prompt, set()).add(request.seed)
        return echo(request, index) if len(prompt) == len("line 1") else None

    async def first() -> int:
        async with running_service(served_model, tmp_path, FakeEngine(script=answer_ten)) as running:
            batch = await running.create(*prompts(30))
            await running.wait_for(batch.number, lambda current: current.num_completed == 10)
            await running.until(lambda engine: len(engine.requests) == 30)
            return batch.number

    def answer_all(request: GenerateRequest, index: int) -> Reply | None:
        seeds[bytes(request.prompt_ids.tolist()).decode()].add(request.seed)
        return echo(request, index)

    async def second(number: int) -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=answer_all)) as running:
            finished = await running.finish(number)
            assert (finished.status, finished.num_completed) == ("completed", 30)
            assert len(running.engine.requests) == 20, "lines with a result do not run again"
            texts = texts_of(running.lines_of(finished.output_file_id))
            assert texts == {str(index): [f"line {index}"] for index in range(30)}

    async def test() -> None:
        await second(await first())

    run(test())
    assert len(seeds) == 30
    assert all(len(drawn) == 1 for drawn in seeds.values()), "a line that runs again has the same seed"
    assert len({seed for drawn in seeds.values() for seed in drawn}) == 30


def test_a_batch_waits_for_a_server_of_its_model(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=never)) as running:
            batch = await running.create(*prompts(3))
            await running.until(lambda engine: len(engine.requests) == 3)
        other = replace(served_model, name="another")
        async with running_service(other, tmp_path) as running:
            await asyncio.sleep(0.3)
            assert (await running.read(batch.number)).status == "in_progress"
            assert not running.engine.requests
        async with running_service(served_model, tmp_path) as running:
            assert (await running.finish(batch.number)).num_completed == 3

    run(test())


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
            served_model, tmp_path, engine, limits, QueueLimits(max_requests=1, max_sequences=1)
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


def test_a_line_that_the_engine_never_survives_fails_and_its_neighbours_do_not(
    served_model: ServedModel, tmp_path: Path
) -> None:
    """The engine dies whenever it has received the one line with max_tokens=7."""

    async def test() -> None:
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
