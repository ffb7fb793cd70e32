"""Contents that somebody deletes from the data directory: it is said which, and nothing else is lost."""

import asyncio
import time
from pathlib import Path
from typing import Any

import orjson
import uvloop

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.jobs.helpers.batch_service import input_lines, running_service
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.jobs.store.records import BatchRecord, new_batch
from tokasaurus.server.served_model import ServedModel

NUM_LINES = 20
BODIES = [{"prompt": f"line {index}", "max_tokens": 20} for index in range(NUM_LINES)]


def answer_short(request: GenerateRequest, index: int) -> Reply | None:
    """Lines 0 to 9."""
    return echo(request, index) if len(request.prompt_ids) == len("line 1") else None


def errors_of(batch: BatchRecord) -> list[tuple[str, str]]:
    assert batch.errors is not None
    return [(error["code"], error["param"]) for error in orjson.loads(batch.errors)]


def test_an_input_file_that_is_missing_at_the_validation(served_model: ServedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_service(served_model, tmp_path) as running:
            other = await running.create(*BODIES)
            file_id = await running.add_file(input_lines(*BODIES))
            running.store.data_dir.content_path(file_id).unlink()
            batch = await running.service.create(new_batch("/v1/completions", file_id, "24h", 86_400))
            batch = await running.finish(batch.number)
            assert (batch.status, errors_of(batch)) == ("failed", [("input_file_missing", "input_file_id")])
            assert batch.errors is not None
            assert file_id in batch.errors
            assert "No such file" in batch.errors
            assert (await running.finish(other.number)).num_completed == NUM_LINES

    uvloop.run(asyncio.wait_for(test(), 180))


def test_an_input_file_that_is_deleted_while_its_lines_run(served_model: ServedModel, tmp_path: Path) -> None:
    """The server has it open."""

    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=answer_short)) as running:
            batch = await running.create(*BODIES)
            await running.wait_for(batch.number, lambda current: current.num_completed == 10)
            running.store.data_dir.content_path(batch.input_file_id).unlink()
            await running.replace_engine(FakeEngine())
            batch = await running.finish(batch.number)
            assert (batch.status, batch.num_completed) == ("completed", NUM_LINES)

    uvloop.run(asyncio.wait_for(test(), 180))


def test_an_input_file_that_is_missing_after_a_restart(served_model: ServedModel, tmp_path: Path) -> None:
    """What ran by then is kept, and the other lines say why they have no answer."""

    async def test() -> None:
        async with running_service(served_model, tmp_path, FakeEngine(script=answer_short)) as running:
            batch = await running.create(*BODIES)
            other = await running.create(*BODIES[:10])
            await running.wait_for(batch.number, lambda current: current.num_completed == 10)
            await running.finish(other.number)
        (tmp_path / "files" / batch.input_file_id).unlink()
        async with running_service(served_model, tmp_path) as running:
            batch = await running.finish(batch.number)
            assert (batch.status, errors_of(batch)) == ("failed", [("input_file_missing", "input_file_id")])
            assert (batch.num_completed, batch.num_failed) == (10, 10)
            output, error = running.lines_of(batch.output_file_id), running.lines_of(batch.error_file_id)
            assert [line["custom_id"] for line in output] == [str(index) for index in range(10)]
            assert [(line["custom_id"], line["error"]["code"]) for line in error] == [
                (str(index), "batch_failed") for index in range(10, NUM_LINES)
            ]
            assert len(running.lines_of((await running.read(other.number)).output_file_id)) == 10

    uvloop.run(asyncio.wait_for(test(), 180))


def run_batch(server: LiveServer) -> dict[str, Any]:
    content = input_lines(*BODIES)
    uploaded = server.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    file_id = uploaded.json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = server.http.post("/v1/batches", json=body).json()
    deadline_s = time.monotonic() + 60
    while (batch := server.http.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
        assert time.monotonic() < deadline_s, str(batch)
        time.sleep(0.02)
    return dict(batch)


def test_an_output_file_that_is_missing_or_cut(served_model: ServedModel, tmp_path: Path) -> None:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        missing, cut, whole = (run_batch(server)["output_file_id"] for _ in range(3))
        (tmp_path / "files" / missing).unlink()
        content = (tmp_path / "files" / cut).read_bytes()
        (tmp_path / "files" / cut).write_bytes(content[:-10])
        for file_id, words in ((missing, "No such file"), (cut, "damaged")):
            answer = server.http.get(f"/v1/files/{file_id}/content")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "storage_failed")
            assert file_id in error["message"]
            assert words in error["message"]
        assert len(server.http.get(f"/v1/files/{whole}/content").content.splitlines()) == NUM_LINES
        assert server.http.delete(f"/v1/files/{missing}").json()["deleted"]
        assert len(server.http.get("/v1/batches").json()["data"]) == 3
