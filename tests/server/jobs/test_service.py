"""Batches from their creation to their end, over restarts of the server, without HTTP."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import orjson

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, never
from tests.server.jobs.helpers.batch_service import input_lines, prompts, run, running_service, texts_of
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.resources import BatchLimits
from tokasaurus.server.served_model import ServedModel


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
            assert time.monotonic() - started_s < 30, "no line ends by itself"
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


def test_more_batches_than_may_run_together_wait_for_their_turn(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        engine = FakeEngine(script=never)
        async with running_service(served_model, tmp_path, engine, BatchLimits(100, max_running_batches=2)) as running:
            batches = []
            for _ in range(4):
                batch = await running.create(*prompts(1))
                batches.append(await running.wait_for(batch.number, lambda current: current.status == "in_progress"))
            await running.until(lambda engine: len(engine.requests) == 2)
            await running.service.cancel(batches[2].id)  # it waits for its turn
            assert (await running.finish(batches[2].number)).status == "cancelled"
            assert len(engine.requests) == 2
            await running.service.cancel(batches[0].id)
            assert (await running.finish(batches[0].number)).status == "cancelled"
            await running.until(lambda engine: len(engine.requests) == 3)
            expiring = await running.finish((await running.create(*prompts(1), window_s=3)).number)
            assert (expiring.status, expiring.num_failed, len(engine.requests)) == ("expired", 1, 3)

    run(test())


def test_the_completion_window_ends_what_is_unfinished(served_model: ServedModel, tmp_path: Path) -> None:
    def answer_first(request: GenerateRequest, index: int) -> Reply | None:
        return echo(request, index) if bytes(request.prompt_ids.tolist()) == b"line 0" else None

    async def test() -> None:
        engine = FakeEngine(script=answer_first)
        async with running_service(served_model, tmp_path, engine) as running:
            batch = await running.finish((await running.create(*prompts(3), window_s=4)).number)
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
            waiting = await running.read(batch.number)
            assert waiting.status == "in_progress"
            assert running.service.problem(waiting) == f"this server does not serve its model, {served_model.name}"
            assert not running.engine.requests
        async with running_service(served_model, tmp_path) as running:
            finished = await running.finish(batch.number)
            assert finished.num_completed == 3
            assert running.service.problem(finished) == ""

    run(test())


def test_a_batch_that_is_not_validated_yet_waits_for_its_model_too(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            batch = await running.create(*prompts(3))
        async with running_service(replace(served_model, name="another"), tmp_path) as running:
            await asyncio.sleep(0.3)
            assert (await running.read(batch.number)).status in ("validating", "in_progress")
            assert not running.engine.requests
        async with running_service(served_model, tmp_path) as running:
            assert (await running.finish(batch.number)).num_completed == 3

    run(test())
