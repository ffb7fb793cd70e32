"""Adapters over HTTP: loads and unloads by every name, and which adapter each endpoint's requests get."""

import base64
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.server.helpers.adapter_files import CONFIG, digest_of, engine_with_adapters, keeping, loads, save_adapter
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.served_model import ServedModel

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.fixture
def server(served_model: ServedModel, tmp_path: Path) -> Iterator[LiveServer]:
    model = replace(served_model, rl=True, model_aliases=("alias",))
    own = keeping(tmp_path / "own")
    with live_server(model, engine_with_adapters(), predecessors=own, rl=True, model_aliases="alias") as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", 1)


def assert_refused(answer: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert param in (error["param"], None)


def asked(server: LiveServer) -> tuple[str, str]:
    """Adapter and version of the newest request."""
    request = server.engine.requests[-1]
    return request.adapter, request.adapter_version


LOADS = ("/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter")


@pytest.mark.parametrize("route", LOADS)
def test_an_adapter_is_loaded_listed_asked_and_unloaded(server: LiveServer, source: Path, route: str) -> None:
    body = {"lora_name": "sql", "lora_path": str(source)}
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200
    digest = digest_of(source)
    if route == "/load_lora_adapter":
        loaded = {"lora_id": digest, "lora_name": "sql", "lora_path": str(source), "pinned": True}
        assert answer.json() == {"success": True, "error_message": None, "loaded_adapters": {"sql": loaded}}
    else:
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text.startswith("Success: ")
    base, alias, adapter = server.http.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"], alias["parent"]) == ("org/small", None, None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql", "org/small", str(source))
    assert server.http.get("/v1/models/sql").json() == adapter
    assert_refused(server.http.get("/v1/models/mysql"), 404, "model_not_found")

    server.http.post("/v1/completions", json={"model": "sql", "prompt": "a", "max_tokens": 1})
    assert asked(server) == (digest, f"sql@{digest[:12]}")
    unload = "/unload_lora_adapter" if route == "/load_lora_adapter" else "/v1/unload_lora_adapter"
    answer = server.http.post(unload, json={"lora_name": "sql"})
    assert answer.status_code == 200
    for again in ("/unload_lora_adapter", "/v1/unload_lora_adapter"):
        assert_refused(server.http.post(again, json={"lora_name": "sql"}), 404, "not_found")
    assert len(server.http.get("/v1/models").json()["data"]) == 2


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_knows_adapters_as_models_and_never_puts_the_base_in_their_place(
    server: LiveServer, source: Path, path: str
) -> None:
    def post(model: str | None, **fields: Any) -> Any:
        body = BODIES[path] | fields | ({} if model is None else {"model": model})
        answer = server.http.post(path, json=body)
        if path in ENDPOINTS:
            line = orjson.dumps({"custom_id": "1", "url": path, "body": body})
            result = orjson.loads(server.http.post("/v1/bulk", content=line).content)
            assert result["response"]["status_code"] == answer.status_code
            if answer.status_code == 200:
                assert result["response"]["body"]["model"] == answer.json()["model"]
        return answer

    count = len(server.engine.requests)
    for name in ("sql", "SQL"):
        assert post(name).status_code == 404
    server.http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(source)})
    assert post("SQL").status_code == 404
    assert len(server.engine.requests) == count
    answer = post("sql")
    digest = digest_of(source)
    assert asked(server) == (digest, f"sql@{digest[:12]}")
    if path != "/generate":
        assert answer.json()["model"] == "sql"
        streamed = server.http.post(path, json=BODIES[path] | {"model": "sql", "stream": True})
        assert path == "/inference/v1/generate" or b'"model":"sql"' in streamed.content
    for name in ("org/small", "alias", "default", None):
        answer = post(name)
        if name is None and path == "/v1/messages":
            continue
        assert answer.status_code == 200
        assert asked(server) == ("", "")
        assert path == "/generate" or answer.json()["model"] == "org/small"
    server.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    count = len(server.engine.requests)
    assert post("sql").status_code == 404
    assert len(server.engine.requests) == count


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_tokens_are_counted_for_adapters_too(server: LiveServer, source: Path, path: str) -> None:
    body = {"model": "sql", "prompt": "a"} if path == "/tokenize" else {**BODIES["/v1/messages"], "model": "sql"}
    body.pop("max_tokens", None)
    assert server.http.post(path, json=body).status_code == 404
    server.http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(source)})
    assert server.http.post(path, json=body).status_code == 200


def test_lora_path_of_generate_is_the_name_of_an_adapter(server: LiveServer, source: Path) -> None:
    body = BODIES["/generate"] | {"lora_path": "sql"}
    answer = server.http.post("/generate", json=body)
    assert_refused(answer, 404, "model_not_found", "lora_path")
    server.http.post("/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(source), "pinned": False})
    for prompt in ({"text": "hello"}, {"text": None, "input_ids": [1]}):
        for model in ({}, {"model": "sql"}):
            assert server.http.post("/generate", json=body | prompt | model).status_code == 200
            assert asked(server)[0] == digest_of(source)
    assert server.http.post("/generate", json=body | {"lora_path": None}).status_code == 200
    assert asked(server)[0] == ""
    answer = server.http.post("/generate", json=body | {"model": "default"})
    assert_refused(answer, 400, "invalid_value", "lora_path")


def test_a_name_is_replaced_only_where_a_client_may_expect_it(server: LiveServer, source: Path, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", 2)
    first, second = ({"lora_name": "sql", "lora_path": str(path)} for path in (source, other))
    assert server.http.post("/v1/load_lora_adapter", json=first).status_code == 200
    assert server.http.post("/v1/load_lora_adapter", json=first).status_code == 200
    answer = server.http.post("/v1/load_lora_adapter", json=second)
    assert_refused(answer, 400, "invalid_value", "lora_path")
    assert "loaded already" in answer.json()["error"]["message"]
    assert server.http.post("/v1/load_lora_adapter", json=second | {"load_inplace": True}).status_code == 200
    for route, body, path in (
        ("/load_lora_adapter", first, source),
        ("/skyrl/v1/load_lora_adapter", second, other),
        ("/load_lora_adapter", first, source),
    ):
        assert server.http.post(route, json=body).status_code == 200
        server.http.post("/v1/completions", json={"model": "sql", "prompt": "a", "max_tokens": 1})
        assert asked(server)[0] == digest_of(path)


@pytest.mark.parametrize("name", ["org/small", "alias", "default", "tgi"])
def test_an_adapter_cannot_have_a_name_of_the_model(server: LiveServer, source: Path, name: str) -> None:
    for route in LOADS:
        answer = server.http.post(route, json={"lora_name": name, "lora_path": str(source)})
        assert_refused(answer, 400, "invalid_value", "lora_name")
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 404
    assert loads(server.engine) == []


@pytest.mark.parametrize("route", LOADS)
def test_wrong_bodies_and_missing_files_are_refused(
    server: LiveServer, source: Path, tmp_path: Path, route: str
) -> None:
    whole = {"lora_name": "sql", "lora_path": str(source)}
    for name in whole:
        for value in (None, "", 5):
            answer = server.http.post(route, json=whole | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        answer = server.http.post(route, json={other: whole[other] for other in whole if other != name})
        assert_refused(answer, 400, "missing_required_parameter", name)
    answer = server.http.post(route, json=whole | {"lora_path": str(tmp_path / "absent")})
    assert_refused(answer, 404, "not_found", "lora_path")
    assert server.http.post(route, json=whole | {"surprise": 1}).status_code == 400
    assert loads(server.engine) == []


def test_an_adapter_may_come_in_a_request_as_safetensors_and_never_as_a_pickle(
    server: LiveServer, source: Path
) -> None:
    def post(payload: object, field: str = "serialized_named_tensors", **fields: Any) -> Any:
        body = {"lora_name": "sent", "config_dict": CONFIG, field: payload, "pinned": False, **fields}
        return server.http.post("/load_lora_adapter_from_tensors", json=body)

    class Runs:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("the server has read a pickle",))

    weights = (source / "adapter_model.safetensors").read_bytes()
    encoded = base64.b64encode(weights).decode()
    for bad in (
        base64.b64encode(pickle.dumps(Runs())).decode(),
        [base64.b64encode(pickle.dumps({"a": 1}, protocol=0)).decode()],
        "no base64!",
        "",
    ):
        answer = post(bad)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "serialized_named_tensors"
        assert not bad or "must be base64 of a safetensors file" in answer.json()["error"]["message"]
    for refused in (
        post([encoded, encoded[:-4]]),
        post(encoded, serialized_tensors=encoded),
        post(None),
        post([]),
        post(encoded[: len(encoded) // 2 // 4 * 4]),
        post(encoded, load_format="flattened_bucket"),
        post(encoded, config_dict=CONFIG | {"r": 3}),
        post(encoded, config_dict=CONFIG | {"use_dora": True}),
        post(encoded, lora_name="default"),
    ):
        assert refused.status_code == 400
    assert loads(server.engine) == []
    for payload, field in (
        (encoded, "serialized_named_tensors"),
        ([encoded, encoded], "serialized_named_tensors"),
        (encoded, "serialized_tensors"),
    ):
        answer = post(payload, field)
        assert answer.json()["loaded_adapters"]["sent"]["lora_id"] == digest_of(source)
    server.http.post("/v1/completions", json={"model": "sent", "prompt": "a", "max_tokens": 1})
    assert asked(server)[0] == digest_of(source)


def test_a_directory_with_an_adapter_is_new_weights_for_the_models_own_names(server: LiveServer, source: Path) -> None:
    for path, body in (
        ("/update_weights", {"weight_dir": str(source)}),
        ("/update_weights", {"update_info": {"weight_dir": str(source), "version": "step-2"}}),
        ("/update_weights_from_disk", {"model_path": str(source)}),
        ("/collective_rpc", {"method": "update_weights", "kwargs": {"update_info": {"weight_dir": str(source)}}}),
    ):
        assert server.http.post(path, json=body).status_code == 200
        version = server.http.get("/get_weight_version").json()["weight_version"]
        for name in ("org/small", "alias", None):
            answer = server.http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
            assert answer.json()["model"] == "org/small"
            assert asked(server) == (digest_of(source), version)
    assert version == "step-2.2"
    assert len(server.http.get("/v1/models").json()["data"]) == 2


def test_server_info_tells_what_may_be_loaded(served_model: ServedModel) -> None:
    params = {"config_format": "json"}
    flags = {"max_loras": 3, "max_lora_rank": 32}
    for engine, expected in ((engine_with_adapters(), {"max_lora_rank": 32, "max_loras": 3}), (FakeEngine(), None)):
        with live_server(replace(served_model, rl=True), engine, rl=True, **flags) as server:
            info = server.http.get("/server_info", params=params).json()["vllm_config"]
        assert info["lora_config"] == expected


def test_without_rl_loads_are_refused_with_the_flag_to_set(served_model: ServedModel, source: Path) -> None:
    with live_server(served_model, engine_with_adapters()) as server:
        for route in (*LOADS, "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/v1/unload_lora_adapter"):
            answer = server.http.post(route, json={"lora_name": "sql", "lora_path": str(source)})
            assert answer.status_code == 404
            assert "rl=T" in answer.json()["error"]["message"]


def test_the_request_log_names_the_adapter(
    served_model: ServedModel, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = keeping(tmp_path / "own")
    model = replace(served_model, rl=True)
    with (
        caplog.at_level("INFO", "tokasaurus.requests"),
        live_server(model, engine_with_adapters(), predecessors=own, rl=True, request_log=True) as server,
    ):
        server.http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(source)})
        for name in ("sql", "default"):
            server.http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
    assert ["sql" in line.getMessage() for line in caplog.records if "request" in line.getMessage()] == [True, False]
