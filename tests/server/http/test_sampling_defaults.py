"""A model's own sampling parameters are used where a body has none, at every endpoint, live, in bulk and in a batch."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, MODEL_DEFAULTS, SamplingParams
from tokasaurus.server.served_model import ServedModel

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05)
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: minimal_body(COMPLETIONS),
    CHAT: minimal_body(CHAT),
    "/v1/responses": {"model": "default", "input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = dataclasses.replace(served_model, default_sampling=DEFAULTS)
    with live_server(model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def test_the_declared_defaults_are_all_that_a_model_may_have() -> None:
    assert [name for name in SamplingParams._fields if name in MODEL_DEFAULTS] == [
        name for name, one, other in zip(DEFAULTS._fields, DEFAULTS, SamplingParams(), strict=True) if one != other
    ]


@pytest.mark.parametrize("path", BODIES)
def test_what_a_body_says_wins_and_null_says_nothing(server: LiveServer, path: str) -> None:
    def sampled(**fields: Any) -> SamplingParams:
        answer = server.http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
        if path == "/v1/responses":
            repeated = [answer.json()[name] for name in ("temperature", "top_p")]
            assert repeated == [fields.get(name) or getattr(DEFAULTS, name) for name in ("temperature", "top_p")]
        return server.engine.requests[-1].sampling

    assert sampled() == sampled(**dict.fromkeys(MODEL_DEFAULTS)) == DEFAULTS
    for name in MODEL_DEFAULTS:
        neutral, value = CLIENT_PARAMETERS[name].default, CLIENT_PARAMETERS[name].strong
        assert sampled(**{name: value}) == DEFAULTS._replace(**{name: value})
        assert sampled(**{name: neutral}) == DEFAULTS._replace(**{name: SamplingParams._field_defaults[name]})


def test_lines_of_bulk_and_of_a_batch_have_the_defaults(server: LiveServer) -> None:
    lines = [
        {"custom_id": path, "method": "POST", "url": path, "body": body}
        for path, body in BODIES.items()
        if path != "/v1/messages"
    ]
    before = len(server.engine.requests)
    server.http.post("/v1/bulk", content="\n".join(map(json.dumps, lines)))
    files = {"file": ("input.jsonl", json.dumps(lines[0]).encode())}
    file_id = server.http.post("/v1/files", data={"purpose": "batch"}, files=files).json()["id"]
    created = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = server.http.post("/v1/batches", json=created).json()
    while batch["status"] not in ("completed", "failed"):
        batch = server.http.get(f"/v1/batches/{batch['id']}").json()
    assert [request.sampling for request in server.engine.requests[before:]] == [DEFAULTS] * 4
