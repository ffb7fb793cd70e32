"""Names of the model: none, aliases, and any, on every endpoint."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import LIMITS, FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_client import sync_client
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.served_model import ServedModel

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
NONE: list[dict[str, Any]] = [{}, {"model": None}, {"model": ""}, {"model": "tgi"}, {"model": "dummy"}]
ALIASES = ("gpt-4o", "team/best", "//odd/name/")


@pytest.fixture(scope="module")
def named(served_model: ServedModel) -> Iterator[LiveServer]:
    model = replace(served_model, model_aliases=ALIASES, source="org/base", model_flag="/models/base/")
    with live_server(model, FakeEngine()) as server:
        yield server


@pytest.fixture(scope="module")
def unnamed(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(replace(served_model, model_aliases=("gpt-4o", "*")), FakeEngine()) as server:
        yield server


def status_of(server: LiveServer, path: str, fields: dict[str, Any]) -> int:
    """The status of a body with these fields; in bulk, if it is an endpoint of lines, it is the same."""
    body = BODIES[path] | fields
    answer = server.http.post(path, json=body)
    if path in ENDPOINTS:
        line = orjson.dumps({"custom_id": "1", "url": path, "body": body})
        result = orjson.loads(server.http.post("/v1/bulk", content=line).content)
        assert result["response"]["status_code"] == answer.status_code
        streamed = server.http.post(path, json=body | {"stream": True})
        assert streamed.status_code == answer.status_code
        if answer.status_code == 200:
            assert {answer.json()["model"], result["response"]["body"]["model"]} == {"org/small"}
            assert b'"model":"org/small"' in streamed.content
    return answer.status_code


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", NONE)
def test_a_body_without_a_model_is_the_served_ones(
    shared_server: LiveServer, path: str, fields: dict[str, Any]
) -> None:
    assert status_of(shared_server, path, fields) == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "status"),
    [*((name, 200) for name in (*ALIASES, "/models/base", "/models/base/")), ("gpt-4", 404), ("GPT-4o", 404)],
)
def test_aliases_are_names_of_the_model(named: LiveServer, path: str, name: str, status: int) -> None:
    assert status_of(named, path, {"model": name}) == status


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["gpt-4", "claude", "x" * 5000, "é"])
def test_with_the_flag_any_model_every_name_is_one(unnamed: LiveServer, path: str, name: str) -> None:
    assert status_of(unnamed, path, {"model": name}) == 200
    assert unnamed.http.post(path, json=BODIES[path] | {"model": 5}).status_code == 400


def test_the_list_has_every_alias_with_root_and_length(named: LiveServer) -> None:
    models = named.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["org/small", *ALIASES]
    assert {(model["root"], model["max_model_len"], model["object"]) for model in models} == {
        ("org/base", LIMITS.max_tokens_per_sequence, "model")
    }
    client = sync_client(named)
    for model in client.models.list():
        assert client.models.retrieve(model.id) == model
    for other in ("default", "/models/base/", "models/base"):
        assert client.models.retrieve(other).id == "org/small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_any_model_is_found_by_its_path(unnamed: LiveServer) -> None:
    client = sync_client(unnamed)
    assert [model.id for model in client.models.list()] == ["org/small", "gpt-4o"]
    assert [client.models.retrieve(name).id for name in ("gpt-4o", "claude", "a/b")] == ["gpt-4o", *["org/small"] * 2]


def test_lines_of_batches_need_no_model(served_model: ServedModel, tmp_path: Any) -> None:
    with live_server(served_model, FakeEngine(), data_dir=tmp_path) as server:
        client = sync_client(server)
        lines = [{"custom_id": path, "method": "POST", "url": path, "body": BODIES[path]} for path in (COMPLETIONS,)]
        stored = client.files.create(file=("a.jsonl", b"\n".join(map(orjson.dumps, lines))), purpose="batch")
        batch = client.batches.create(input_file_id=stored.id, endpoint=COMPLETIONS, completion_window="24h")
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 1)
        assert batch.output_file_id is not None
        result = orjson.loads(client.files.content(batch.output_file_id).content)
        assert result["response"]["body"]["model"] == "org/small"


def test_an_unknown_name_is_still_an_error(shared_server: LiveServer) -> None:
    answer = shared_server.http.post(CHAT, json=minimal_body(CHAT) | {"model": "gpt-4"})
    assert (answer.status_code, assert_openai_error(answer.content)["code"]) == (404, "model_not_found")
