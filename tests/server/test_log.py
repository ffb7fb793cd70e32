"""What the server's log has of requests."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, minimal_body
from tests.server.helpers.client_driver import make_request
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import live_server, wait_until_ready
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, SequenceTimes
from tokasaurus.monitoring.request_log import LoggedRequest
from tokasaurus.server.served_model import ServedModel

SECRET = "zebra"


def delta_of(request: GenerateRequest, index: int, times: SequenceTimes) -> SequenceDelta:
    return SequenceDelta(request.request_id, index, [1], None, "stop", 0, 1, 0, 0, times=times)


def test_prompts_and_answers_are_not_logged_at_any_level(
    served_model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With all that the web server logs: also refused bodies, lines of bulk and batches, and an
    aborted sequence. The fake engine's answers repeat the prompt."""
    caplog.set_level(1)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "tokasaurus"):
        caplog.set_level(1, logger=name)
    engine = FakeEngine()
    with live_server(served_model, engine, data_dir=tmp_path, log_level="debug") as server:
        chat = {"model": "default", "messages": [{"role": "user", "content": SECRET}]}
        completion = minimal_body(COMPLETIONS) | {"prompt": SECRET, "max_tokens": 5}
        for body in (completion, {**completion, "stream": True}, {**completion, "echo": True}):
            assert server.http.post(COMPLETIONS, json=body).status_code == 200
        assert server.http.post(CHAT, json=chat).status_code == 200
        for body in (chat | {"n": 0}, chat | {"messages": [{"role": SECRET, "content": SECRET}]}):
            assert server.http.post(CHAT, json=body).status_code == 400
        assert server.http.post(CHAT, content=f'{{"{SECRET}'.encode()).status_code == 400
        line = orjson.dumps({"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": completion})
        answer = server.http.post("/v1/bulk", content=line, headers={"content-type": "application/x-ndjson"})
        assert SECRET in answer.text
        engine.script = lambda _request, _index: Reply([], error="not finite", error_code="numerical_error")
        assert server.http.post(COMPLETIONS, json=completion).status_code == 500
    logged = [record for record in caplog.records if record.name.startswith(("uvicorn", "tokasaurus"))]
    assert any(record.name == "uvicorn.access" for record in logged), "a line for each request"
    assert not [record for record in logged if SECRET in record.getMessage() or SECRET in (record.exc_text or "")]


def logged_requests(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """Fields of the lines, once there are `count`: a line is written after its answer."""
    deadline = time.monotonic() + 30
    while True:
        records = [record for record in caplog.records if record.name == "tokasaurus.requests"]
        if len(records) >= count:
            assert len(records) == count
            for record in records:
                assert record.getMessage().startswith(f"request {vars(record)['fields']['id']} of ")
            return [vars(record)["fields"] for record in records]
        assert time.monotonic() < deadline, records
        time.sleep(0.01)


def test_each_request_has_a_line_with_its_key_tokens_and_end_and_no_text(
    served_model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice\nbob key-of-bob\n")
    engine = FakeEngine()
    asked = {"model": "default", "prompt": SECRET, "max_tokens": 3}
    flags = {"request_log": True, "api_keys_file": str(keys)}
    with live_server(served_model, engine, data_dir=tmp_path / "data", start_engine=False, **flags) as server:
        server.http.headers["Authorization"] = "Bearer key-of-alice"
        engine.start()
        wait_until_ready(server.http)
        caplog.clear()
        whole = server.http.post(COMPLETIONS, json=asked | {"n": 2}).json()
        (line,) = logged_requests(caplog, 1)
        assert line["id"] == f"{whole['id']}-0"
        assert (line["client"], line["model"], line["samples"]) == ("alice", served_model.name, 2)
        usage = whole["usage"]
        assert line["prompt_tokens"] == usage["prompt_tokens"] == len(SECRET)
        assert line["completion_tokens"] == usage["completion_tokens"] == 6
        assert line["reasons"] == {"length": 2}
        assert 0 <= line["seconds"] < 30

        server.http.headers["Authorization"] = "Bearer key-of-bob"
        assert server.http.post(COMPLETIONS, json=asked | {"stream": True}).status_code == 200
        lines = orjson.dumps({"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": asked})
        server.http.post("/v1/bulk", content=lines, headers={"content-type": "application/x-ndjson"})
        for line in logged_requests(caplog, 3)[1:]:
            assert (line["client"].partition(":")[0], line["completion_tokens"]) == ("bob", 3)
            assert line["reasons"] == {"length": 1}
        assert server.http.post(COMPLETIONS, json=asked | {"n": 0}).status_code == 400
        engine.script = lambda _request, _index: Reply([], error="not finite", error_code="numerical_error")
        assert server.http.post(COMPLETIONS, json=asked).status_code == 500
        assert logged_requests(caplog, 4)[-1]["reasons"] == {"numerical_error": 1}
        engine.script = lambda request, _index: Reply(request.prompt_ids.tolist()[:1], finish_reason=None)
        with server.http.stream("POST", COMPLETIONS, json=asked | {"stream": True, "n": 3}):
            pass
        line = logged_requests(caplog, 5)[-1]
        assert (line["reasons"], line["completion_tokens"]) == ({"cancelled": 3}, 3)
        engine.script = echo
        file = server.http.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert server.http.post("/v1/batches", json=body).status_code == 200
        line = logged_requests(caplog, 6)[-1]
        assert (line["kind"], line["reasons"]) == ("batch", {"length": 1})
    texts = [record.getMessage() + str(vars(record).get("fields")) for record in caplog.records]
    assert not [text for text in texts if SECRET in text or "key-of" in text]


def test_without_the_flag_requests_have_no_lines(served_model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    with live_server(served_model, FakeEngine()) as server:
        assert server.http.post(COMPLETIONS, json=minimal_body(COMPLETIONS)).status_code == 200
    assert logged_requests(caplog, 0) == []


def test_times_of_a_request_are_of_its_first_sample_and_a_replay_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    request = dataclasses.replace(make_request("a", [1, 2], 3), arrived_s=time.monotonic() - 10)
    logged = LoggedRequest(request, "m")
    began = request.arrived_s
    logged.note_sequence(delta_of(request, 0, SequenceTimes(began + 1, began + 2, began + 3, 7)))
    logged.restart()
    logged.note_sequence(delta_of(request, 1, SequenceTimes(began + 5, began + 6, began + 8, 4)))
    logged.note_sequence(delta_of(request, 0, SequenceTimes(began + 4, began + 7, began + 9, 3)))
    logged.write(1, "cancelled", 0)
    (line,) = logged_requests(caplog, 1)
    assert (line["queue_seconds"], line["first_token_seconds"]) == (pytest.approx(4), pytest.approx(6))
    assert line["seconds"] == pytest.approx(10, abs=1)
    assert (line["completion_tokens"], line["reasons"]) == (7, {"stop": 2, "cancelled": 1})


@pytest.mark.parametrize(("level", "is_told"), [("info", False), ("debug", True)])
def test_the_web_server_tells_its_start_and_end_at_debug_level_alone(
    served_model: ServedModel, caplog: pytest.LogCaptureFixture, level: str, is_told: bool
) -> None:
    with live_server(served_model, FakeEngine(), log_level=level):
        logging.getLogger("uvicorn.error").warning("a warning")
    messages = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert "a warning" in messages
    told = {"Waiting for application startup.", "Application startup complete.", "Application shutdown complete."}
    assert (told <= set(messages)) == is_told
    assert len(messages) == 1 or is_told
