"""Whole batches by OpenAI's Python client: answers have exactly its types, and its errors are raised."""

import asyncio
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types import Batch, FileDeleted, FileObject

from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import assert_exactly_openai_shaped, sync_client
from tests.server.jobs.helpers.forms import batch_line
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel

CHAT = "/v1/chat/completions"


def echo_or_wait(request: GenerateRequest, index: int) -> Reply | None:
    """A prompt of token ids that begins with 7 is never answered."""
    return None if request.prompt_ids[0] == 7 else echo(request, index)


WAITS = {"prompt": [7, 8]}


@pytest.fixture
def server(served_model: ServedModel, tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(echo_or_wait), data_dir=tmp_path) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return sync_client(server)


def upload(client: openai.OpenAI, *lines: bytes) -> FileObject:
    answer = client.files.with_raw_response.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    assert_exactly_openai_shaped(answer.content, FileObject)
    return answer.parse()


def create(client: openai.OpenAI, file: FileObject, window: Any = "24h", **fields: Any) -> Batch:
    fields = {"endpoint": "/v1/completions"} | fields
    answer = client.batches.with_raw_response.create(input_file_id=file.id, completion_window=window, **fields)
    assert_exactly_openai_shaped(answer.content, Batch)
    return answer.parse()


def poll(client: openai.OpenAI, batch: Batch, *until: str) -> Batch:
    deadline = time.monotonic() + 60
    while batch.status not in until:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        answer = client.batches.with_raw_response.retrieve(batch.id)
        assert_exactly_openai_shaped(answer.content, Batch)
        assert b"null" not in answer.content
        batch = answer.parse()
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [orjson.loads(line) for line in client.files.content(file_id).content.splitlines()]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def test_a_batch_gives_the_answers_of_live_requests(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    bodies: dict[str, dict[str, Any]] = {
        f"line {number}": {"model": "default", "messages": messages, "max_tokens": number + 1, "seed": number}
        for number in range(50)
    }
    refused = {"unknown model": {"model": "nobody"}, "too long": {"max_tokens": 100_000}, "n": {"n": 0}}
    bodies |= {name: bodies["line 0"] | fields for name, fields in refused.items()}
    lines = [{"custom_id": name, "method": "POST", "url": CHAT, "body": body} for name, body in bodies.items()]
    file = upload(client, *(orjson.dumps(line) + b"\n" for line in lines))
    batch = poll(client, create(client, file, endpoint=CHAT, metadata={"name": "first"}), "completed")
    assert batch.metadata == {"name": "first"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (53, 50, 3)
    answered, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert [line["custom_id"] for line in answered + failed] == list(bodies)
    num_tokens = [0, 0]
    for line in answered:
        live = client.chat.completions.create(**bodies[line["custom_id"]])
        expected = without_ids(orjson.loads(live.to_json(exclude_unset=True)))
        assert without_ids(line["response"]["body"]) == expected
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        num_tokens[0] += expected["usage"]["prompt_tokens"]
        num_tokens[1] += expected["usage"]["completion_tokens"]
    for line in failed:
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(**bodies[line["custom_id"]])
        assert line["response"]["status_code"] == raised.value.status_code
        assert line["response"]["body"]["error"] == raised.value.body
    assert batch.usage is not None
    assert [batch.usage.input_tokens, batch.usage.output_tokens] == num_tokens
    assert batch.usage.total_tokens == sum(num_tokens)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-x")
    named = client.files.create(
        file=io.BytesIO(b"named"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert named.expires_at == named.created_at + 3600
    files = [named, *(upload(client, batch_line(str(number))) for number in range(4))]
    listed = list(client.files.list(limit=2, order="asc"))
    assert listed == files, "over three pages"
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.retrieve(named.id) == named
    assert client.files.content(named.id).content == b"named"
    answer = client.files.with_raw_response.delete(named.id)
    assert_exactly_openai_shaped(answer.content, FileDeleted)
    assert list(client.files.list()) == files[:0:-1]
    with pytest.raises(openai.NotFoundError):
        client.files.content(named.id)
    assert client.files.wait_for_processing(files[1].id) == files[1]
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=b"x", purpose="fine-tune")
    assert refused.value.param == "purpose"


def test_a_bad_file_fails_its_batch(client: openai.OpenAI) -> None:
    batch = poll(client, create(client, upload(client, batch_line("1"), b"{]\n", batch_line("1"))), "failed")
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [2, 3]
    assert all(error.code and error.message for error in batch.errors.data)


def test_a_cancelled_batch_keeps_its_results(client: openai.OpenAI, server: LiveServer) -> None:
    file = upload(client, batch_line("done"), batch_line("waits", **WAITS), batch_line("refused", n=0))
    batch = create(client, file)
    deadline = time.monotonic() + 60
    while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed + counts.failed < 2:
        assert time.monotonic() < deadline, counts
        time.sleep(0.02)
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(file.id)
    answer = client.batches.with_raw_response.cancel(batch.id)
    assert_exactly_openai_shaped(answer.content, Batch)
    assert answer.parse().status == "cancelling"
    server.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    cancelled = poll(client, batch, "cancelled")
    assert [line["custom_id"] for line in results(client, cancelled.output_file_id)] == ["done"]
    codes = {
        line["custom_id"]: line["error"] and line["error"]["code"] for line in results(client, cancelled.error_file_id)
    }
    assert codes == {"waits": "batch_cancelled", "refused": None}
    started = time.monotonic()
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.with_options(max_retries=5).batches.cancel(batch.id)
    assert time.monotonic() - started < 8, "the client does not try again, which would take 11 s"


def test_a_batch_expires_after_its_window(client: openai.OpenAI) -> None:
    batch = create(client, upload(client, batch_line("done"), batch_line("waits", **WAITS)), window="4s")
    expired = poll(client, batch, "expired")
    assert expired.expires_at == batch.created_at + 4
    assert expired.expired_at is not None
    assert 4 <= expired.expired_at - batch.created_at < 40
    assert [line["custom_id"] for line in results(client, expired.output_file_id)] == ["done"]
    (late,) = results(client, expired.error_file_id)
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("waits", None, "batch_expired")
    assert expired.request_counts is not None
    assert (expired.request_counts.completed, expired.request_counts.failed) == (1, 1)


def test_batches_are_listed_over_pages(client: openai.OpenAI) -> None:
    file = upload(client, batch_line("1"))
    batches = [poll(client, create(client, file), "completed") for _ in range(5)]
    assert list(client.batches.list(limit=2)) == batches[::-1]
    page = client.batches.list(limit=3)
    assert (page.has_more, page.data) == (True, batches[:1:-1])


def test_the_asynchronous_client(server: LiveServer) -> None:
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            file = await client.files.create(file=batch_line("1"), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            while batch.status != "completed":
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            return (await client.files.content(batch.output_file_id)).text

    line = orjson.loads(asyncio.run(asyncio.wait_for(run(), 60)))
    assert line["response"]["body"]["choices"][0]["finish_reason"] == "length"
