"""What the server's log has of requests."""

import logging
from pathlib import Path

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import live_server
from tokasaurus.server.served_model import ServedModel

SECRET = "zebra"


def test_prompts_and_answers_are_not_logged_at_any_level(
    served_model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With all that the web server logs at its own lowest level: also refused bodies, lines of bulk and batches, and an
    aborted sequence. The fake engine's answers repeat the prompt."""
    caplog.set_level(1)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "tokasaurus"):
        caplog.set_level(1, logger=name)
    engine = FakeEngine()
    with live_server(served_model, engine, data_dir=tmp_path, uvicorn_log_level="trace") as server:
        caplog.set_level(1, logger="uvicorn.asgi")
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
    assert any(record.levelno < logging.DEBUG for record in logged), "the lowest level is on"
    assert not [record for record in logged if SECRET in record.getMessage() or SECRET in (record.exc_text or "")]


@pytest.mark.parametrize(("level", "is_told"), [("info", False), ("debug", True)])
def test_the_web_server_tells_its_start_and_end_at_debug_level_alone(
    served_model: ServedModel, caplog: pytest.LogCaptureFixture, level: str, is_told: bool
) -> None:
    with live_server(served_model, FakeEngine(), uvicorn_log_level=level):
        logging.getLogger("uvicorn.error").warning("a warning")
    messages = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert "a warning" in messages
    told = {"Waiting for application startup.", "Application startup complete.", "Application shutdown complete."}
    assert (told <= set(messages)) == is_told
    assert len(messages) == 1 or is_told
