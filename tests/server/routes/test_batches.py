"""/v1/batches: bodies, objects, paging, and what is refused."""

import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine, never
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.jobs.helpers.forms import batch_line
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.server.jobs.store.records import BatchRecord, add_batch
from tokasaurus.server.protocol.batches import window_seconds
from tokasaurus.server.served_model import ServedModel

BATCHES = "/v1/batches"
FINAL = {"failed", "completed", "cancelled", "expired"}


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def input_file_id(server: LiveServer) -> str:
    return upload(server, batch_line("1"))["id"]


def create(server: LiveServer, input_file_id: str, **fields: object) -> dict[str, Any]:
    body = {"input_file_id": input_file_id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    answer = server.http.post(BATCHES, json=body)
    assert answer.status_code == 200, answer.text
    created = answer.json()
    assert created["status"] == "validating"
    return created


def wait_for(server: LiveServer, batch_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not condition(batch := server.http.get(f"{BATCHES}/{batch_id}").json()):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def finish(server: LiveServer, batch_id: str) -> dict[str, Any]:
    return wait_for(server, batch_id, lambda batch: batch["status"] in FINAL)


def test_a_batch_has_only_the_fields_that_it_has_reached(server: LiveServer, input_file_id: str) -> None:
    created = create(server, input_file_id)
    no_tokens = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    expected = {
        "object": "batch",
        "endpoint": "/v1/completions",
        "input_file_id": input_file_id,
        "completion_window": "24h",
        "status": "validating",
        "model": "org/small",
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, **no_tokens},
    }
    own = {name: created[name] for name in ("id", "created_at", "expires_at")}
    assert created == expected | own
    assert re.fullmatch("batch_[0-9a-f]{24}", created["id"])
    assert abs(created["created_at"] - time.time()) < 10
    assert created["expires_at"] == created["created_at"] + 86_400
    finished = finish(server, created["id"])
    reached = {"in_progress_at", "finalizing_at", "completed_at", "output_file_id"}
    assert finished.keys() == created.keys() | reached, "no error file, since no line failed"
    assert finished["model"] == "org/small"
    assert finished["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    # as of a live request
    usage = server.http.post("/v1/completions", json=orjson.loads(batch_line("1"))["body"]).json()["usage"]
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    assert finished["usage"] == counts | {"total_tokens": usage["total_tokens"]} | no_tokens


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("1s", 1), ("90m", 5400), ("24h", 86_400), ("720h", 2_592_000), ("30d", 2_592_000), ("2592000s", 2_592_000)],
)
def test_completion_windows(server: LiveServer, input_file_id: str, window: str, seconds: int) -> None:
    assert window_seconds(window) == seconds
    created = create(server, input_file_id, completion_window=window)
    assert created["expires_at"] - created["created_at"] == seconds


METADATA: dict[str, str] = {f"{'k' * 62}{number:2}": "v" * 512 for number in range(16)}


def test_metadata_and_the_time_of_output_files(server: LiveServer, input_file_id: str) -> None:
    metadata = METADATA | {"k" * 62 + " 0": 'é€😀"\n\x00'}
    expires_after = {"anchor": "created_at", "seconds": 3600}
    created = create(server, input_file_id, metadata=metadata, output_expires_after=expires_after)
    assert created["metadata"] == metadata
    finished = finish(server, created["id"])
    assert finished["metadata"] == metadata
    output = server.http.get(f"/v1/files/{finished['output_file_id']}").json()
    assert output["expires_at"] == output["created_at"] + 3600
    assert (output["purpose"], output["filename"]) == ("batch_output", f"{created['id']}_output.jsonl")
    assert create(server, input_file_id, metadata=None, output_expires_after=None).keys() == created.keys() - {
        "metadata"
    }
    assert create(server, input_file_id, metadata={})["metadata"] == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({name: None}, name) for name in ("input_file_id", "endpoint", "completion_window")],
        *[({"completion_window": window}, "completion_window") for window in ("0h", "24", "31d", "1w", "-1h", "1.5h")],
        *[({"completion_window": window}, "completion_window") for window in ("24h ", "٣h", "9" * 5000 + "h", 24, "")],
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/bulk"}, "endpoint"),
        ({"input_file_id": 1}, "input_file_id"),
        ({"surprise": 1}, "surprise"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": []}, "metadata"),
        ({"metadata": METADATA | {"one more": ""}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: ""}}, None),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600, "x": 1}}, "output_expires_after.x"),
    ],
)
def test_a_wrong_body_is_refused(server: LiveServer, input_file_id: str, fields: Any, param: str | None) -> None:
    body = {"input_file_id": input_file_id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    before = server.http.get(BATCHES).json()
    answer = server.http.post(BATCHES, json=body)
    assert answer.status_code == 400
    error = assert_openai_error(answer.content)
    assert param is None or error["param"] == param, error
    assert server.http.get(BATCHES).json()["first_id"] == before["first_id"]


def test_the_input_file_must_exist_and_be_for_batches(server: LiveServer, input_file_id: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = server.http.post(BATCHES, json=body)
    assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (404, "input_file_id")
    output = finish(server, create(server, input_file_id)["id"])["output_file_id"]
    answer = server.http.post(BATCHES, json=body | {"input_file_id": output})
    assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (400, "input_file_id")
    assert "'batch_output'" in answer.json()["error"]["message"]


def test_what_is_wrong_with_a_file_is_told_line_by_line(server: LiveServer) -> None:
    content = batch_line("1") + b"{\n" + batch_line("1") + batch_line("3", url="/v1/chat/completions") + b"[]\n"
    failed = finish(server, create(server, upload(server, content)["id"])["id"])
    assert failed["status"] == "failed"
    assert failed.keys().isdisjoint({"in_progress_at", "completed_at", "output_file_id", "error_file_id"})
    assert abs(failed["failed_at"] - time.time()) < 30
    assert failed["errors"]["object"] == "list"
    errors = failed["errors"]["data"]
    assert [error["line"] for error in errors] == [2, 3, 4, 5]
    for error in errors:
        assert {"code", "message", "line"} <= error.keys() <= {"code", "message", "line", "param"}
        assert None not in error.values()
    assert failed["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_pages_join_to_the_whole_list(served_model: ServedModel, tmp_path: Path) -> None:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        empty = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
        assert server.http.get(BATCHES).json() == empty
        assert server.store is not None
        ids = [f"batch_{number}" for number in range(23)]
        now = int(time.time())
        for batch_id in ids:
            record = BatchRecord(0, batch_id, "/v1/completions", "file-x", "1h", now, now, "failed", failed_at=now)
            server.store.database.submit(functools.partial(add_batch, record=record)).result()
        assert [batch["id"] for batch in server.http.get(BATCHES).json()["data"]] == ids[:2:-1], "20 by default"
        for limit in (1, 7, 23, 100):
            seen: list[str] = []
            has_more = True
            while has_more:
                params = {"limit": limit} | ({"after": seen[-1]} if seen else {})
                page = server.http.get(BATCHES, params=params).json()
                assert page["object"] == "list"
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                for batch in page["data"]:
                    assert batch == server.http.get(f"{BATCHES}/{batch['id']}").json()
                    seen.append(batch["id"])
                has_more = page["has_more"]
            assert seen == ids[::-1]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("order=asc", 400, "order"),
        ("after=batch_x", 404, "after"),
    ],
)
def test_a_wrong_query_is_refused(server: LiveServer, query: str, status: int, param: str) -> None:
    answer = server.http.get(f"{BATCHES}?{query}")
    assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (status, param)


@pytest.mark.parametrize("batch_id", ["batch_x", "%00", "é", "x" * 1000])
def test_an_unknown_batch_is_not_found(server: LiveServer, batch_id: str) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = server.http.request(method, f"{BATCHES}/{batch_id}{path}")
        assert answer.status_code == 404
        assert len(assert_openai_error(answer.content)["message"]) < 300


def test_cancelling_and_deleting_by_the_state_of_a_batch(served_model: ServedModel, tmp_path: Path) -> None:
    with live_server(served_model, FakeEngine(never), data_dir=tmp_path) as server:
        file_id = upload(server, batch_line("1") + batch_line("2", n=0))["id"]
        created = create(server, file_id)
        wait_for(server, created["id"], lambda batch: batch["request_counts"]["failed"] == 1)
        refused = server.http.delete(f"/v1/files/{file_id}")
        assert (refused.status_code, assert_openai_error(refused.content)["code"]) == (409, "conflict")
        assert created["id"] in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        cancelling = server.http.post(f"{BATCHES}/{created['id']}/cancel").json()
        assert cancelling["status"] == "cancelling"
        assert abs(cancelling["cancelling_at"] - time.time()) < 10
        assert "cancelled_at" not in cancelling
        cancelled = finish(server, created["id"])
        assert cancelled["status"] == "cancelled"
        assert cancelled["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        assert "output_file_id" not in cancelled
        content = server.http.get(f"/v1/files/{cancelled['error_file_id']}/content").content
        first, second = (orjson.loads(line) for line in content.splitlines())
        assert (first["custom_id"], first["response"], first["error"]["code"]) == ("1", None, "batch_cancelled")
        assert (second["custom_id"], second["response"]["status_code"], second["error"]) == ("2", 400, None)
        again = server.http.post(f"{BATCHES}/{created['id']}/cancel")
        assert (again.status_code, assert_openai_error(again.content)["code"]) == (409, "conflict")
        assert "'cancelled'" in again.json()["error"]["message"]
        assert server.http.delete(f"/v1/files/{file_id}").json()["deleted"]
        assert server.http.get(f"{BATCHES}/{created['id']}").json() == cancelled
