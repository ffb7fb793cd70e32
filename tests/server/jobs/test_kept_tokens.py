"""A service that ends while lines run, and the next one: what is kept, and who continues with it."""

import asyncio
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

from tests.server.helpers.fake_engine import LIMITS, FakeEngine, Reply, echo
from tests.server.jobs.helpers.batch_service import RunningService, prompts, run, running_service, texts_of
from tokasaurus.messages.commands import AbortRequests
from tokasaurus.messages.generation import (
    EngineUpdate,
    GenerateRequest,
    SequenceDelta,
    SequenceProgress,
    TopLogprobs,
)
from tokasaurus.server.jobs import kept_tokens, runner
from tokasaurus.server.served_model import ServedModel

NUM_LINES, NUM_BEGUN = 10, 4
BEGINNING = len("line")


def text_of(request: GenerateRequest) -> str:
    return bytes(request.prompt_ids.tolist()).decode()


def begin_some(request: GenerateRequest, index: int) -> Reply | None:
    """The first lines get their first tokens, and the others wait."""
    if int(text_of(request).split()[1]) >= NUM_BEGUN:
        return None
    whole = echo(request, index)
    logprobs = None if whole.logprobs is None else whole.logprobs[:BEGINNING]
    top = None
    if request.num_top_logprobs:
        shape = BEGINNING, request.num_top_logprobs
        top = TopLogprobs(np.arange(BEGINNING * shape[1], dtype=np.int32).reshape(shape), np.ones(shape, np.float32))
    return Reply(whole.token_ids[:BEGINNING], logprobs, None, 3, 2, 1, 0, top)


def stored(running: RunningService) -> list[int]:
    """Sizes of what is kept."""
    return [size for (size,) in running.store.database.submit(_sizes).result()]


def _sizes(connection: apsw.Connection) -> list[tuple[int]]:
    return connection.execute("SELECT length(content) FROM kept").fetchall()


async def stop_in_the_middle(model: ServedModel, data_dir: Path, bodies: list[dict[str, Any]]) -> int:
    """Number of the batch that the service has begun."""
    async with running_service(model, data_dir, FakeEngine(script=begin_some)) as running:
        batch = await running.create(*bodies)
        await running.until(lambda engine: len(engine.requests) == len(bodies))
    calls = running.client.calls
    assert (calls.answered, calls.aborted, calls.failed, calls.num_lines_left) == (0, 0, 0, len(bodies))
    return batch.number


async def requests_of_next(model: ServedModel, data_dir: Path, number: int) -> list[GenerateRequest]:
    """What the next service has asked of its engine until the batch has completed."""
    async with running_service(model, data_dir) as running:
        batch = await running.finish(number)
        assert (batch.num_completed, batch.num_failed) == (NUM_LINES, 0)
        texts = texts_of(running.lines_of(batch.output_file_id))
        assert {text for own in texts.values() for text in own} == {f"line {number}" for number in range(NUM_LINES)}
        assert stored(running) == [], "results replace what was kept"
        return running.engine.requests


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"logprobs": 0}, {"logprobs": 3, "n": 2}], ids=["plain", "samples", "logprobs", "top"]
)
def test_lines_that_run_when_the_server_ends_continue_with_the_tokens_that_they_have(
    served_model: ServedModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    async def test() -> None:
        bodies = [{**body, **fields} for body in prompts(NUM_LINES)]
        number = await stop_in_the_middle(served_model, tmp_path, bodies)
        requests = await requests_of_next(served_model, tmp_path, number)
        assert sum(bool(request.kept) for request in requests) == NUM_BEGUN
        for request in requests:
            replies = [begin_some(request, index) for index in range(request.num_sequences)]
            expected = [
                SequenceDelta(
                    *(request.request_id, index, reply.token_ids, reply.logprobs, None),
                    *(reply.num_cached_tokens, reply.num_computed_tokens, reply.num_recomputed_tokens, 0),
                )
                for index, reply in enumerate(replies)
                if reply is not None
            ]
            assert [replace(delta, top=None) for delta in request.kept] == expected
            for delta, reply in zip(request.kept, replies, strict=False):
                if request.num_top_logprobs:
                    assert delta.top is not None
                    assert reply is not None
                    assert reply.top is not None
                    assert np.array_equal(delta.top.token_ids, reply.top.token_ids)
                    assert np.array_equal(delta.top.logprobs, reply.top.logprobs)

    run(test())


def test_a_sample_that_has_finished_is_kept_with_its_end_and_one_that_has_not_begun_is_not(
    served_model: ServedModel, tmp_path: Path
) -> None:
    def answer(request: GenerateRequest, index: int) -> Reply | None:
        return (echo(request, index), begin_some(request, index), None)[index]

    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=answer)) as running:
            batch = await running.create({"prompt": "line 0", "n": 3, "max_tokens": 6})
            await running.until(lambda engine: len(engine.requests) == 1)
        assert running.client.calls.num_kept_tokens == 6 + BEGINNING
        async with running_service(served_model, tmp_path) as running:
            assert (await running.finish(batch.number)).num_completed == 1
            kept = running.engine.requests[0].kept
        ends = [(delta.sequence_index, len(delta.token_ids), delta.finish_reason) for delta in kept]
        assert ends == [(0, 6, "length"), (1, BEGINNING, None)]

    run(test())


def test_tokens_are_kept_over_stops_before_and_after_the_line_runs_again(
    served_model: ServedModel, tmp_path: Path
) -> None:
    """The second service ends before its engine is up, the third one before the lines have any further tokens."""

    async def test() -> None:
        number = await stop_in_the_middle(served_model, tmp_path, prompts(NUM_LINES))
        async with running_service(served_model, tmp_path, is_engine_up=False) as running:
            before = stored(running)
            assert len(before) == NUM_BEGUN
        engine = FakeEngine(script=lambda request, index: None if request.kept else begin_some(request, index))
        async with running_service(served_model, tmp_path, engine) as running:
            await running.until(lambda engine: len(engine.requests) == NUM_LINES)
            assert stored(running) == before
        requests = await requests_of_next(served_model, tmp_path, number)
        assert sum(bool(request.kept) for request in requests) == NUM_BEGUN

    run(test())


def test_what_is_kept_of_another_model_or_request_is_not_used(served_model: ServedModel, tmp_path: Path) -> None:
    async def test(name: str, model: ServedModel) -> None:
        number = await stop_in_the_middle(served_model, tmp_path / name, prompts(NUM_LINES))
        requests = await requests_of_next(model, tmp_path / name, number)
        assert not any(request.kept for request in requests), name

    run(test("weights", replace(served_model, digest="other")))
    run(test("engine", replace(served_model, system_fingerprint="other")))
    run(test("defaults", replace(served_model, default_sampling=served_model.default_sampling._replace(top_k=3))))


def test_fields_that_may_differ_are_fields() -> None:
    assert {field.name for field in fields(GenerateRequest)} >= kept_tokens._FREE


def test_a_line_whose_tokens_do_not_follow_its_grammar_starts_over_as_a_new_request(
    served_model: ServedModel, tmp_path: Path
) -> None:
    """The manager may still run other samples of the request that it refuses to continue."""

    def refuse(request: GenerateRequest, index: int) -> Reply | None:
        if not request.kept:
            return echo(request, index)
        return Reply([], error="no", error_code="grammar_too_complex") if index == 0 else None

    async def test() -> None:
        body = {"prompt": "line 0", "n": 2, "max_tokens": 6, "structured_outputs": {"regex": "[a-z]+ [0-9]"}}
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some)) as running:
            batch = await running.create(body)
            await running.until(lambda engine: len(engine.requests) == 1)
        async with running_service(served_model, tmp_path, FakeEngine(script=refuse)) as running:
            batch = await running.finish(batch.number)
            assert (batch.num_completed, batch.num_failed) == (1, 0)
            first, second = running.engine.requests
            assert (bool(first.kept), second.kept) == (True, ())
            assert first.request_id != second.request_id
            assert running.engine.cancelled == [first.request_id]
            assert replace(first, kept=(), request_id="", arrived_s=0.0) == replace(
                second, request_id="", arrived_s=0.0, prompt_ids=first.prompt_ids
            )
            assert np.array_equal(first.prompt_ids, second.prompt_ids)

    run(test())


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_what_is_damaged_is_not_used(served_model: ServedModel, tmp_path: Path, damage: str) -> None:
    def harm(content: bytes) -> bytes:
        middle = content.index(b"\n", content.index(b"token_ids")) + 1
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        return {"cut": content[:-30], "changed": changed, "empty": b""}[damage]

    def harm_all(connection: apsw.Connection) -> None:
        rows = connection.execute("SELECT key, content FROM kept").fetchall()
        harmed = ((harm(content), key) for key, content in rows)
        connection.executemany("UPDATE kept SET content = ? WHERE key = ?", harmed)

    async def test() -> None:
        number = await stop_in_the_middle(served_model, tmp_path, prompts(NUM_LINES))
        async with running_service(served_model, tmp_path, is_engine_up=False) as running:
            await running.store.database.write(harm_all)
        requests = await requests_of_next(served_model, tmp_path, number)
        assert not any(request.kept for request in requests)

    run(test())


def test_lines_beyond_the_limit_and_lines_with_prompt_logprobs_or_experts_start_over(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(LIMITS, num_routed_experts=6)

    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some, limits=limits)) as running:
            bodies = prompts(NUM_BEGUN)
            bodies[0]["prompt_logprobs"] = 0
            bodies[1]["return_routed_experts"] = True
            batch = await running.create(*bodies)
            await running.until(lambda engine: len(engine.requests) == NUM_BEGUN)
            monkeypatch.setattr(runner, "MAX_KEPT_BYTES", 2000)
        calls = running.client.calls
        assert calls.num_lines_left == NUM_BEGUN
        assert 0 < calls.num_kept_tokens < (NUM_BEGUN - 2) * BEGINNING
        async with running_service(served_model, tmp_path, FakeEngine(limits=limits)) as running:
            assert (await running.finish(batch.number)).num_completed == NUM_BEGUN
            asked = [request for request in running.engine.requests if request.want_experts]
            assert [request.kept for request in asked] == [()]
            num_kept = sum(request.num_kept_tokens for request in running.engine.requests)
            assert num_kept == calls.num_kept_tokens
            assert running.client.calls.num_generated_tokens + num_kept == NUM_BEGUN * len("line 0")

    run(test())


def test_once_the_server_drains_lines_that_wait_leave_the_engine_and_those_that_run_may_end(
    served_model: ServedModel, tmp_path: Path
) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some)) as running:
            batch = await running.create(*prompts(NUM_LINES))
            await running.until(lambda engine: len(engine.requests) == NUM_LINES)
            running.client.begin_drain()
            await running.until(lambda engine: len(engine.commands) == 1)
            deadline_s = time.monotonic() + 60
            while running.client.num_pending_requests > NUM_BEGUN:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
        assert running.client.calls.num_lines_left == NUM_LINES
        requests = await requests_of_next(served_model, tmp_path, batch.number)
        assert sum(bool(request.kept) for request in requests) == NUM_BEGUN

    run(test())


def test_once_the_server_drains_no_further_lines_are_started(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_started = runner.BatchRunner._start, list[int]()

    async def start_and_drain(self: runner.BatchRunner, batch: runner.RunningBatch, lines: Any, share: int) -> bool:
        num_started.append(len(lines))
        have_all_started = await start(self, batch, lines, share)
        self._state.engine.begin_drain()
        return have_all_started

    async def test() -> None:
        monkeypatch.setattr(runner.BatchRunner, "_start", start_and_drain)
        monkeypatch.setattr(runner, "_LINES_PER_READ", NUM_BEGUN)
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some)) as running:
            batch = await running.create(*prompts(NUM_LINES))
            await running.until(lambda engine: len(engine.commands) == 1)
        assert num_started == [NUM_BEGUN]
        assert running.client.calls.num_lines_left == NUM_LINES
        monkeypatch.undo()
        await requests_of_next(served_model, tmp_path, batch.number)

    run(test())


def test_a_line_that_cannot_end_in_time_leaves_the_engine_before_the_others(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the lines that run, with 30 s to end: one needs seconds, one months, one has no expected length, and one has
    reported nothing yet."""
    expected = {0: 500, 1: 1_000_000_000, 2: None}

    def report(running: RunningService, num_tokens: int) -> None:
        by_number = {int(text_of(request).split()[1]): request.request_id for request in running.engine.requests}
        progress = [SequenceProgress(by_number[number], 0, num_tokens, most) for number, most in expected.items()]
        running.engine.updates.send(EngineUpdate([], running.engine.stats, progress))

    async def test() -> None:
        monkeypatch.setattr(runner, "MEASURED_SECONDS", 0.5)
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some)) as running:
            await running.create(*prompts(NUM_BEGUN))
            await running.until(lambda engine: len(engine.requests) == NUM_BEGUN)
            report(running, 50)
            while not any(pending.progress for pending in running.client._pending.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running.client.begin_drain()
            await running.until(lambda engine: len(engine.commands) == 1)
            for num_tokens in range(50, 450):
                report(running, num_tokens)
                await asyncio.sleep(0.02)
                if len(running.engine.commands) == 2:
                    break
            _, cut = running.engine.commands
            assert isinstance(cut, AbortRequests)
            late = next(request for request in running.engine.requests if text_of(request) == "line 1")
            assert cut.request_ids == (late.request_id,)
            assert not cut.only_waiting
            deadline_s = time.monotonic() + 60
            while not stored(running):  # so that even a kill would not lose them any more
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
            assert running.client.num_pending_requests == NUM_BEGUN - 1

    run(test())


def test_a_line_that_is_cut_while_others_are_stored_keeps_its_tokens(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=begin_some)) as running:
            created = await running.create(*prompts(NUM_BEGUN))
            await running.until(lambda engine: len(engine.requests) == NUM_BEGUN)
            batch = running.service.running_batch(created)
            assert batch is not None
            database, service_runner = running.store.database, running.service._runner
            write = database.write

            async def write_slowly(operation: Any) -> Any:
                batch.kept[1] = b"second"
                batch.released.append((1, False))
                return await write(operation)

            batch.kept[0] = b"first"
            batch.released.append((0, False))
            with monkeypatch.context() as patched:
                patched.setattr(database, "write", write_slowly)
                await service_runner._release(batch)
            assert (batch.kept, batch.released) == ({1: b"second"}, [(1, False)])
            assert stored(running) == [len(b"first")]
            await service_runner._release(batch)
            assert (batch.kept, batch.released) == ({}, [])
            assert stored(running) == [len(b"first"), len(b"second")]

    run(test())
